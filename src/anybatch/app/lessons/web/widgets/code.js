// A loop as it is written, with a line that can be lit; beside an original, with what was changed and what was taken out.
import { h } from "ab/dom";

export function listing(text, { lit = -1, original = text, label = "the training loop" } = {}) {
  return h("div", { class: "listing", role: "region", tabindex: "0", "aria-label": label },
    h("ol", {}, compared(text.split("\n"), original.split("\n")).map(({ line, kind }, number) => {
      const marks = [number === lit ? "lit" : "", kind].join(" ").trim(), words = line.trimStart();
      const code = kind === "gone" ? [line.slice(0, line.length - words.length), h("del", {}, words)] : line;
      return h("li", { class: marks || null, "aria-current": number === lit ? "step" : null }, h("code", {}, code));
    })));
}

// Lines of both, in order: those that only the original has are gone, those that only the text has are changed.
function compared(lines, original) {
  const known = new Set(original), kept = new Set(lines), found = [];
  let at = 0;
  const until = (end) => { for (; at < end; at++) found.push({ line: lines[at], kind: known.has(lines[at]) ? "" : "changed" }); };
  for (const line of original) {
    if (!kept.has(line)) found.push({ line, kind: "gone" });
    else if (lines.indexOf(line, at) >= 0) until(lines.indexOf(line, at) + 1);
  }
  until(lines.length);
  return found;
}
