"use strict";
// Looks at the page in the mode that its fragment names, and reports what a reader would stumble over.
addEventListener("load", () => {
  const mode = location.hash.slice(1);
  // A frame has the browser's own colour scheme and medium, so the rules of the others are made to apply.
  const wanted = { dark: /prefers-color-scheme: ?dark/, print: /^print$/ }[mode];
  for (const rule of document.styleSheets[0].cssRules) {
    if (!(rule instanceof CSSMediaRule)) continue;
    if (wanted?.test(rule.media.mediaText)) rule.media.mediaText = "all";
    else if (/prefers-color-scheme/.test(rule.media.mediaText)) rule.media.mediaText = "not all";
  }
  const style = document.createElement("style");
  style.textContent = ".exp{content-visibility:visible!important}";
  document.head.append(style);
  for (const one of document.querySelectorAll("details")) one.open = true;
  const issues = [];
  const say = (what, element, more) => {
    const section = element.closest?.("[id]")?.id ?? "";
    issues.push(`${mode}: ${what}: ${section} ${more ?? (element.textContent ?? "").trim().slice(0, 60)}`);
  };
  const shown = (element) => element.getClientRects().length > 0 && getComputedStyle(element).visibility === "visible";

  if (document.documentElement.scrollWidth > innerWidth + 1) {
    say("wider than the page", document.body, `${document.documentElement.scrollWidth} px of ${innerWidth}`);
  }
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg") || !shown(element)) continue;
    const { overflowX } = getComputedStyle(element);
    // On paper nothing can be scrolled, and at the width of a laptop a comparison need not be.
    const scrolled = element.matches(".scroll:has(> .checks)") ||
      (element.matches(".scroll:has(> .compared)") && mode !== "narrow");
    if (scrolled && element.scrollWidth > element.clientWidth + 1) say("wider than its place", element);
    if ((overflowX === "hidden" || overflowX === "clip") && element.scrollWidth > element.clientWidth + 1) {
      say("clipped", element);
    }
  }
  // A single figure of an experiment has its notes beside it where there is room.
  for (const panels of document.querySelectorAll(".beside > .panels")) {
    const [figure, other] = panels.children;
    const notes = panels.parentElement.lastElementChild.getBoundingClientRect();
    const { top, right, bottom } = figure.getBoundingClientRect();
    const hasOthers = panels.parentElement.querySelector(":scope > h4") !== null;
    const isBeside = notes.left > right && notes.top < bottom && notes.bottom > top;
    const isFull = panels.getBoundingClientRect().width > 0.9 * panels.parentElement.clientWidth;
    if (!other && !hasOthers && innerWidth >= 1000 && !isBeside) say("half of the page is empty", panels, panels.closest("[id]")?.id);
    if ((other || hasOthers) && !isFull) say("half of the page is empty", panels, panels.closest("[id]")?.id);
  }
  let texts = 0;
  for (const svg of document.querySelectorAll("svg.chart")) {
    const frame = svg.closest("figure").getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim() !== "")
      .map((text) => [text, text.getBoundingClientRect()]);
    texts += boxes.length;
    for (const line of svg.querySelectorAll("path.e2")) {
      const { left: x, top, bottom } = line.getBoundingClientRect();
      for (const [text, box] of boxes) {
        const high = Math.min(box.bottom, bottom) - Math.max(box.top, top);
        if (box.left < x && x < box.right && high > 0.35 * box.height) say("crossed by an interval", text);
      }
    }
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    for (const [text] of shown(svg) ? boxes : []) {
      const size = parseFloat(getComputedStyle(text).fontSize) * scale;
      if (size < 10) say("smaller than 10 px", text, size.toFixed(1));
    }
    boxes.forEach(([text, box], index) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) {
        say("outside its figure", text);
      }
      for (const [other, place] of boxes.slice(index + 1)) {
        const wide = Math.min(box.right, place.right) - Math.max(box.left, place.left);
        const high = Math.min(box.bottom, place.bottom) - Math.max(box.top, place.top);
        // The boxes of lines include their leading.
        if (wide > 1 && high > 0.35 * Math.min(box.height, place.height)) {
          say("overlap", text, `${svg.getAttribute("aria-label").slice(0, 60)}: ${text.textContent} | ${other.textContent}`);
        }
      }
    });
  }

  const parsed = (colour) => (colour.match(/[\d.]+/g) ?? []).map(Number);
  const over = (top, ground) => {
    const alpha = top[3] ?? 1;
    return [0, 1, 2].map((index) => top[index] * alpha + ground[index] * (1 - alpha));
  };
  const luminance = (colour) => {
    const [red, green, blue] = colour.map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = parsed(getComputedStyle(at).backgroundColor);
      if ((colour[3] ?? 1) > 0) layers.push(colour);
      if ((colour[3] ?? 1) === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const contrast = (element, colour, below) => {
    let opacity = 1;
    for (let at = element; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
    const [a, b] = [luminance(over([...parsed(colour).slice(0, 3), opacity], below)), luminance(below)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() === "" || element.closest("script, style, title") || !shown(element)) continue;
    const drawn = element.closest("svg");
    const style = getComputedStyle(element);
    let below = ground(drawn ? drawn.parentElement : element);
    // Labels on cells and parts follow the rectangle that they are on.
    if (drawn && ["hl", "hd", "i"].includes(element.getAttribute("class"))) {
      below = parsed(getComputedStyle(element.previousElementSibling).fill).slice(0, 3);
    }
    const found = contrast(element, drawn ? style.fill : style.color, below);
    if (found < 4.5) say("contrast", element, `${found.toFixed(2)} ${element.getAttribute("class")} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }

  // Saves the first chart in each format, without a file.
  const saved = [];
  const kept = URL.createObjectURL;
  HTMLAnchorElement.prototype.click = function () { saved.push([this.download]); };
  const blobs = [];
  URL.createObjectURL = (blob) => { blobs.push(blob); return kept.call(URL, blob); };
  const first = document.querySelector("svg.chart").closest("figure");
  const buttons = mode === "light" ? [...first.querySelectorAll(".saves button")] : [];
  for (const button of buttons) button.click();
  // The PNG is saved when its picture is decoded; a browser that never does ends after the test's limit.
  const report = async () => {
    while (saved.length < buttons.length) await new Promise((resolve) => setTimeout(resolve, 20));
    const files = await Promise.all(blobs.map(async (blob, index) =>
      `${saved[index]} ${blob.type} ${blob.size} ${blob.type === "image/png" ? "" : (await blob.text()).slice(0, 90).replaceAll("\n", "|")}`));
    const figures = document.querySelectorAll("figure").length;
    parent.postMessage({ mode, width: innerWidth, texts, figures, files, issues }, "*");
  };
  report();
});
