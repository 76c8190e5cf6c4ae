// A loop as it is written, with a line that can be lit and lines that are marked as changed.
import { h } from "ab/dom";

export function listing(text, { lit = -1, changed = new Set(), label = "the training loop" } = {}) {
  return h("div", { class: "listing", role: "region", tabindex: "0", "aria-label": label },
    h("ol", {}, text.split("\n").map((line, number) => {
      const kind = [number === lit ? "lit" : "", changed.has(line) ? "changed" : ""].join(" ").trim();
      return h("li", { class: kind || null, "aria-current": number === lit ? "step" : null }, h("code", {}, line));
    })));
}

export function changedLines(text, original) {
  const known = new Set(original.split("\n"));
  return new Set(text.split("\n").filter((line) => !known.has(line)));
}
