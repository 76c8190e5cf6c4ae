// Three pictures: lines over epochs, pairs of bars, a strip of errors. Text is HTML beside them, so that it stays readable.
import { h, s } from "ab/dom";

const W = 600, H = 180;

// series: [{ name, points: [y], low?: [y], high?: [y] }]
export function lines(series, { label, from, to, show }) {
  const all = series.flatMap((one) => [...one.points, ...(one.low ?? []), ...(one.high ?? [])]);
  const low = from ?? Math.min(...all), high = to ?? Math.max(...all), n = Math.max(...series.map((one) => one.points.length));
  const x = (k) => (n > 1 ? (k / (n - 1)) * W : W / 2), y = (v) => H - ((Math.min(Math.max(v, low), high) - low) / (high - low || 1)) * H;
  const path = (points) => points.map((v, k) => `${k ? "L" : "M"}${x(k).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const band = (one) => `${path(one.high)}${one.low.map((v, k) => [v, k]).reverse().map(([v, k]) => `L${x(k).toFixed(1)} ${y(v).toFixed(1)}`).join("")}Z`;
  const picture = s("svg", { viewBox: `-4 -4 ${W + 8} ${H + 8}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    [0, 0.5, 1].map((part) => s("path", { d: `M0 ${H * part}H${W}`, class: "grid" })),
    series.map((one, k) => (one.low ? s("path", { d: band(one), class: `band c${k}` }) : "")),
    series.map((one, k) => s("path", { d: path(one.points), class: `line c${k}` })));
  const axis = h("div", { class: "axis" }, h("span", {}, show(high)), h("span", {}, show((high + low) / 2)), h("span", {}, show(low)));
  return h("div", { class: "chart" }, axis, picture, h("div", { class: "under" }, h("span", {}, "epoch 1"), h("span", {}, `epoch ${n}`)), legend(series));
}

export function legend(series) {
  return h("ul", { class: "legend" }, series.map((one, k) => h("li", {}, h("span", { class: `key c${k}`, "aria-hidden": "true" }), one.name)));
}

// What is in .grad beside what should be, number by number.
export function bars(grad, truth, label) {
  const n = Math.min(grad.length, 22), most = Math.max(...grad.slice(0, n).map(Math.abs), ...truth.slice(0, n).map(Math.abs), 1e-12);
  const bar = (v, k, kind, shift) => s("rect", { x: k * 27 + shift, width: 10, y: v > 0 ? 60 - (v / most) * 58 : 60, height: Math.max(1, (Math.abs(v) / most) * 58), class: kind });
  return h("div", { class: "chart plain" }, s("svg", { viewBox: "0 0 594 120", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("path", { d: "M0 60H594", class: "grid" }),
    Array.from({ length: n }, (_, k) => [bar(truth[k], k, "truth", 2), bar(grad[k], k, "grad", 13)])),
    h("ul", { class: "legend" }, h("li", {}, h("span", { class: "key truth" }), "the whole batch's gradient"), h("li", {}, h("span", { class: "key grad" }), "what .grad holds"), h("li", {}, `a pair for each of ${n} weights`)));
}

// One bar per update: how far its gradient was off; a full bar is 100 % or more.
export function strip(errors, label) {
  const n = errors.length || 1;
  return h("div", { class: "chart strip" }, h("div", { class: "axis" }, h("span", {}, "100 %"), h("span", {}, "0")), s("svg", { viewBox: `0 0 ${n * 4} 40`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("path", { d: `M0 39.5H${n * 4}`, class: "grid" }),
    errors.map((e, k) => (e > 1e-9 ? s("rect", { x: k * 4, width: 3, y: 40 - Math.max(2, Math.min(1, e) * 40), height: Math.max(2, Math.min(1, e) * 40), class: "grad" }) : ""))));
}

export function table(head, rows, caption) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, k) => h(k ? "td" : "th", k ? {} : { scope: "row" }, cell)))))));
}
