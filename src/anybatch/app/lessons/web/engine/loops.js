// The loop as text, and its breaks: functions from text to text. Of a group one can be made at a time.

export const RIGHT = [
  "optimizer.zero_grad()",
  "for epoch in range(epochs):",
  "    for i, (x, y) in enumerate(loader):",
  "        loss = criterion(model(x), y)",
  "        (loss * share(i)).backward()",
  "        if (i + 1) % N == 0 or i + 1 == len(loader):",
  "            optimizer.step()",
  "            optimizer.zero_grad()",
].join("\n");

const STEP = "            optimizer.step()\n", ZERO = "            optimizer.zero_grad()", CLIP = "clip_grad_norm_(model.parameters(), max_norm)\n";
const LOSS = "        loss = criterion", WHEN = "        if (i + 1) % N == 0 or i + 1 == len(loader):\n";
const swap = (from, to) => (text) => text.replace(from, to);
const indented = (text, by) => text.replace(/^ {4}/gm, by);

export const BREAKS = {
  tail: { title: "divide by N, also in the short tail", group: "weight", change: swap("(loss * share(i))", "(loss / N)") },
  undivided: { title: "do not divide", group: "weight", change: swap("(loss * share(i))", "loss") },
  full: {
    title: "no step for the tail; zero at the start of an epoch", group: "tail",
    change: (text) => swap("optimizer.zero_grad()\nfor epoch in range(epochs):\n", "for epoch in range(epochs):\n    optimizer.zero_grad()\n")(text).replace(" or i + 1 == len(loader)", ""),
  },
  leak: { title: "no step for the tail; zero only after steps", group: "tail", change: swap(" or i + 1 == len(loader)", "") },
  early: { title: "zero before every micro-batch", group: "zero", change: swap(LOSS, "        optimizer.zero_grad()\n" + LOSS) },
  never: { title: "never zero", group: "zero", change: (text) => text.replace("\n" + ZERO, "") },
  every: {
    title: "step after every micro-batch",
    change: (text) => {
      const [head, body] = text.split(WHEN);
      return body === undefined ? text : head + indented(body, "");
    },
  },
  clipeach: { title: "clip every micro-batch", change: (text) => text.includes("            " + CLIP) ? text.replace("            " + CLIP, "").replace(/(\n {8}\S*loss.*backward\(\)\n)/, `$1        ${CLIP}`) : text },
  schedeach: { title: "step the scheduler every micro-batch", change: (text) => text.includes("            scheduler.step()\n") ? text.replace("            scheduler.step()\n", "").replace(WHEN, "        scheduler.step()\n" + WHEN) : text },
};

// The right loop with the lines that the knobs ask for, and then broken.
export function loop({ clip, schedule, breaks = [] }) {
  let text = RIGHT;
  if (clip) text = text.replace(STEP, "            " + CLIP + STEP);
  if (schedule) text = text.replace(STEP, STEP + "            scheduler.step()\n");
  for (const name of breaks) text = BREAKS[name].change(text);
  return text;
}
