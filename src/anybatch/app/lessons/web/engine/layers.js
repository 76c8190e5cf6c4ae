// Three layers with their derivatives. A layer keeps nothing: forward returns what backward needs.

export function linear(weight, bias, inputs, outputs) {
  return {
    parameters: bias ? [weight, bias] : [weight],
    forward(x, n) {
      const y = new Float64Array(n * outputs), w = weight.data;
      for (let i = 0; i < n; i++)
        for (let o = 0; o < outputs; o++) {
          let sum = bias ? bias.data[o] : 0;
          for (let k = 0; k < inputs; k++) sum += x[i * inputs + k] * w[o * inputs + k];
          y[i * outputs + o] = sum;
        }
      return { y, kept: x };
    },
    // The first layer is not asked for the gradient of its input.
    backward(kept, gy, n, sums, isFirst) {
      const gx = isFirst ? null : new Float64Array(n * inputs), gw = sums.get(weight), gb = bias && sums.get(bias), w = weight.data;
      for (let i = 0; i < n; i++)
        for (let o = 0; o < outputs; o++) {
          const g = gy[i * outputs + o];
          if (gb) gb[o] += g;
          for (let k = 0; k < inputs; k++) gw[o * inputs + k] += g * kept[i * inputs + k];
          if (gx) for (let k = 0; k < inputs; k++) gx[i * inputs + k] += g * w[o * inputs + k];
        }
      return gx;
    },
  };
}

export const tanh = {
  parameters: [],
  forward(x) {
    const y = x.map(Math.tanh);
    return { y, kept: y };
  },
  backward: (kept, gy) => gy.map((g, k) => g * (1 - kept[k] * kept[k])),
};

// BatchNorm with the statistics of the rows it is given, as in training.
export function batchNorm(gamma, beta, width) {
  return {
    parameters: [gamma, beta],
    forward(x, n) {
      const y = new Float64Array(n * width), xhat = new Float64Array(n * width), inverse = new Float64Array(width);
      for (let c = 0; c < width; c++) {
        let mean = 0, variance = 0;
        for (let i = 0; i < n; i++) mean += x[i * width + c] / n;
        for (let i = 0; i < n; i++) variance += (x[i * width + c] - mean) ** 2 / n;
        inverse[c] = 1 / Math.sqrt(variance + 1e-5);
        for (let i = 0; i < n; i++) {
          const k = i * width + c;
          xhat[k] = (x[k] - mean) * inverse[c];
          y[k] = gamma.data[c] * xhat[k] + beta.data[c];
        }
      }
      return { y, kept: { xhat, inverse } };
    },
    backward({ xhat, inverse }, gy, n, sums) {
      const gx = new Float64Array(n * width), gg = sums.get(gamma), gb = sums.get(beta);
      for (let c = 0; c < width; c++) {
        let sum = 0, dot = 0;
        for (let i = 0; i < n; i++) {
          sum += gy[i * width + c];
          dot += gy[i * width + c] * xhat[i * width + c];
        }
        gg[c] += dot;
        gb[c] += sum;
        for (let i = 0; i < n; i++) {
          const k = i * width + c;
          gx[k] = gamma.data[c] * inverse[c] * (gy[k] - sum / n - xhat[k] * dot / n);
        }
      }
      return gx;
    },
  };
}
