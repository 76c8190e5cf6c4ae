// Lines to order and indent, by dragging or by keys; then they are executed. Broken loops to mend are the same thing.
import { h } from "ab/dom";
import { rowsPicture } from "ab/rows_picture";
import { run } from "ab/run";
import { verdict } from "ab/verdict";

const STEP = 4;

export default function parsons(root, spec) {
  const cases = spec.cases ?? [spec];
  const places = cases.map((one, k) => h("div", { class: "case" }, cases.length > 1 ? h("h4", { html: `Patient ${k + 1}: ${one.says}` }) : ""));
  root.replaceChildren(...places);
  places.forEach((place, k) => mount(place, { ...spec, ...cases[k] }));
}

function mount(place, spec) {
  let lines = spec.lines.map((text) => ({ text: text.trim(), depth: Math.floor((text.length - text.trimStart().length) / STEP), isUsed: true }));
  lines.push(...(spec.spare ?? []).map((text) => ({ text, depth: 0, isUsed: false })));
  const list = h("ol", { class: "lines", "aria-label": "lines of the loop" }), out = h("div", { role: "status" });
  const hints = h("div", { class: "hints" });
  let given = 0;
  const hint = spec.hints ? h("button", { type: "button", onclick() {
    hints.append(h("p", { html: `<strong>Hint ${given + 1}.</strong> ${spec.hints[given]}` }));
    given += 1;
    if (given === spec.hints.length) hint.disabled = true;
  } }, "A hint") : "";
  place.append(h("p", { class: "quiet" }, "The arrow keys or buttons move a line and indent it; the space bar or − takes it out, and puts it in again. Or drag it."), list,
    h("div", { class: "buttons" }, h("button", { type: "button", class: "run", onclick: execute }, "Run it"), hint), hints, out);
  draw();

  function draw(focus = -1) {
    list.replaceChildren(...lines.map((line, k) => item(line, k)));
    if (focus >= 0) list.children[focus].firstChild.focus();
  }

  function item(line, k) {
    const label = `line ${k + 1}, ${line.isUsed ? `indented ${line.depth}` : "not used"}: ${line.text}`;
    const handle = h("button", { type: "button", class: "line", "aria-label": label, style: `--depth:${line.depth}`, draggable: "true", onkeydown: (event) => key(event, k) }, h("code", {}, line.text));
    handle.addEventListener("dragstart", (event) => { event.dataTransfer.setData("text/plain", String(k)); event.dataTransfer.effectAllowed = "move"; });
    const up = h("button", { type: "button", class: "nudge", tabindex: "-1", "aria-hidden": "true", onclick: () => k > 0 && move(k, k - 1) }, "↑");
    const down = h("button", { type: "button", class: "nudge", tabindex: "-1", "aria-hidden": "true", onclick: () => k < lines.length - 1 && move(k, k + 1) }, "↓");
    const less = h("button", { type: "button", class: "nudge", tabindex: "-1", "aria-hidden": "true", onclick: () => change(k, { depth: Math.max(0, line.depth - 1) }) }, "←");
    const more = h("button", { type: "button", class: "nudge", tabindex: "-1", "aria-hidden": "true", onclick: () => change(k, { depth: Math.min(4, line.depth + 1) }) }, "→");
    const use = h("button", { type: "button", class: "nudge", tabindex: "-1", "aria-hidden": "true", onclick: () => change(k, { isUsed: !line.isUsed }) }, line.isUsed ? "−" : "+");
    return h("li", { class: line.isUsed ? "" : "unused", ondragover: (event) => event.preventDefault(), ondrop(event) { event.preventDefault(); move(Number(event.dataTransfer.getData("text/plain")), k); } }, handle, up, down, less, more, use);
  }

  function key(event, k) {
    const acts = {
      ArrowUp: () => k > 0 && move(k, k - 1),
      ArrowDown: () => k < lines.length - 1 && move(k, k + 1),
      ArrowRight: () => change(k, { depth: Math.min(4, lines[k].depth + 1) }),
      ArrowLeft: () => change(k, { depth: Math.max(0, lines[k].depth - 1) }),
      " ": () => change(k, { isUsed: !lines[k].isUsed }),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }

  function change(k, what) {
    lines[k] = { ...lines[k], ...what };
    draw(k);
  }

  function move(from, to) {
    const [line] = lines.splice(from, 1);
    lines.splice(to, 0, line);
    draw(to);
  }

  function execute() {
    const text = lines.filter((line) => line.isUsed).map((line) => " ".repeat(STEP * line.depth) + line.text).join("\n");
    const setting = { ...spec.setting, text }, found = run(setting), right = run({ ...spec.setting, text: "" });
    const exact = !found.error && found.updates.length === right.updates.length && found.off === 0;
    place.classList.toggle("solved", exact);
    out.replaceChildren(h("p", { class: "verdict", html: `${exact ? "<strong>Solved.</strong> " : ""}${verdict(found, right)}` }),
      found.error ? "" : rowsPicture({ counts: [...found.counts], micro: found.setting.micro, every: found.setting.every }));
  }
}
