// What is read off a run: by the pictures, by the verdict, and by the claims of the lessons.
import { run } from "ab/run";

const near = (count) => Math.abs(count - 1) < 1e-9;
const touched = (found) => [...found.counts].filter((count) => count !== 0);

export const MEASURES = {
  lost: (found) => [...found.counts].filter((count) => count === 0).length,
  once: (found) => [...found.counts].filter(near).length,
  most: (found) => Math.max(...touched(found)),
  least: (found) => Math.min(...touched(found)),
  much: (found) => [...found.counts].filter((count) => count > 1 + 1e-9).length,
  little: (found) => [...found.counts].filter((count) => count !== 0 && count < 1 - 1e-9).length,
  leaked: (found) => [...found.counts].filter((count, row) => count === 0 && found.later?.[row]).length,
  worst: (found) => found.worst,
  off: (found) => found.off,
  updates: (found) => found.updates.length,
  per_epoch: (found) => found.updates.filter((update) => update.epoch === 0).length,
  passes: (found) => found.passes,
  left: (found) => found.left,
  loss: (found) => found.epochs.at(-1).loss,
  accuracy: (found) => found.epochs.at(-1).accuracy,
  seventh: (found) => found.epochs.at(-1).seventh, // what row 7 of those is told to be, as the probability of class 1
  loss_first: (found) => found.epochs[0].loss,
  accuracy_first: (found) => found.epochs[0].accuracy,
  spent: (found) => found.updates.findIndex((update) => update.rate === 0) / found.updates.length,
  moved: (found) => found.moved,
};

export function measure(name, setting) {
  return MEASURES[name](run(setting));
}
