// A setting in, what happened out: every update beside the gradient that it should have had, and what each row counted for.
import { cut, dataset, take } from "ab/data";
import { execute, parse } from "ab/interpreter";
import { loop } from "ab/loops";
import { backward, crossEntropy, flat, forward, gradients, model, norm, zeroGrad } from "ab/models";
import { clip, fallen, optimizer } from "ab/optimizers";

export const DEFAULTS = {
  task: "rows", model: "linear", optimizer: "sgd", lr: 0.1, rows: 1000, micro: 16, every: 4, epochs: 10,
  clip: 0, schedule: false, bf16: false, seed: 0, breaks: [], text: "", judged: true,
};

export function machine(given) {
  const setting = { ...DEFAULTS, ...given };
  const data = dataset(setting.task, setting.rows, 1), net = model(setting.model, setting.seed);
  const loader = cut(data, setting.micro), { every } = setting;
  const windows = [];
  for (let i = 0; i < loader.length; i += every) {
    const last = loader[Math.min(i + every, loader.length) - 1];
    windows.push(take(data, loader[i].first, last.last));
  }
  const text = setting.text || loop(setting);
  const optim = optimizer(setting.optimizer, net, setting.lr), total = setting.epochs * windows.length;
  let schedules = 0;
  const found = { updates: [], perEpoch: [], passes: 0, zeros: 0, rates: [] };
  return {
    setting, data, net, loader, windows, every, epochs: setting.epochs, text, found, optim,
    forward: (batch) => forward(net, batch),
    loss: crossEntropy,
    share: (i) => loader[i].units / windows[Math.floor(i / every)].units,
    backward(loss, scale) {
      found.passes += 1;
      backward(loss, scale, setting.bf16);
    },
    clip: () => clip(net, setting.clip || 1),
    zero() {
      found.zeros += 1;
      zeroGrad(net);
    },
    schedule() {
      schedules += 1;
      optim.lr = fallen(setting.lr, schedules, total);
    },
    step(names) {
      if (setting.judged) found.updates.push(judge(this, names));
      optim.step();
    },
  };
}

// The update that is about to happen, against the whole batch at once.
function judge(self, { i = 0, epoch = 0 }) {
  const { net, windows, setting, text, found } = self;
  const number = Math.floor(i / self.every), window = windows[number];
  const truth = truthAt(net, window);
  let factor = 1;
  if (text.includes("clip_grad_norm_")) {
    factor = Math.min(1, (setting.clip || 1) / (norm(truth) + 1e-6));
    for (let k = 0; k < truth.length; k++) truth[k] *= factor;
  }
  const grad = flat(net), error = norm(grad.map((g, k) => g - truth[k])) / norm(truth);
  const counts = (found.perEpoch[epoch] ??= new Float64Array(setting.rows));
  for (const [row, count] of net.counted) counts[row] += count * (windowOf(self, row).units / factor);
  const wantedRate = text.includes("scheduler") ? fallen(setting.lr, epoch * windows.length + number, self.epochs * windows.length) : setting.lr;
  return { i, epoch, window: number, grad, truth, error, rate: self.optim.lr, wantedRate, factor };
}

export function truthAt(net, window) {
  return [...gradients(crossEntropy(forward(net, window), window), 1).values()].flatMap((g) => Array.from(g));
}

const windowOf = (self, row) => self.windows[Math.floor(row / (self.setting.micro * self.every))];

// Loss and accuracy over rows that training never saw.
export function evaluate({ net, setting }) {
  const data = dataset(setting.task, setting.rows, 2), batch = take(data, 0, data.rows);
  const loss = crossEntropy(forward(net, batch), batch);
  let right = 0;
  for (let k = 0; k < batch.n; k++) right += loss.probabilities[2 * k + batch.y[k]] > 0.5 ? 1 : 0;
  return { loss: loss.value, accuracy: right / batch.n, seventh: loss.probabilities[13] };
}

const known = new Map();

// Runs to the end, once for each setting. An exception of the loop is a result: { error: { kind, message } }.
export function run(given) {
  const key = JSON.stringify(given);
  if (!known.has(key)) {
    if (known.size >= 40) known.delete(known.keys().next().value);
    known.set(key, finish(given));
  }
  return known.get(key);
}

function finish(given) {
  const self = machine(given);
  const epochs = [];
  let seen = -1, error = null;
  try {
    for (const { node, names } of execute(parse(self.text), self)) {
      if (node.text.startsWith("for epoch") && names.epoch !== seen) {
        if (seen >= 0) epochs.push(evaluate(self));
        seen = names.epoch;
      }
    }
  } catch (raised) {
    if (!raised.kind) throw raised;
    error = { kind: raised.kind, message: raised.message };
  }
  epochs.push(evaluate(self));
  return { ...summary(self), error, epochs, weights: flat(self.net, "data"), text: self.text };
}

function summary(self) {
  const { found, setting, net } = self;
  const counts = found.perEpoch[0] ?? new Float64Array(setting.rows);
  const errors = found.updates.map((update) => update.error);
  return {
    setting, counts, later: found.perEpoch[1] ?? null, updates: found.updates, passes: found.passes, zeros: found.zeros, windows: self.windows,
    error: null, grad: flat(net), left: net.counted.size, rate: self.optim.lr,
    worst: errors.length ? Math.max(...errors) : 0,
    off: errors.filter((one) => one > 1e-9).length,
  };
}
