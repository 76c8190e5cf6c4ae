// What an update takes, by what one pass holds: the table of `anybatch plan`, a limit, and what fits.
import { bytes, count, h, slider } from "ab/dom";

export default function memory(root, spec) {
  const { table } = spec, most = Math.max(...table.sizes.map((size) => size.peak)), fixed = table.fixed;
  const out = h("div", { class: "out" });
  const draw = (mib) => {
    const limit = mib * 2 ** 20, fits = table.sizes.filter((size) => size.peak <= limit), best = fits.at(-1);
    const passes = best ? Math.ceil(table.whole / best.size) : 0;
    out.replaceChildren(
      h("ul", { class: "membars" }, table.sizes.map((size) => h("li", { class: size.peak <= limit ? "fits" : "over" },
        h("span", { class: "name" }, `${count(size.size)} tokens`),
        h("span", { class: "track" }, h("span", { class: "bar fixed", style: `width:${(100 * fixed / most).toFixed(1)}%` }), h("span", { class: "bar", style: `width:${(100 * (size.peak - fixed) / most).toFixed(1)}%` }),
          h("span", { class: "limit", style: `left:${Math.min(100, (100 * limit) / most).toFixed(1)}%` })),
        h("span", { class: "size" }, `${bytes(size.peak)}, ${size.peak <= limit ? "fits" : "too large"}`)))),
      h("ul", { class: "legend" }, h("li", {}, h("span", { class: "key fixed" }), `weights, gradients, optimizer: ${bytes(fixed)}, whatever the batch`), h("li", {}, h("span", { class: "key act" }), "activations: they grow with what one pass holds"), h("li", {}, h("span", { class: "key c1" }), "the same, above the limit")),
      h("p", { class: "verdict", role: "status", html: !best ? `<strong>Nothing fits into ${mib} MiB.</strong> Accumulation cannot help below one row: the weights and one row's activations must fit.`
        : best.size >= table.whole ? `<strong>The whole batch of ${count(table.whole)} tokens fits into ${mib} MiB.</strong> Do not accumulate: it would cost passes and save nothing you need.`
          : `<strong>${count(best.size)} tokens fit into ${mib} MiB: the batch of ${count(table.whole)} takes ${passes} passes.</strong> Same gradient, ${passes} times the passes of a card that holds it all.` }));
  };
  root.replaceChildren(slider({ label: "memory of the card", min: 8, max: 160, step: 4, value: 64, show: (v) => `${v} MiB`, oninput: draw }), out);
  draw(64);
}
