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
  // A comparison has no findings to filter, and no data to save as a whole.
  const filter = document.querySelector(".filter");
  if (filter) filter.hidden = false;
  filter?.addEventListener("click", (event) => {
    const wanted = event.target.dataset?.v;
    if (!wanted) return;
    for (const button of all("button", filter)) button.setAttribute("aria-pressed", button.dataset.v === wanted);
    for (const one of all(".finding")) one.hidden = wanted !== "all" && one.dataset.v !== wanted;
  });
  const download = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  // The chart with its styles, which it otherwise takes from the page.
  const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity",
    "font-family", "font-size", "font-weight"];
  const standalone = (svg) => {
    const copy = svg.cloneNode(true);
    const [from, to] = [all("*", svg), all("*", copy)];
    from.forEach((element, index) => {
      const style = getComputedStyle(element);
      for (const name of STYLES) to[index].style.setProperty(name, style.getPropertyValue(name));
    });
    const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    ground.setAttribute("width", "100%");
    ground.setAttribute("height", "100%");
    ground.style.fill = getComputedStyle(svg.closest("figure")).backgroundColor;
    copy.prepend(ground);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    return new XMLSerializer().serializeToString(copy);
  };
  const png = (svg, then) => {
    const [width, height] = svg.getAttribute("viewBox").split(" ").slice(2).map(Number);
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * width, 2 * height];
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => { if (blob) then(blob); }, "image/png");
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  };
  const csv = (svg) => {
    // A spreadsheet takes text that begins so for a formula.
    const quoted = (field) => {
      const text = Number.isNaN(Number(field)) ? field.replace(/^[=+@-]/, "'$&") : field;
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const rows = [svg.dataset.columns.split("\t")];
    for (const group of all("g[data-v]", svg)) {
      const source = group.classList.contains("pub") ? "published" : "measured";
      const head = group.classList.contains("hm") ? [] : [group.dataset.s, source];
      for (const row of group.dataset.v.split("\n")) rows.push([...head, ...row.split("\t")]);
    }
    return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  };
  for (const figure of all("figure")) {
    const svg = figure.querySelector("svg.chart");
    if (!svg) continue;
    const section = figure.closest("section[id]");
    const name = `${section.id}-${all("figure", section).indexOf(figure) + 1}`;
    const kinds = {
      SVG: () => download(new Blob([standalone(svg)], { type: "image/svg+xml" }), `${name}.svg`),
      PNG: () => png(svg, (blob) => download(blob, `${name}.png`)),
      CSV: () => download(new Blob([csv(svg)], { type: "text/csv" }), `${name}.csv`),
    };
    const bar = document.createElement("p");
    bar.className = "saves";
    for (const [kind, run] of Object.entries(kinds)) {
      const button = document.createElement("button");
      button.textContent = kind;
      button.setAttribute("aria-label", `Save this chart as ${kind}`);
      button.addEventListener("click", run);
      bar.append(button);
    }
    figure.append(bar);
  }
  const save = document.getElementById("save");
  if (save) save.hidden = false;
  save?.addEventListener("click", () => {
    const text = document.getElementById("data").textContent;
    download(new Blob([text], { type: "application/json" }), "ringbolt-lab.json");
  });
})();
