// Python, as far as a training loop needs it: some lines known word for word, and Python's rules of indentation.
import { fault } from "ab/models";

export const LINES = [
  "optimizer.zero_grad()",
  "for epoch in range(epochs):",
  "for i, (x, y) in enumerate(loader):",
  "loss = criterion(model(x), y)",
  "outputs = model(x)",
  "loss = criterion(outputs, y)",
  "(loss * share(i)).backward()",
  "(loss / N).backward()",
  "loss.backward()",
  "if (i + 1) % N == 0:",
  "if (i + 1) % N == 0 or i + 1 == len(loader):",
  "clip_grad_norm_(model.parameters(), max_norm)",
  "optimizer.step()",
  "scheduler.step()",
];

// Text to a tree of { line, text, body }, or an IndentationError as Python has it.
export function parse(text) {
  const root = { body: [], depth: -1 };
  const open = [{ node: root, depth: 0 }];
  let last = null;
  text.split("\n").forEach((raw, line) => {
    const known = raw.replace(/#.*$/, "").trim();
    if (!known) return;
    const depth = raw.length - raw.trimStart().length;
    if (!LINES.includes(known)) throw fault("SyntaxError", `line ${line + 1}: this page knows only its own lines`);
    settle(open, last, depth, line);
    last = { line, text: known, body: known.endsWith(":") ? [] : null };
    open.at(-1).node.body.push(last);
  });
  if (last?.body) throw fault("IndentationError", `expected an indented block after line ${last.line + 1}`);
  return root.body;
}

function settle(open, last, depth, line) {
  const at = open.at(-1).depth;
  if (last?.body) {
    if (depth <= at) throw fault("IndentationError", `expected an indented block after line ${last.line + 1}`);
    open.push({ node: last, depth });
    return;
  }
  if (depth > at) throw fault("IndentationError", `unexpected indent in line ${line + 1}`);
  while (open.at(-1).depth > depth) open.pop();
  if (open.at(-1).depth !== depth)
    throw fault("IndentationError", `line ${line + 1} does not match any outer indentation level`);
}

// Runs a tree on a machine, yielding each statement after it ran. The machine has a method for each line that acts.
export function* execute(body, machine, names = {}) {
  for (const node of body) {
    if (node.text.startsWith("for epoch")) {
      for (let epoch = 0; epoch < machine.epochs; epoch++) {
        names.epoch = epoch;
        yield { node, names };
        yield* execute(node.body, machine, names);
      }
    } else if (node.text.startsWith("for i")) {
      for (let i = 0; i < machine.loader.length; i++) {
        names.i = i;
        names.x = names.y = machine.loader[i];
        yield { node, names };
        yield* execute(node.body, machine, names);
      }
    } else if (node.text.startsWith("if")) {
      const i = read(names, "i");
      const holds = (i + 1) % machine.every === 0 || (node.text.includes("or") && i + 1 === machine.loader.length);
      yield { node, names, holds };
      if (holds) yield* execute(node.body, machine, names);
    } else {
      run(node.text, machine, names);
      yield { node, names };
    }
  }
}

function run(text, machine, names) {
  const get = (name) => read(names, name);
  const actions = {
    "optimizer.zero_grad()": () => machine.zero(names),
    "loss = criterion(model(x), y)": () => (names.loss = machine.loss(machine.forward(get("x")), get("y"))),
    "outputs = model(x)": () => (names.outputs = machine.forward(get("x"))),
    "loss = criterion(outputs, y)": () => (names.loss = machine.loss(get("outputs"), get("y"))),
    "(loss * share(i)).backward()": () => machine.backward(get("loss"), machine.share(get("i"))),
    "(loss / N).backward()": () => machine.backward(get("loss"), 1 / machine.every),
    "loss.backward()": () => machine.backward(get("loss"), 1),
    "clip_grad_norm_(model.parameters(), max_norm)": () => machine.clip(),
    "optimizer.step()": () => machine.step(names),
    "scheduler.step()": () => machine.schedule(),
  };
  actions[text]();
}

function read(names, name) {
  if (!(name in names)) throw fault("NameError", `name '${name}' is not defined`);
  return names[name];
}
