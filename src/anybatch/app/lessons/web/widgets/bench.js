// Break the loop, turn its knobs, and see what every row counted for.
import { listing } from "ab/code";
import { bars, lines, strip } from "ab/charts";
import { choice, h, percent, readState, slider, writeState } from "ab/dom";
import { BREAKS, loop } from "ab/loops";
import { rowsPicture } from "ab/rows_picture";
import { run } from "ab/run";
import { verdict } from "ab/verdict";

const TITLES = {
  model: ["model", { linear: "Linear(10, 2)", net: "a small net", norm: "a net with BatchNorm" }],
  optimizer: ["optimizer", { sgd: "SGD", momentum: "SGD with momentum", adam: "Adam" }],
  task: ["a row is", { rows: "one sample", tokens: "1 to 12 tokens", classes: "of a rare or a common class" }],
};

export default function bench(root, spec) {
  const state = { ...spec.setting, breaks: [...(spec.setting.breaks ?? [])], update: 0 };
  restore(state, root.id);
  const out = h("div", { class: "out" }), controls = h("div", { class: "knobs" });
  for (const name of spec.knobs ?? []) controls.append(knob(name, state, redraw));
  const boxes = {};
  const breaks = h("fieldset", { class: "breaks" }, h("legend", {}, "Break it"), spec.breaks.map((name) => toggle(name, state, boxes, redraw)));
  root.replaceChildren(...(spec.breaks.length ? [breaks] : []), controls, out);
  redraw();

  function redraw() {
    const { update, ...setting } = state;
    const found = run(setting), right = state.breaks.length ? run({ ...setting, breaks: [], text: "", judged: false }) : found;
    const plain = loop({ ...setting, breaks: [] });
    out.replaceChildren(
      listing(found.text, { original: plain }),
      h("p", { class: "verdict", role: "status", html: verdict(found, found === right ? null : right) }),
      h("h4", {}, "What each row counted for, in the first epoch"),
      rowsPicture({ counts: [...found.counts], micro: found.setting.micro, every: found.setting.every }),
      gradientPart(found, state),
      h("h4", {}, `Loss on rows it never saw`),
      lines(curves(found, right), { label: `loss after each epoch, last ${found.epochs.at(-1).loss.toFixed(3)}`, show: (v) => v.toFixed(2) }));
    keep(state, root.id, spec);
  }
}

function curves(found, right) {
  const of = (one) => one.epochs.map((epoch) => epoch.loss);
  return found === right ? [{ name: "the right loop", points: of(right) }] : [{ name: "the right loop", points: of(right) }, { name: "this loop", points: of(found) }];
}

function gradientPart(found, state) {
  if (!found.updates.length) return "";
  const place = h("div", {}), errors = found.updates.map((update) => update.error);
  const show = (k) => {
    const update = found.updates[Math.min(k, found.updates.length - 1)];
    place.replaceChildren(bars(update.grad, update.truth, `update ${k + 1}: ${percent(update.error)} off`),
      h("p", { class: "quiet" }, `Update ${k + 1} of ${found.updates.length}: ${update.error < 1e-9 ? "the same" : `${percent(update.error)} off`}.`));
  };
  const at = Math.min(state.update, found.updates.length - 1);
  show(at);
  return h("div", {}, h("h4", {}, "The gradient that the optimizer was handed, beside the one it should have had"),
    slider({ label: "update", min: 1, max: found.updates.length, value: at + 1, oninput: (k) => { state.update = k - 1; show(k - 1); } }),
    place, h("h4", {}, "How far off, update by update"),
    found.off ? strip(errors, `${found.off} of ${errors.length} updates are off, at most ${percent(found.worst)}`) : h("p", { class: "quiet" }, "0 in every update."));
}

function toggle(name, state, boxes, redraw) {
  const { group } = BREAKS[name], clashes = (other) => other === name || (group && BREAKS[other].group === group);
  const input = boxes[name] = h("input", { type: "checkbox", checked: state.breaks.includes(name), onchange() {
    const others = state.breaks.filter((other) => !clashes(other));
    state.breaks = input.checked ? [...others, name] : others;
    for (const [other, box] of Object.entries(boxes)) box.checked = state.breaks.includes(other);
    redraw();
  } });
  return h("label", {}, input, ` ${BREAKS[name].title}`);
}

function knob(name, state, redraw) {
  const put = (value) => { state[name] = value; redraw(); };
  if (name in TITLES) return choice({ label: TITLES[name][0], options: TITLES[name][1], value: state[name], onchange: put });
  if (name === "micro") return slider({ label: "rows in a micro-batch", min: 4, max: 64, step: 4, value: state.micro ?? 16, oninput: put });
  if (name === "every") return slider({ label: "micro-batches in a batch (N)", min: 1, max: 8, value: state.every ?? 4, oninput: put });
  if (name === "rows") return slider({ label: "rows", min: 200, max: 1000, step: 8, value: state.rows ?? 1000, oninput: put });
  if (name === "lr") return choice({ label: "learning rate", options: { 0.025: "0.025", 0.1: "0.1", 0.4: "0.4", 1.6: "1.6" }, value: String(state.lr ?? 0.1), onchange: (value) => put(Number(value)) });
  const input = h("input", { type: "checkbox", checked: Boolean(state[name]), onchange: () => put(input.checked ? (name === "clip" ? 0.1 : true) : name === "clip" ? 0 : false) });
  return h("label", { class: "knob" }, input, { clip: " clip the gradient to 0.1", schedule: " let the rate fall to 0", bf16: " sum in bf16" }[name]);
}

const KEPT = ["micro", "every", "rows", "lr", "model", "optimizer", "task", "clip", "schedule", "bf16"];

function restore(state, id) {
  const { query } = readState();
  if (query.get("at") !== id) return;
  state.breaks = (query.get("breaks") ?? "").split(",").filter((name) => name in BREAKS);
  for (const name of KEPT) if (query.has(name)) state[name] = read(query.get(name));
}

const read = (text) => (text === "true" ? true : text === "false" ? false : text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);

function keep(state, id, spec) {
  const query = new URLSearchParams();
  const same = KEPT.every((name) => state[name] === spec.setting[name]) && state.breaks.join() === (spec.setting.breaks ?? []).join();
  if (!same) {
    query.set("at", id);
    query.set("breaks", state.breaks.join());
    for (const name of KEPT) if (state[name] !== undefined && state[name] !== spec.setting[name]) query.set(name, state[name]);
  }
  if (readState().query.get("at") || !same) writeState(query);
}
