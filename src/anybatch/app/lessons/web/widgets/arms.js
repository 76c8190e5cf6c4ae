// Ways of training beside each other, over several seeds: curves with bands, and a table.
import { lines, table } from "ab/charts";
import { h, percent } from "ab/dom";
import { run } from "ab/run";

export default function arms(root, spec) {
  const what = spec.shows ?? "accuracy";
  const out = h("div", { class: "out" });
  const start = h("button", { type: "button", onclick: () => draw(spec.seeds ?? 3) }, `Run with ${spec.seeds ?? 3} seeds`);
  root.replaceChildren(spec.seeds === 1 ? "" : h("div", { class: "buttons" }, start), out);
  draw(1);

  function draw(seeds) {
    const series = spec.arms.map((arm) => {
      const runs = Array.from({ length: seeds }, (_, seed) => run({ ...spec.setting, ...arm.setting, seed, judged: false }).epochs.map((epoch) => epoch[what]));
      const at = (pick) => runs[0].map((_, k) => pick(...runs.map((points) => points[k])));
      const mean = at((...values) => values.reduce((a, b) => a + b) / values.length);
      return { name: arm.name, points: mean, ...(seeds > 1 ? { low: at(Math.min), high: at(Math.max) } : {}) };
    });
    const show = what === "loss" ? (v) => v.toFixed(2) : (v) => percent(v, 0), cell = what === "loss" ? (v) => v.toFixed(3) : (v) => percent(v, 1);
    const epochs = series[0].points.map((_, k) => k).filter((k) => spec.all || k < 3 || k === series[0].points.length - 1);
    const change = (one, k) => (k ? one.points[k] - one.points[k - 1] : null);
    const seen = (k) => !spec.observe ? [] : [observation(series[0].points[k], change(series[0], k), what)];
    out.replaceChildren(
      lines(series, { label: `${what} after each epoch`, show, ...(what === "loss" ? {} : { to: 1 }) }),
      table([spec.observe ? "epoch" : "after epoch", ...series.map((one) => one.name), ...(spec.observe ? ["what happens"] : [])], epochs.map((k) => [String(k + 1), ...series.map((one) => cell(one.points[k])), ...seen(k)]), `${what}, ${seeds === 1 ? "one seed" : `mean of ${seeds} seeds; the band is their range`}`));
  }
}

function observation(value, change, what) {
  if (change === null) return "one look at all 1,000 rows";
  const better = what === "loss" ? change < 0 : change > 0, size = Math.abs(change);
  if (size < 0.002) return "as good as still";
  return `${better ? "better" : "worse"} by ${what === "loss" ? size.toFixed(3) : percent(size, 1)}`;
}
