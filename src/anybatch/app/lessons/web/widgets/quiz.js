// A wrong answer gets its experiment, not a red cross.
import { h } from "ab/dom";
import { run } from "ab/run";
import { verdict } from "ab/verdict";

export default function quiz(root, spec) {
  root.replaceChildren(...spec.questions.map((question, k) => {
    const out = h("div", { class: "reveal", role: "status" });
    const buttons = question.choices.map((option) => h("button", { type: "button", html: option.says, onclick(event) { answer(option, event.currentTarget, out, buttons, spec); } }));
    return h("div", { class: "case" }, h("p", { class: "question", html: `${k + 1}. ${question.question}` }), h("div", { class: "options", role: "group", "aria-label": "answers" }, buttons), out);
  }));
}

function answer(option, button, out, buttons, spec) {
  buttons.forEach((other) => other.classList.remove("chosen"));
  button.classList.add("chosen");
  if (option.right) button.classList.add("right");
  let said = `<p><strong>${option.right ? "Right." : "Not so."}</strong> ${option.explain ?? ""}</p>`;
  if (option.setting) {
    const setting = { ...spec.setting, ...option.setting }, found = run(setting), right = run({ ...setting, breaks: [] });
    said += `<p class="verdict">Run just now: ${verdict(found, right)}</p>`;
  }
  out.innerHTML = said;
}
