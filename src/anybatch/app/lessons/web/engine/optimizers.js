// SGD, momentum, Adam; clipping; a rate that falls to nothing. As torch's, in torch's order of operations.
import { norm } from "ab/models";

export function optimizer(kind, net, lr) {
  const state = new Map();
  return {
    lr,
    step() {
      let moved = false;
      for (const p of net.parameters) {
        if (!p.grad) continue;
        rules[kind](p, state, this.lr);
        moved = true;
      }
      if (moved) net.version += 1;
    },
  };
}

const rules = {
  sgd(p, _, lr) {
    for (let k = 0; k < p.data.length; k++) p.data[k] -= lr * p.grad[k];
  },
  momentum(p, state, lr) {
    const before = state.get(p);
    const velocity = before ? before.map((v, k) => 0.9 * v + p.grad[k]) : p.grad.slice();
    state.set(p, velocity);
    for (let k = 0; k < p.data.length; k++) p.data[k] -= lr * velocity[k];
  },
  adam(p, state, lr) {
    if (!state.has(p)) state.set(p, { m: new Float64Array(p.data.length), v: new Float64Array(p.data.length), t: 0 });
    const s = state.get(p);
    s.t += 1;
    const size = lr / (1 - 0.9 ** s.t), root = Math.sqrt(1 - 0.999 ** s.t);
    for (let k = 0; k < p.data.length; k++) {
      const g = p.grad[k];
      s.m[k] += (g - s.m[k]) * (1 - 0.9);
      s.v[k] = s.v[k] * 0.999 + (1 - 0.999) * g * g;
      p.data[k] -= (size * s.m[k]) / (Math.sqrt(s.v[k]) / root + 1e-8);
    }
  },
};

// Returns the factor, so that what rows count for can be clipped with the gradient.
export function clip(net, most) {
  const total = norm(net.parameters.filter((p) => p.grad).map((p) => norm(p.grad)));
  const factor = Math.min(1, most / (total + 1e-6));
  for (const p of net.parameters) if (p.grad) p.grad = p.grad.map((g) => g * factor);
  for (const [row, count] of net.counted) net.counted.set(row, count * factor);
  return { total, factor };
}

export const fallen = (lr, steps, total) => lr * Math.max(0, 1 - steps / total);
