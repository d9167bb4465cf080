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

const all = (selector, within = document) => [...within.querySelectorAll(selector)];

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

// Curves of methods that are not ticked are thin and faint, behind the others.
function emphasise() {
  const ticked = new Set(all(".lines :checked").map((box) => box.value));
  for (const line of all("#training polyline")) line.classList.toggle("behind", !ticked.has(line.dataset.method));
  for (const drawing of all("#training .curves svg")) {
    const lines = all("polyline", drawing);
    drawing.append(...lines.filter((line) => !line.classList.contains("behind")));
  }
}

// Beside the pointer: the values of the lines in colour at the nearest round or threshold that was drawn.
function readOut(field, event) {
  const area = field.getBoundingClientRect();
  const [low, high] = field.dataset.span.split(" ").map(Number);
  const wanted = low + (high - low) * (event.clientX - area.left) / area.width;
  const steps = field.dataset.steps.split(" ");
  const away = (i) => Math.abs(steps[i] - wanted);
  const nearest = steps.reduce((best, _, i) => away(i) < away(best) ? i : best, 0);
  const said = all("polyline:not(.behind)", field).map((line) => {
    const part = document.createElement("span");
    part.className = line.classList[0];
    part.textContent = `${line.dataset.method} ${line.dataset.texts.split(" ")[nearest]}`;
    return part;
  });
  const output = field.querySelector(".readout");
  output.replaceChildren(`${field.dataset.step} ${steps[nearest]}`, ...said);
  output.hidden = false;
  output.classList.toggle("left", event.clientX > area.left + area.width / 2);
}

addEventListener("DOMContentLoaded", () => {
  for (const chooser of all(".chooser, #theme")) chooser.hidden = false;
  const button = document.getElementById("theme");
  const nameTheme = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();

  document.getElementById("metric")?.addEventListener("change", (event) => {
    for (const view of all("[data-view]")) view.hidden = view.dataset.view !== event.target.value;
  });
  for (const chooser of all(".choose-run")) chooser.addEventListener("change", () => {
    for (const other of all(".choose-run")) other.value = chooser.value;
    for (const run of all("[data-run]")) run.hidden = run.dataset.run !== chooser.value;
  });
  for (const sorter of all(".sortable button")) sorter.addEventListener("click", () => sortRows(sorter));
  document.querySelector(".lines")?.addEventListener("change", emphasise);
  for (const field of all(".field[data-steps]:not([data-steps=''])")) {
    field.addEventListener("pointermove", (event) => readOut(field, event));
    field.addEventListener("pointerleave", () => { field.querySelector(".readout").hidden = true; });
  }

  // One table of cells for each metric; its numbers are those of the method that is chosen.
  const cells = JSON.parse(document.getElementById("embedded").textContent);
  document.getElementById("cells-method")?.addEventListener("change", (event) => {
    for (const name of all(".shown-method")) name.textContent = event.target.value;
    for (const heat of all("[data-heat]")) {
      const values = cells[heat.closest("[data-view]").dataset.view][event.target.value];
      all("td", heat).forEach((cell, i) => {
        const [text, shade] = values[i];
        cell.textContent = text;
        cell.className = shade !== undefined ? "shaded" : /^(n\/a|–)$/.test(text) ? "absent" : "";
        cell.style.setProperty("--shade", shade ?? 0);
      });
    }
  });

  function print(now) {
    for (const part of all(now ? ".printed:not([open])" : ".printed.opened")) {
      part.open = now;
      part.classList.toggle("opened", now);
    }
    root.classList.toggle("printing", now);
    const room = document.querySelector("main").clientWidth;
    for (const table of all("table")) {
      table.style.zoom = 1;
      if (now) table.style.zoom = Math.min(1, room / table.offsetWidth);
    }
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
});
