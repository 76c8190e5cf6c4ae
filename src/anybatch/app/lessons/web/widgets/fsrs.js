// When a card is shown again: FSRS-6 with its usual parameters, without fuzz, as the package `fsrs` computes it.

const W = [0.212, 1.2931, 2.3065, 8.2956, 6.4133, 0.8334, 3.0194, 0.001, 1.8722, 0.1666, 0.796, 1.4835, 0.0614, 0.2629, 1.6483, 0.6014, 1.8729, 0.5425, 0.0912, 0.0658, 0.1542];
const DECAY = -W[20], FACTOR = 0.9 ** (1 / DECAY) - 1, MINUTE = 60e3, DAY = 86400e3;
const STEPS = { learning: [MINUTE, 10 * MINUTE], relearning: [10 * MINUTE] };

export const newCard = () => ({ state: "learning", step: 0, stability: null, difficulty: null, due: 0, last: null });

// rating: 1 again, 2 hard, 3 good, 4 easy; now in milliseconds.
export function review(card, rating, now) {
  const days = card.last === null ? null : Math.floor((now - card.last) / DAY);
  const next = { ...card, ...memory(card, rating, days), last: now };
  const wait = interval(next, card, rating);
  return { ...next, due: now + wait };
}

function memory({ stability, difficulty }, rating, days) {
  if (stability === null) return { stability: Math.max(W[rating - 1], 0.001), difficulty: clamp(first(rating)) };
  const changed = days !== null && days < 1 ? soon(stability, rating) : later(stability, difficulty, recalled(stability, days), rating);
  return { stability: Math.max(changed, 0.001), difficulty: harder(difficulty, rating) };
}

// Changes state and step of `next`; returns how long to wait.
function interval(next, card, rating) {
  const long = () => {
    Object.assign(next, { state: "review", step: null });
    return inDays(next.stability) * DAY;
  };
  if (card.state === "review") {
    if (rating > 1) return long();
    Object.assign(next, { state: "relearning", step: 0 });
    return STEPS.relearning[0];
  }
  const steps = STEPS[card.state];
  if (card.step >= steps.length && rating > 1) return long();
  if (rating === 1) next.step = 0;
  else if (rating === 2) return card.step > 0 ? steps[card.step] : steps.length === 1 ? steps[0] * 1.5 : (steps[0] + steps[1]) / 2;
  else if (rating === 4 || card.step + 1 === steps.length) return long();
  else next.step = card.step + 1;
  return steps[next.step];
}

const clamp = (difficulty) => Math.min(Math.max(difficulty, 1), 10);
const first = (rating) => W[4] - Math.exp(W[5] * (rating - 1)) + 1;
const recalled = (stability, days) => (1 + (FACTOR * Math.max(0, days)) / stability) ** DECAY;

// Half goes to even, as Python rounds.
function inDays(stability) {
  const exact = (stability / FACTOR) * (0.9 ** (1 / DECAY) - 1), floor = Math.floor(exact);
  const rounded = exact - floor === 0.5 ? floor + (floor % 2) : Math.round(exact);
  return Math.min(Math.max(rounded, 1), 36500);
}

function soon(stability, rating) {
  const more = Math.exp(W[17] * (rating - 3 + W[18])) * stability ** -W[19];
  return stability * (rating > 1 ? Math.max(more, 1) : more);
}

function harder(difficulty, rating) {
  const moved = difficulty + ((10 - difficulty) * -(W[6] * (rating - 3))) / 9;
  return clamp(W[7] * first(4) + (1 - W[7]) * moved);
}

function later(stability, difficulty, recall, rating) {
  if (rating === 1)
    return Math.min(W[11] * difficulty ** -W[12] * ((stability + 1) ** W[13] - 1) * Math.exp((1 - recall) * W[14]), stability / Math.exp(W[17] * W[18]));
  const bonus = (rating === 2 ? W[15] : 1) * (rating === 4 ? W[16] : 1);
  return stability * (1 + Math.exp(W[8]) * (11 - difficulty) * stability ** -W[9] * (Math.exp((1 - recall) * W[10]) - 1) * bonus);
}
