// Move the cut, and see what dividing by N makes of every token.
import { h, slider, times } from "ab/dom";

export default function shares(root, spec) {
  const units = spec.units, total = units.reduce((a, b) => a + b), rows = units.length;
  let cuts = [...spec.cuts];
  const out = h("div", { class: "out" });
  const knobs = cuts.map((cut, k) => slider({ label: `cut ${k + 1}, after row`, min: 1, max: rows - 1, value: cut, oninput(value) { cuts[k] = value; draw(); } }));
  root.replaceChildren(h("div", { class: "knobs" }, knobs), out);
  draw();

  function draw() {
    const bounds = [0, ...[...new Set(cuts)].sort((a, b) => a - b), rows], n = bounds.length - 1;
    const parts = Array.from({ length: n }, (_, k) => {
      const inside = units.slice(bounds[k], bounds[k + 1]), own = inside.reduce((a, b) => a + b);
      return { inside, own, share: own / total, factor: total / (n * own) };
    });
    const worst = Math.max(...parts.map((part) => part.factor)), least = Math.min(...parts.map((part) => part.factor));
    out.replaceChildren(
      h("div", { class: "cutbar", "aria-hidden": "true" }, parts.map((part) => h("div", { style: `flex:${part.own}` }, part.inside.map((one) => h("span", { style: `flex:${one}` }))))),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "shares" }, h("table", {}, h("caption", {}, `${total} ${spec.unit} in ${rows} rows, cut into ${n}`),
        h("thead", {}, h("tr", {}, ["micro-batch", "rows", spec.unit, "its share", "divided by N", `so each of its ${spec.unit} counts`].map((cell) => h("th", { scope: "col" }, cell)))),
        h("tbody", {}, parts.map((part, k) => h("tr", {}, h("th", { scope: "row" }, String(k + 1)), h("td", {}, String(part.inside.length)), h("td", {}, String(part.own)),
          h("td", {}, `${part.own}/${total} = ${part.share.toFixed(3)}`), h("td", {}, (1 / n).toFixed(3)), h("td", { class: Math.abs(part.factor - 1) < 1e-9 ? "" : "wrong" }, times(part.factor))))))),
      h("p", { class: "verdict", role: "status", html: worst - least < 1e-9 ? `<strong>Equal ${spec.unit} in every micro-batch:</strong> here, and only here, dividing by N is right.`
        : `<strong>Divided by N, ${spec.unit} of one micro-batch count ${(worst / least).toFixed(1)} times as much as those of another.</strong> With shares, all count once, wherever you cut.` }));
  }
}
