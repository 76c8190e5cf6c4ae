// fp16 on a number line: what is lost below, what overflows above, and how a loss scale moves it.
import { h, slider } from "ab/dom";

export function fp16(value) {
  const size = Math.abs(value);
  if (size >= 65520) return Math.sign(value) * Infinity;
  const exponent = Math.max(Math.floor(Math.log2(size || 1e-30)), -14), grain = 2 ** (exponent - 10);
  const scaled = value / grain, floor = Math.floor(scaled), part = scaled - floor;
  const rounded = part > 0.5 || (part === 0.5 && floor % 2) ? floor + 1 : floor;
  return rounded * grain;
}

const LOW = -12, HIGH = 6;
const place = (value) => `${Math.min(100, Math.max(0, ((Math.log10(value) - LOW) / (HIGH - LOW)) * 100)).toFixed(1)}%`;

export default function scaler(root) {
  const state = { size: -8, scale: 0 }, out = h("div", { class: "out" });
  const put = (name) => (value) => { state[name] = value; draw(); };
  root.replaceChildren(h("div", { class: "knobs" },
    slider({ label: "a gradient of size", min: -11, max: -1, step: 0.5, value: state.size, show: (v) => `10^${v}`, oninput: put("size") }),
    slider({ label: "loss scale", min: 0, max: 24, value: 0, show: (v) => `2^${v} = ${(2 ** v).toLocaleString("en-US")}`, oninput: put("scale") })), out);
  draw();

  function draw() {
    const gradient = 10 ** state.size, scale = 2 ** state.scale, held = fp16(gradient * scale), back = held / scale;
    const error = Math.abs(back - gradient) / gradient;
    const said = held === 0 ? "<strong>Lost:</strong> fp16 rounds it to 0. No later step can bring it back."
      : !Number.isFinite(held) ? "<strong>Overflow:</strong> inf. The scaler skips this update, halves the scale, and the scheduler must wait too."
        : error > 0.01 ? `<strong>Torn:</strong> below 6e-5 fp16 has fewer digits: ${(100 * error).toFixed(0)} % off after unscaling.`
          : "<strong>Kept:</strong> unscaled, it is the gradient again. Now clip, then step.";
    out.replaceChildren(
      h("div", { class: "numberline", role: "img", "aria-label": `gradient ${gradient.toExponential(1)}, times the scale ${(gradient * scale).toExponential(1)}` },
        h("span", { class: "zone lost", style: `left:0;width:${place(2 ** -25)}` }, "0"), h("span", { class: "zone torn", style: `left:${place(2 ** -25)};width:calc(${place(6.1e-5)} - ${place(2 ** -25)})` }, "few digits"),
        h("span", { class: "zone good", style: `left:${place(6.1e-5)};width:calc(${place(65504)} - ${place(6.1e-5)})` }, "fp16"), h("span", { class: "zone over", style: `left:${place(65504)};right:0` }, "inf"),
        h("span", { class: "mark bare", style: `left:${place(gradient)}` }), h("span", { class: "mark", style: `left:${place(gradient * scale)}` })),
      h("p", { class: "verdict", role: "status", html: `${gradient.toExponential(1)} × ${scale.toLocaleString("en-US")} = ${(gradient * scale).toExponential(1)}, held as ${Number.isFinite(held) ? held.toExponential(3) : "inf"}. ${said}` }));
  }
}
