"use strict";
// Tooltips, by mouse and by touch.
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "status");
document.body.append(tip);
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
// In a chart of all runs, what has a run's colour is the run's.
const names = [...document.querySelectorAll("button[data-focus]")];
const colourOf = (part) => /var\(--s\d\)/.exec(`${part.getAttribute("fill")} ${part.getAttribute("stroke")}`)?.[0];
const parts = [...document.querySelectorAll("[data-run]")].map((part) => [part, part.dataset.run]);
for (const part of document.querySelectorAll(".plot [fill], .plot [stroke]")) {
  const colour = colourOf(part);
  if (colour) parts.push([part, colour]);
}
let kept = null;
const focus = (name) => {
  const own = name && [name.dataset.focus, name.style.getPropertyValue("--c").trim()];
  for (const [part, whose] of parts) part.classList.toggle("dim", Boolean(own) && !own.includes(whose));
};
for (const name of names) {
  name.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && focus(name));
  name.addEventListener("pointerleave", () => focus(kept));
  name.addEventListener("click", () => {
    kept = kept === name ? null : name;
    for (const other of names) other.setAttribute("aria-pressed", String(other === kept));
    focus(kept);
  });
}
