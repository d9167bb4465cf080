"use strict";
// Asks for the state of the training, which is answered about once a second, and shows what has changed.
const GONE = 3;  // So many questions in a row without an answer mean that nobody is there any more.
const PATIENCE = 15000;
const shown = {};
let following = false;

function show(told) {
  document.title = told.title;
  for (const part of all("[data-part]")) {
    const now = told.parts[part.dataset.part];
    if (shown[part.dataset.part] !== now) part.innerHTML = shown[part.dataset.part] = now;
  }
}

async function ask() {
  const answer = await fetch("state", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

const pause = (time) => new Promise((go) => setTimeout(go, time));

// Not while the page is hidden: then nobody looks.
async function follow() {
  if (following) return;
  following = true;
  for (let missed = 0; !document.hidden;) {
    try {
      const told = await ask();
      missed = 0;
      show(told);
      if (told.ended) return;
    } catch {
      if (++missed === GONE) {
        document.querySelector("[data-part=end]").textContent =
          `The run has ended: nobody answers here any more. Results are in ${document.getElementById("folder").textContent}.`;
        break;
      }
      await pause(300);
    }
  }
  following = false;
}

addEventListener("DOMContentLoaded", () => {
  const figures = document.querySelector(".figures");
  const fieldOf = (event) => event.target.closest(".curves .field");
  figures.addEventListener("pointermove", (event) => { if (fieldOf(event)) readOut(fieldOf(event), event); });
  figures.addEventListener("pointerout", (event) => {
    const output = fieldOf(event)?.querySelector(".readout");
    if (output) output.hidden = true;
  });
  document.addEventListener("visibilitychange", follow);
  follow();
});
