"use strict";
// Tooltips that also work by touch: a mark's <title> is shown at once instead of after the browser's pause.
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "status");
document.body.append(tip);
for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
for (const badge of document.querySelectorAll(".badge[title]")) {
  badge.dataset.tip = badge.title;
  badge.removeAttribute("title");
}
const show = (event) => {
  const mark = event.target.closest?.("[data-tip]");
  tip.classList.toggle("on", Boolean(mark));
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const box = mark.getBoundingClientRect();
  const left = Math.min(Math.max(box.left + box.width / 2 - tip.offsetWidth / 2, 6), innerWidth - tip.offsetWidth - 6);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = left + "px";
  tip.style.top = (above > 6 ? above : box.bottom + 8) + "px";
};
document.addEventListener("pointerover", show);
document.addEventListener("pointerdown", show);
addEventListener("scroll", () => tip.classList.remove("on"), { passive: true });

// One run brought forward in all charts and tables: while its name is pointed at, or for good once it is pressed.
const names = [...document.querySelectorAll("button[data-focus]")];
let kept = null;
const focus = (run) => {
  for (const part of document.querySelectorAll("[data-run]")) {
    part.classList.toggle("dim", run !== null && part.dataset.run !== run);
  }
};
for (const name of names) {
  const run = name.dataset.focus;
  name.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && focus(run));
  name.addEventListener("pointerleave", () => focus(kept));
  name.addEventListener("click", () => {
    kept = kept === run ? null : run;
    for (const other of names) other.setAttribute("aria-pressed", String(other.dataset.focus === kept));
    focus(kept);
  });
}
