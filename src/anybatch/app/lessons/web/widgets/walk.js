// One row through the model, to the end: what is predicted, before and after training.
import { dataset, take } from "ab/data";
import { h, percent, short, slider } from "ab/dom";
import { execute, parse } from "ab/interpreter";
import { crossEntropy, forward } from "ab/models";
import { machine } from "ab/run";

export default function walk(root, spec) {
  const fresh = machine(spec.setting), trained = machine({ ...spec.setting, judged: false });
  for (const _ of execute(parse(trained.text), trained));
  const data = dataset("rows", 1000, 2), out = h("div", { class: "out", role: "status" });
  const draw = (row) => {
    const one = take(data, row - 1, row), label = one.y[0];
    const cells = [["row", "1 × 10", `[${[...one.x].slice(0, 4).map(short).join(", ")}, …]`, ""]];
    for (const [name, self] of [["before training", fresh], [`after ${spec.setting.epochs} epochs`, trained]]) {
      const outputs = forward(self.net, one), loss = crossEntropy(outputs, one), p = loss.probabilities[1];
      const right = (p > 0.5 ? 1 : 0) === label;
      cells.push([name, "1 × 2", `[${[...outputs.logits].map(short).join(", ")}]`,
        `p(class 1) = ${percent(p, 1)} → class ${p > 0.5 ? 1 : 0}; label ${label}: ${right ? "right" : "wrong"}; loss ${loss.value.toFixed(3)}`]);
    }
    out.replaceChildren(h("dl", { class: "walkdown" }, cells.map(([name, shape, values, said]) => [h("dt", {}, `${name} `, h("span", { class: "shape" }, shape)), h("dd", {}, h("code", {}, values), said ? h("p", {}, said) : "")])));
  };
  root.replaceChildren(slider({ label: "row, none of which was trained on", min: 1, max: 60, value: 7, oninput: draw }), out);
  draw(7);
}
