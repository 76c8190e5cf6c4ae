// Lanes: ranks that share a batch. Synchronise once, or after every micro-batch.
import { h, slider } from "ab/dom";

export default function ranks(root) {
  const state = { ranks: 4, micro: 4, once: true }, out = h("div", { class: "out" });
  const put = (name) => (value) => { state[name] = value; draw(); };
  const input = h("input", { type: "checkbox", checked: true, onchange: () => put("once")(input.checked) });
  root.replaceChildren(h("div", { class: "knobs" }, slider({ label: "ranks", min: 2, max: 8, value: 4, oninput: put("ranks") }), slider({ label: "micro-batches a rank", min: 1, max: 8, value: 4, oninput: put("micro") }),
    h("label", { class: "knob" }, input, " synchronise once, in the last backward (no_sync before it)")), out);
  draw();

  function draw() {
    const syncs = state.once ? 1 : state.micro;
    const lane = (rank) => h("li", {}, h("span", { class: "name" }, `rank ${rank}`), Array.from({ length: state.micro }, (_, k) => [h("span", { class: "pass" }, "F B"), h("span", { class: !state.once || k === state.micro - 1 ? "sync" : "nosync" }, !state.once || k === state.micro - 1 ? "Σ" : "")]), h("span", { class: "step" }, "step"));
    out.replaceChildren(h("ul", { class: "lanes", "aria-hidden": "true" }, Array.from({ length: state.ranks }, (_, rank) => lane(rank))),
      h("p", { class: "verdict", role: "status", html: `<strong>${syncs} synchronisation${syncs === 1 ? "" : "s"} an update.</strong> ${state.once ? `The same gradient, and ${state.micro} times less sent than after every micro-batch.` : "The sum is the same; every gradient is sent again and again."} Ranks average, so each loss is weighed by its units over those of all ranks.` }));
  }
}
