// The reader commits to an answer before anything is shown.
import { h } from "ab/dom";

export default function predict(root, spec) {
  const reveal = h("div", { class: "reveal", role: "status" });
  const buttons = spec.options.map((text, k) => h("button", { type: "button", html: text, onclick: () => choose(k) }));
  root.replaceChildren(h("p", { class: "question", html: spec.question }), h("div", { class: "options", role: "group", "aria-label": "your answer" }, buttons), reveal);

  function choose(k) {
    buttons.forEach((button, n) => {
      button.disabled = true;
      button.classList.toggle("right", n === spec.answer);
      button.classList.toggle("chosen", n === k);
    });
    const answer = spec.options[spec.answer], told = /^(no|yes)\b/.test(answer) ? answer[0].toUpperCase() + answer.slice(1) : `No: ${answer}`;
    reveal.innerHTML = `<p><strong>${k === spec.answer ? "Right." : `${told}.`}</strong> ${spec.reveal}</p>`;
    root.dispatchEvent(new CustomEvent("committed", { bubbles: true }));
  }
}
