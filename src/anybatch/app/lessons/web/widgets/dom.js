// Elements in one call, numbers as people write them, and the state of a page in its address.

export function h(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  set(element, given);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function s(tag, given = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
  element.append(...children.flat(Infinity));
  return element;
}

function set(element, given) {
  for (const [name, value] of Object.entries(given)) {
    if (name === "html") element.innerHTML = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

export const percent = (value, digits = value < 0.1 ? 1 : 0) => (value >= 10 ? `${Math.round(value).toLocaleString("en-US")} times` : `${(100 * value).toFixed(digits)} %`);
export const times = (value) => `× ${value >= 10 ? value.toFixed(0) : value.toFixed(2).replace(/\.?0+$/, "")}`;
export const count = (value) => value.toLocaleString("en-US");
export const short = (value) => (Math.abs(value) < 5e-4 ? (value === 0 ? "0" : value.toExponential(0)) : value.toFixed(3));
export const bytes = (value) => (value < 2 ** 20 ? `${(value / 1024).toFixed(0)} KiB` : `${(value / 2 ** 20).toFixed(value < 1e7 ? 1 : 0)} MiB`);

let last = 0;
export const fresh = (stem) => `${stem}-${++last}`;

export function slider({ label, min, max, step = 1, value, show = String, oninput }) {
  const id = fresh("slider"), reading = h("output", { for: id }, show(value));
  const input = h("input", {
    type: "range", id, min, max, step, value, "aria-valuetext": show(value),
    oninput() {
      const now = Number(input.value);
      reading.textContent = show(now);
      input.setAttribute("aria-valuetext", show(now));
      oninput(now);
    },
  });
  return h("div", { class: "knob" }, h("label", { for: id }, label), input, reading);
}

export function choice({ label, options, value, onchange }) {
  const id = fresh("choice");
  const select = h("select", { id, onchange: () => onchange(select.value) },
    Object.entries(options).map(([key, title]) => h("option", { value: key, selected: key === value }, title)));
  return h("div", { class: "knob" }, h("label", { for: id }, label), select);
}

// #page?key=value: a finding is a link.
export function readState() {
  const [page, query = ""] = location.hash.slice(1).split("?");
  return { page, query: new URLSearchParams(query) };
}

export function writeState(query) {
  const { page } = readState();
  const text = query.toString();
  try {
    history.replaceState(null, "", `#${page}${text ? `?${text}` : ""}`);
  } catch {
    // a page in a frame without an address keeps its state to itself
  }
}
