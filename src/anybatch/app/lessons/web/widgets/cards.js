// Cards that come back when they are about to be forgotten; their numbers change. Kept in this browser alone.
import { h } from "ab/dom";
import { newCard, review } from "ab/fsrs";

const KEY = "anybatch learn cards";

export default function cards(root, spec) {
  let kept = load();
  const out = h("div", { class: "card" });
  const save = () => { try { localStorage.setItem(KEY, JSON.stringify(kept)); } catch { /* a browser that keeps nothing: cards start afresh next time */ } };
  const of = (k) => kept[spec.cards[k].id] ?? newCard();
  root.replaceChildren(out, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => download(spec.cards) }, "Export for Anki"),
    h("button", { type: "button", onclick() { kept = {}; save(); draw(); } }, "Forget my progress")));
  draw();

  function draw() {
    const due = spec.cards.map((_, k) => k).filter((k) => of(k).due <= Date.now());
    if (!due.length) {
      const soonest = Math.min(...spec.cards.map((_, k) => of(k).due));
      out.replaceChildren(h("p", { class: "question" }, "Nothing is due."), h("p", { class: "quiet" }, `The next card comes back in ${wait(soonest - Date.now())}.`));
      return;
    }
    const k = due[0], { front, back } = filled(spec.cards[k]);
    const answer = h("div", { role: "status" }), show = h("button", { type: "button", onclick: reveal }, "I have an answer: show it");
    out.replaceChildren(h("p", { class: "quiet" }, `${due.length} of ${spec.cards.length} cards are due`), h("p", { class: "question", html: front }), show, answer);

    function reveal() {
      show.remove();
      answer.replaceChildren(h("p", { html: back }), h("div", { class: "buttons", role: "group", "aria-label": "how it went" }, ["Again", "Hard", "Good", "Easy"].map((title, n) => {
        const next = review(of(k), n + 1, Date.now());
        return h("button", { type: "button", onclick() { kept[spec.cards[k].id] = next; save(); draw(); } }, `${title} · ${wait(next.due - Date.now())}`);
      })));
      answer.querySelector("button").focus();
    }
  }
}

// Numbers that vary: [name] is drawn, {name: expression} is computed from what was drawn.
export function filled(card, draw = Math.random) {
  const values = {};
  for (const [name, options] of Object.entries(card.draw ?? {})) values[name] = options[Math.floor(draw() * options.length)];
  for (const [name, [kind, ...of]] of Object.entries(card.compute ?? {})) values[name] = COMPUTE[kind](...of.map((each) => values[each] ?? each));
  const fill = (text) => text.replace(/\[(\w+)\]/g, (all, name) => (name in values ? values[name].toLocaleString("en-US") : all));
  return { front: fill(card.front), back: fill(card.back) };
}

const COMPUTE = {
  product: (a, b) => a * b,
  rest: (a, b) => a % b,
  lost: (rows, micro, every) => {
    let lost = 0;
    for (let first = 0; first < rows; first += micro * every) {
      const inside = Math.min(micro * every, rows - first);
      lost += inside - (inside % micro || micro);
    }
    return lost;
  },
  ceil: (a, b) => Math.ceil(a / b),
};

function wait(milliseconds) {
  const minutes = Math.max(1, Math.round(milliseconds / 60e3));
  return minutes < 60 ? `${minutes} min` : minutes < 1440 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} d`;
}

function load() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

export function anki(all) {
  const field = (text) => text.replace(/[\t\n]/g, " ");
  return all.map((card) => filled(card, () => 0)).map(({ front, back }) => `${field(front)}\t${field(back)}`).join("\n");
}

function download(all) {
  const link = h("a", { href: URL.createObjectURL(new Blob([anki(all)], { type: "text/tab-separated-values" })), download: "gradient-accumulation.tsv" });
  link.click();
}
