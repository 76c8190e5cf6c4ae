// In your own words first; then four concepts, ticked by whoever wrote.
import { fresh, h } from "ab/dom";

export default function explain(root, spec) {
  root.replaceChildren(...spec.tasks.map((task) => {
    const id = fresh("words"), area = h("textarea", { id, rows: "5" }), out = h("div", { role: "status" });
    const done = h("button", { type: "button", onclick() {
      const boxes = task.concepts.map((text) => h("input", { type: "checkbox", onchange: () => (reading.textContent = `${boxes.filter((box) => box.checked).length} of ${boxes.length} said`) }));
      const reading = h("p", { class: "verdict" }, `0 of ${boxes.length} said`);
      out.replaceChildren(h("fieldset", { class: "breaks" }, h("legend", {}, "Which of these did you say?"), boxes.map((box, k) => h("label", {}, box, h("span", { html: ` ${task.concepts[k]}` })))), reading);
      done.disabled = true;
    } }, "I have written it: compare");
    return h("div", { class: "case" }, h("label", { for: id, class: "question", html: task.question }), area, h("div", { class: "buttons" }, done), out);
  }));
}
