// Through one update, line by line or stage by stage: real tensors, .grad growing, the line that runs lit.
import { listing } from "ab/code";
import { h, short } from "ab/dom";
import { execute, parse } from "ab/interpreter";
import { flat } from "ab/models";
import { kindOf } from "ab/rows_picture";
import { evaluate, machine } from "ab/run";

export const STAGES = ["load", "forward", "loss", "backward", "accumulate", "step", "zero"];

export default function stepper(root, spec) {
  const frames = record(spec);
  let at = 0;
  const out = h("div", {});
  const go = (to) => { at = Math.min(Math.max(to, 0), frames.length - 1); draw(); };
  const nextOf = (test) => { const found = frames.findIndex((frame, k) => k > at && test(frame)); return found < 0 ? frames.length - 1 : found; };
  const button = (title, act) => h("button", { type: "button", onclick: act }, title);
  root.replaceChildren(
    h("div", { class: "buttons", role: "group", "aria-label": "steps" }, button("Back", () => go(at - 1)), button("Next", () => go(at + 1)),
      button("To the next micro-batch", () => go(nextOf((frame) => frame.stage === "load"))),
      button("To the step", () => go(nextOf((frame) => frame.stage === "step"))), button("Start again", () => go(0))), out);
  draw();

  function draw() {
    const frame = frames[at];
    out.replaceChildren(
      h("ol", { class: "stages", "aria-label": "stages" }, STAGES.map((stage) =>
        h("li", { class: `${stage} ${stage === frame.stage ? "now" : ""}`, "aria-current": stage === frame.stage ? "step" : null }, stage))),
      h("div", { class: "halves" }, listing(spec.setting.text, { lit: frame.line }),
        h("div", { role: "status" }, h("p", { class: "said", html: frame.said }), h("p", { class: "shape" }, frame.shape), numbers(frame))),
      h("h4", {}, ".grad of the first weights, and whose rows are in it"), gradPicture(frame, frames),
      h("p", { class: "quiet" }, `${frame.rows.length ? `${frame.rows.length} rows are in the sum` : "no row is in the sum"}; step ${at + 1} of ${frames.length}.`));
  }
}

function numbers(frame) {
  return h("dl", { class: "values" }, frame.values.map(([name, values]) => [h("dt", {}, name), h("dd", {}, h("code", {}, values))]));
}

function gradPicture(frame, frames) {
  const most = Math.max(...frames.flatMap((other) => other.grad.map(Math.abs)), 1e-9);
  const width = (value) => `${Math.max(Math.abs(value) / most * 50, value ? 1 : 0).toFixed(1)}%`;
  return h("div", { class: "gradbars" }, h("ul", {}, frame.grad.map((value) => h("li", {}, h("span", { class: value < 0 ? "bar minus" : "bar", style: `width:${width(value)}` }), h("code", {}, frame.isEmpty ? "None" : short(value))))),
    h("div", { class: "lane", "aria-hidden": "true", title: "micro-batches of this batch" }, Array.from({ length: frame.columns }, (_, k) => h("span", { class: frame.inSum.has(k) ? "cell sum" : `cell ${kindOf(frame.done.has(k) ? 1 : 0)}` }))));
}

const list = (values, n = 4) => `[${Array.from(values).slice(0, n).map(short).join(", ")}${values.length > n ? ", …" : ""}]`;

// Everything of the first update, frame by frame: the machine runs once, and Back is free.
function record(spec) {
  const self = machine({ ...spec.setting, judged: false }), frames = [], done = new Set();
  const { micro, every } = self;
  let last = null, before = flat(self.net, "data"), right = evaluate(self).accuracy, sum = null;
  // what is in .grad now; the frame of a backward shows what was there before, because adding is the next one
  const look = () => ({ isEmpty: !self.net.parameters[0].grad, all: flat(self.net), rows: [...self.net.counted.keys()] });
  const push = (stage, line, said, shape, values, { isEmpty, all, rows } = (sum = look())) => frames.push({
    stage, line, said, shape, values, isEmpty, grad: all.slice(0, 6), rows, columns: every, done: new Set(done), micro,
    inSum: new Set(rows.map((row) => Math.floor(row / self.setting.micro))),
  });
  push("", -1, "Nothing has run yet. The weights are random, and <code>.grad</code> is empty.", "weights 2 × 10, bias 2", [["weight[0]", list(before)]]);
  for (const { node, names, holds } of execute(parse(self.text), self)) {
    const { line, text } = node, number = (names.i ?? 0) + 1;
    if (text.startsWith("for i")) {
      last = names.x;
      push("load", line, `<strong>Load</strong> micro-batch ${number}: rows ${last.first + 1} to ${last.last}.`, `1,000 × 10 in → x ${last.n} × 10, y ${last.n}`, [["x[0]", list(last.x)], ["y", `[${[...last.y].slice(0, 8).join(", ")}, …]`]]);
    } else if (text.startsWith("outputs")) {
      push("forward", line, "<strong>Forward:</strong> the model turns each row into two numbers, one for each class.", `${last.n} × 10 in → ${last.n} × 2 out`, [["outputs[0]", list(names.outputs.logits.slice(0, 2))]]);
    } else if (text.startsWith("loss =")) {
      push("loss", line, "<strong>Loss:</strong> one number says how wrong all these rows are, on average.", `${last.n} × 2 in → 1 out`, [["loss", names.loss.value.toFixed(4)], ["p(class 1) of row 1", names.loss.probabilities[1].toFixed(3)]]);
    } else if (text.includes("backward")) {
      const old = sum, now = look(), own = now.all.map((value, k) => value - old.all[k]), rest = number % every;
      push("backward", line, `<strong>Backward:</strong> the loss, times its share of the batch (${self.share(names.i).toFixed(2)}), is differentiated by every weight.`, "1 in → gradient 2 × 10 and 2", [["this micro-batch's gradient", list(own)]], old);
      push("accumulate", line, `<strong>Accumulate:</strong> ${old.isEmpty ? "<code>.grad</code> was empty, and now holds this gradient." : "the same <code>backward()</code> did not replace what <code>.grad</code> held. It added."} ${number} of ${every} micro-batches are in: ${rest ? "no step yet" : "now the step"}, since ${number} % ${every} is ${rest}.`, "2 × 10 + 2 × 10 → 2 × 10", [...(old.isEmpty ? [] : [["before", list(old.all)]]), [".grad", list(now.all)], ["its length", Math.hypot(...now.all).toFixed(4)]]);
    } else if (text.startsWith("optimizer.step")) {
      const after = flat(self.net, "data"), now = evaluate(self);
      for (const row of self.net.counted.keys()) done.add(Math.floor(row / self.setting.micro));
      push("step", line, `<strong>Step:</strong> the weights change, once for all ${self.net.counted.size} rows: weight − 0.1 × .grad.`, "2 × 10 and 2 × 10 → 2 × 10", [["weight[0] before", list(before)], ["weight[0] after", list(after)], ["right on 1,000 new rows", `${(100 * right).toFixed(1)} % → ${(100 * now.accuracy).toFixed(1)} %`]]);
      before = after;
      right = now.accuracy;
    } else if (text.includes("zero_grad")) {
      push("zero", line, names.i === undefined ? "<strong>Zero:</strong> <code>.grad</code> is cleared. It was empty already." : "<strong>Zero:</strong> <code>.grad</code> is cleared, so that the next batch starts from nothing.", names.i === undefined ? "nothing → nothing" : "2 × 10 → nothing", [[".grad", "None"]]);
      if (names.i !== undefined) break;
    } else if (text.startsWith("if") && !holds) continue;
  }
  return frames;
}
