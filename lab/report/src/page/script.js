"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  // Shows tooltips immediately instead of after the browser's delay.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let hovered = null;
  document.addEventListener("pointerover", (event) => {
    const shape = event.target.closest?.("svg.chart path.m, svg.chart rect");
    if (hovered) { hovered[0].prepend(hovered[1]); hovered = null; }
    const title = shape?.querySelector("title");
    tip.hidden = !title;
    if (!title) return;
    hovered = [shape, title];
    tip.textContent = title.textContent;
    title.remove();
    const box = shape.getBoundingClientRect();
    const left = Math.min(box.left + box.width / 2 + 10, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, box.top - tip.offsetHeight - 8)}px`;
  });
  // A click on a series toggles every group with its name in the same chart.
  document.addEventListener("click", (event) => {
    const series = event.target.closest?.("svg.chart g[data-s]");
    if (!series) return;
    const name = series.dataset.s;
    const off = !series.classList.contains("off");
    for (const one of all("g[data-s]", series.ownerSVGElement)) {
      if (one.dataset.s === name) one.classList.toggle("off", off);
    }
  });
  const filter = document.querySelector(".filter");
  filter.hidden = false;
  filter.addEventListener("click", (event) => {
    const wanted = event.target.dataset?.v;
    if (!wanted) return;
    for (const button of all("button", filter)) button.setAttribute("aria-pressed", button.dataset.v === wanted);
    for (const one of all(".finding")) one.hidden = wanted !== "all" && one.dataset.v !== wanted;
  });
  const save = document.getElementById("save");
  save.hidden = false;
  save.addEventListener("click", () => {
    const text = document.getElementById("data").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "ringbolt-lab.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
})();
