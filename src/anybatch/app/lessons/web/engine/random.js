// Numbers that Python draws too, bit for bit: integers of mulberry32, and nothing but additions made of them.

export function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// Nearly normal: twelve uniforms have variance one. No logarithm, whose last digit differs between machines.
export function normal(draw) {
  let sum = -6;
  for (let k = 0; k < 12; k++) sum += draw();
  return sum;
}
