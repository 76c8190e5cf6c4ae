// Models of a few numbers, their loss, and `.grad`, which adds. Beside each `.grad`: what every row counts for in it.
import { FEATURES } from "ab/data";
import { batchNorm, linear, tanh } from "ab/layers";
import { uniform } from "ab/random";

const HIDDEN = 8, CLASSES = 2;

function drawn(draw, size, fan) {
  const bound = 1 / Math.sqrt(fan);
  return parameter(Float64Array.from({ length: size }, () => (2 * draw() - 1) * bound));
}

const parameter = (data) => ({ data, grad: null });

// kind: linear | net | norm
export function model(kind, seed) {
  const draw = uniform(1000 + seed);
  const affine = (inputs, outputs, biased = true) =>
    linear(drawn(draw, inputs * outputs, inputs), biased ? drawn(draw, outputs, inputs) : null, inputs, outputs);
  const ones = parameter(new Float64Array(HIDDEN).fill(1)), zeros = parameter(new Float64Array(HIDDEN));
  const layers = {
    linear: () => [affine(FEATURES, CLASSES)],
    net: () => [affine(FEATURES, HIDDEN), tanh, affine(HIDDEN, CLASSES)],
    norm: () => [affine(FEATURES, HIDDEN, false), batchNorm(ones, zeros, HIDDEN), tanh, affine(HIDDEN, CLASSES)],
  }[kind]();
  return { kind, layers, parameters: layers.flatMap((layer) => layer.parameters), version: 0, counted: new Map() };
}

export function forward(net, batch) {
  const kept = [];
  let x = batch.x;
  for (const layer of net.layers) {
    const out = layer.forward(x, batch.n);
    kept.push(out.kept);
    x = out.y;
  }
  return { net, batch, kept, logits: x, version: net.version };
}

// Cross-entropy, the mean over units, as torch has it with class weights.
export function crossEntropy(outputs, batch) {
  const { logits } = outputs;
  const probabilities = new Float64Array(logits.length);
  let value = 0;
  for (let i = 0; i < batch.n; i++) {
    const a = logits[2 * i], b = logits[2 * i + 1], top = a > b ? a : b, e = Math.exp(a > b ? b - a : a - b);
    probabilities[2 * i] = (a > b ? 1 : e) / (1 + e);
    probabilities[2 * i + 1] = (a > b ? e : 1) / (1 + e);
    value += (batch.unit[i] * (top + Math.log(1 + e) - logits[2 * i + batch.y[i]])) / batch.units;
  }
  return { outputs, batch, probabilities, value, isFreed: false };
}

// d (scale * loss) / d parameter, for each parameter.
export function gradients(loss, scale) {
  const { outputs, batch, probabilities } = loss;
  const sums = new Map(outputs.net.parameters.map((p) => [p, new Float64Array(p.data.length)]));
  let g = new Float64Array(probabilities.length);
  for (let i = 0; i < batch.n; i++) {
    const weight = (scale * batch.unit[i]) / batch.units;
    g[2 * i] = (probabilities[2 * i] - (1 - batch.y[i])) * weight;
    g[2 * i + 1] = (probabilities[2 * i + 1] - batch.y[i]) * weight;
  }
  for (let l = outputs.net.layers.length - 1; l >= 0; l--) g = outputs.net.layers[l].backward(outputs.kept[l], g, batch.n, sums, l === 0);
  return sums;
}

// What `.backward()` does: add to `.grad`, and to what each row counts for in it.
export function backward(loss, scale, isBf16) {
  const { net } = loss.outputs, { batch } = loss;
  if (loss.isFreed) throw fault("RuntimeError", "Trying to backward through the graph a second time");
  if (net.layers.length > 1 && loss.outputs.version !== net.version)
    throw fault("RuntimeError", "a weight needed for backward has been modified by an inplace operation");
  for (const [p, g] of gradients(loss, scale)) {
    const added = isBf16 ? g.map(bf16) : g;
    const sum = isBf16 ? (old, k) => bf16(old + added[k]) : (old, k) => old + added[k];
    p.grad = p.grad ? p.grad.map(sum) : added;
  }
  loss.isFreed = true;
  for (let row = batch.first; row < batch.last; row++)
    net.counted.set(row, (net.counted.get(row) ?? 0) + scale / batch.units);
}

export function zeroGrad(net) {
  for (const p of net.parameters) p.grad = null;
  net.counted.clear();
}

const one = new Float32Array(1), bits = new Uint32Array(one.buffer);

export function bf16(value) {
  one[0] = value;
  bits[0] = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000;
  return one[0];
}

export function flat(net, of = "grad") {
  return net.parameters.flatMap((p) => Array.from(p[of] ?? new Float64Array(p.data.length)));
}

export function norm(values) {
  let sum = 0;
  for (const value of values) sum += value * value;
  return Math.sqrt(sum);
}

export function fault(kind, message) {
  const error = new Error(message);
  error.kind = kind;
  return error;
}
