// The tasks: rows made of samples, each with its target and its units (what a mean loss divides by).
import { normal, uniform } from "ab/random";

export const FEATURES = 10;
const kept = new Map();

// kind: rows | tokens | classes | outlier. Rows have one sample each; tokens one to twelve. The outlier is one bad row of training.
export function dataset(kind, rows, seed) {
  const key = `${kind}/${rows}/${seed}`;
  if (!kept.has(key)) kept.set(key, make(kind, rows, seed));
  return kept.get(key);
}

function make(kind, rows, seed) {
  const draw = uniform(seed);
  const starts = [0];
  for (let r = 0; r < rows; r++) starts.push(starts[r] + (kind === "tokens" ? length(draw()) : 1));
  const samples = starts[rows];
  const x = new Float64Array(samples * FEATURES);
  const y = new Uint8Array(samples);
  const unit = new Float64Array(samples).fill(1);
  for (let r = 0; r < rows; r++) {
    for (let s = starts[r]; s < starts[r + 1]; s++) {
      let sum = 0;
      for (let f = 0; f < FEATURES; f++) sum += x[s * FEATURES + f] = normal(draw);
      if (kind === "tokens") x[s * FEATURES] += 0.25 * (starts[r + 1] - starts[r] - 4);
      y[s] = sum > (kind === "classes" ? 4 : 0) ? 1 : 0;
      if (kind === "classes" && y[s]) unit[s] = 9;
      if (kind === "outlier" && r === 990 && seed === 1) {
        for (let f = 0; f < FEATURES; f++) x[s * FEATURES + f] *= 30;
        y[s] = 1 - y[s];
      }
    }
  }
  return { kind, rows, starts, x, y, unit };
}

const length = (u) => 1 + Math.floor(12 * u * u * u);

// Rows first..last (last not included) as a batch.
export function take(data, first, last) {
  const from = data.starts[first], to = data.starts[last];
  const unit = data.unit.subarray(from, to);
  let units = 0;
  for (const one of unit) units += one;
  return {
    first, last, n: to - from, unit, units,
    x: data.x.subarray(from * FEATURES, to * FEATURES),
    y: data.y.subarray(from, to),
  };
}

export const unitsOfRow = (data, row) => take(data, row, row + 1).units;

// Micro-batches of `micro` rows, in order; the last may be shorter.
export function cut(data, micro) {
  const found = [];
  for (let first = 0; first < data.rows; first += micro) found.push(take(data, first, Math.min(first + micro, data.rows)));
  return found;
}
