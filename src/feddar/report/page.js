"use strict";
// Light and dark: as the system says until the reader chooses; the choice is kept where the browser allows it.
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
const STORED = "feddar-theme";

function remembered() {
  try { return localStorage.getItem(STORED); } catch { return null; }
}

function remember(theme) {
  try { localStorage.setItem(STORED, theme); } catch { /* the page works without */ }
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}

if (remembered()) root.dataset.theme = remembered();

// Figures carry the light theme's colours; for the dark one each colour is exchanged for its counterpart.
function recoloured(value, colours, key = "") {
  if (Array.isArray(value)) return value.map((item) => recoloured(item, colours, key));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, recoloured(item, colours, name)]));
  }
  return key.endsWith("color") && colours[value] || value;
}

// Curves of methods that are not ticked are thin and faint, behind the others; `meta` names a curve's method.
function emphasised(curves, faint) {
  const ticked = new Set([...document.querySelectorAll(".lines :checked")].map((box) => box.value));
  const behind = curves.filter((curve) => curve.meta && !ticked.has(curve.meta));
  const front = curves.filter((curve) => !behind.includes(curve));
  const line = { color: faint, width: 1, dash: "solid" };
  return [...behind.map((curve) => ({ ...curve, line })), ...front];
}

function sortRows(button) {
  const head = button.closest("th");
  const rowOf = (row) => row.cells[head.cellIndex];
  const before = head.ariaSort;
  const order = before === "none" ? button.dataset.first : before === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement.cells) other.ariaSort = other === head ? order : "none";
  const sign = order === "ascending" ? 1 : -1;
  const body = button.closest("table").tBodies[0];
  const text = head.cellIndex === 0;
  const value = (row) => Number(rowOf(row).dataset.value ?? NaN);
  const compare = (a, b) => text
    ? sign * rowOf(a).textContent.localeCompare(rowOf(b).textContent)
    : Number.isNaN(value(a)) - Number.isNaN(value(b)) || sign * (value(a) - value(b)) || 0;
  body.append(...[...body.rows].sort(compare));
}

addEventListener("DOMContentLoaded", () => {
  const { figures, dark, faint } = JSON.parse(document.getElementById("embedded").textContent);
  let printing = false;

  function draw(key) {
    const place = document.getElementById(key);
    const { data, layout } = figures[key];
    const width = place.clientWidth;
    const sized = { ...layout, width, xaxis: { ...layout.xaxis, nticks: Math.max(4, Math.floor(width / 60)) } };
    if (printing) Object.assign(sized, { height: 0.8 * layout.height, font: { ...layout.font, size: 10 } });
    const colours = isDark() && !printing ? dark : {};
    Plotly.react(place, recoloured(emphasised(data, faint), colours), recoloured(sized, colours), { displayModeBar: false });
  }
  const drawAll = () => Object.keys(figures).forEach(draw);

  const button = document.getElementById("theme");
  function showTheme() {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
    drawAll();
  }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);

  for (const sorter of document.querySelectorAll(".sortable button")) {
    sorter.addEventListener("click", () => sortRows(sorter));
  }
  document.querySelector(".lines")?.addEventListener("change", drawAll);
  document.getElementById("cells-method")?.addEventListener("change", (event) => {
    for (const part of document.querySelectorAll("[data-method]")) part.hidden = part.dataset.method !== event.target.value;
  });

  function print(now) {
    printing = now;
    for (const part of document.querySelectorAll(now ? ".printed:not([open])" : ".printed.opened")) {
      part.open = now;
      part.classList.toggle("opened", now);
    }
    root.classList.toggle("printing", now);
    const room = document.querySelector("main").clientWidth;
    for (const table of document.querySelectorAll("table")) {
      table.style.zoom = 1;
      if (now) table.style.zoom = Math.min(1, room / table.offsetWidth);
    }
    drawAll();
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

  showTheme();
  const watcher = new ResizeObserver((changed) => {
    for (const { target } of changed) {
      if (target.clientWidth && target.clientWidth !== target.layout?.width) draw(target.id);
    }
  });
  for (const key of Object.keys(figures)) watcher.observe(document.getElementById(key));
});
