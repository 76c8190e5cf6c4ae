// What every row counted for. A column is a micro-batch, a block is a batch, a cell is a row: full means once.
import { count, h, s, times } from "ab/dom";

const KINDS = [
  ["once", "counted once"],
  ["much", "too much"],
  ["little", "too little"],
  ["sum", "in the sum, not yet stepped"],
  ["never", "never"],
];

export function kindOf(weight, waiting = false) {
  if (waiting) return "sum";
  if (weight === 0) return "never";
  if (Math.abs(weight - 1) < 1e-9) return "once";
  return weight > 1 ? "much" : "little";
}

// counts: the weight of each row; waiting: rows that are in .grad now.
export function rowsPicture({ counts, micro, every, waiting = new Set() }) {
  const columns = Math.ceil(counts.length / micro), cell = 9, gap = 4;
  const paths = Object.fromEntries(KINDS.map(([kind]) => [kind, ""]));
  const totals = { once: 0, much: 0, little: 0, sum: 0, never: 0 };
  const range = {};
  counts.forEach((weight, row) => {
    const kind = kindOf(weight, waiting.has(row)), column = Math.floor(row / micro);
    const x = column * cell + Math.floor(column / every) * gap, y = (row % micro) * cell;
    totals[kind] += 1;
    range[kind] = [Math.min(weight, range[kind]?.[0] ?? weight), Math.max(weight, range[kind]?.[1] ?? weight)];
    const size = cell - 1.5;
    // too little is a low cell, never a dot: the picture reads without its colours
    if (kind === "little") paths[kind] += `M${x} ${y + size * (1 - Math.max(0.25, weight))}h${size}v${size * Math.max(0.25, weight)}h${-size}z`;
    else if (kind === "never") paths[kind] += `M${x + 2.5} ${y + 2.5}h2.5v2.5h-2.5z`;
    else paths[kind] += `M${x} ${y}h${size}v${size}h${-size}z`;
  });
  const width = columns * cell + Math.floor((columns - 1) / every) * gap;
  const said = KINDS.filter(([kind]) => totals[kind]).map(([kind, title]) => `${count(totals[kind])} ${title}`).join(", ");
  const picture = s("svg", { class: "cells", viewBox: `0 0 ${width} ${micro * cell}`, role: "img", "aria-label": `${count(counts.length)} rows: ${said}` },
    KINDS.map(([kind]) => s("path", { d: paths[kind] || "M0 0", class: `cell ${kind}` })));
  const spread = (kind) => (kind === "much" || kind === "little") && range[kind] ? ` (${[...new Set(range[kind].map(times))].join(" to ")})` : "";
  const key = h("ul", { class: "legend" }, KINDS.filter(([kind]) => totals[kind]).map(([kind, title]) =>
    h("li", {}, h("span", { class: `key ${kind}`, "aria-hidden": "true" }), h("strong", {}, count(totals[kind])), ` ${title}${spread(kind)}`)));
  return h("div", { class: "rows" }, picture, key);
}
