"use strict";
// Draws every figure of the page as SVG and makes it work from the keyboard. Colours are names of CSS custom properties, so
// that charts follow light and dark by themselves. All text goes in as text, never as markup.
(() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const DASHES = ["", "8 4", "2 4", "8 3 2 3", "13 5", "13 4 2 4"];
  const FEW = 40; // points of a line that has a marker at each
  const canvas = document.createElement("canvas").getContext("2d");
  const widthOf = (text) => { canvas.font = "12px system-ui, sans-serif"; return canvas.measureText(text).width; };

  const svg = (tag, attributes, parent, text) => {
    const element = document.createElementNS(SPACE, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent?.append(element);
    return element;
  };

  // The marker of a series around a place, as path data: circle, square, diamond, triangle, plus, cross.
  const marker = (look, x, y, r) => [
    `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    `M${x},${y - 1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
    `M${x},${y - 1.2 * r}l${1.2 * r},${2.2 * r}h${-2.4 * r}z`,
    `M${x - r},${y}h${2 * r}M${x},${y - r}v${2 * r}`,
    `M${x - r},${y - r}l${2 * r},${2 * r}M${x - r},${y + r}l${2 * r},${-2 * r}`,
  ][look];
  const markers = (trace, places, parent) => svg("path", {
    class: "marks", style: `${trace.look > 3 ? "stroke" : "fill"}: var(${trace.colour})`,
    d: places.map(([x, y]) => marker(trace.look, x, y, trace.kind === "points" ? 4 : 3)).join(""),
  }, parent);
  const strokeOf = (trace) => ({
    class: "line", style: `stroke: var(${trace.colour}); stroke-width: ${trace.kind === "faint" ? 1.2 : 2.2}px`,
    "stroke-dasharray": DASHES[trace.look],
  });

  // Round numbers from low to high, about so many: steps of 1, 2 or 5 times a power of ten.
  const roundTicks = (low, high, count, isWhole) => {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 5, 10].find((each) => each * power >= raw * 0.75) * power;
    if (isWhole) step = Math.max(1, Math.round(step));
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
  };
  const logTicks = (low, high) => {
    const decades = Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, place) => Math.ceil(low) + place);
    if (high - low > 2) {
      const skip = Math.ceil(decades.length / 10);
      return decades.filter((power) => power % skip === 0).map((power) => 10 ** power);
    }
    const fine = [];
    for (let power = Math.floor(low); power <= high; power += 1) for (const digit of [1, 2, 5]) fine.push(digit * 10 ** power);
    return fine.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
  };
  const superscript = (text) => [...text].map((sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? (sign === "-" ? "⁻" : sign)).join("");
  const written = (value, isPower) => {
    const size = Math.abs(value);
    if (isPower) return `10${superscript(String(Math.round(Math.log10(value))))}`;
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential().replace("+", "");
    return value.toLocaleString("en", { maximumFractionDigits: 6 });
  };
  const brief = (number) => (Number.isInteger(number) ? number : Number(number.toPrecision(4)));

  const extent = (values) => [values.reduce((one, other) => Math.min(one, other), Infinity), values.reduce((one, other) => Math.max(one, other), -Infinity)];

  const xDomain = (chart) => {
    const shown = chart.figure.data.filter((trace) => trace.kind !== "bars" || trace.x.length);
    if (chart.figure.stops === "bars") return [0, 1.02 * extent(shown.flatMap((trace) => trace.x.map((x, place) => x + trace.starts[place])))[1] || 1];
    const [low, high] = extent(shown.flatMap((trace) => trace.x));
    const room = low === high || chart.figure.x.names ? 0.5 : 0.02 * (high - low);
    return [low - room, high + room];
  };
  // A constant is drawn above the zero line, not in the middle of numbers that it never has.
  const yDomain = (chart, traces) => {
    const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null && (!chart.isLog || value > 0));
    if (!values.length) return chart.isLog ? [-1, 1] : [0, 1];
    let [low, high] = extent(values);
    if (chart.isLog) {
      [low, high] = [Math.log10(low), Math.log10(high)];
      const room = Math.max(0.06 * (high - low), 0.1);
      return [low - room, high + room];
    }
    if (chart.figure.y.zero || low === high) [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (low === high) return [0, 1];
    const room = 0.06 * (high - low);
    return [low >= 0 ? Math.max(0, low - room) : low - room, high <= 0 ? Math.min(0, high + room) : high + room];
  };

  const cut = (text, most) => {
    if (widthOf(text) <= most) return text;
    let end = text.length;
    while (end > 1 && widthOf(`${text.slice(0, end)}…`) > most) end -= 1;
    return `${text.slice(0, end)}…`;
  };

  // Where things go: the frame of the plot, and functions from values to pixels.
  const frameOf = (chart, width, height, traces) => {
    const { x, y } = chart.figure;
    const [low, high] = chart.view ?? xDomain(chart);
    const lanes = y.lanes?.map((lane) => cut(lane, 0.4 * width));
    const domain = lanes ? null : yDomain(chart, traces);
    const tall = height - 60;
    const yTicks = lanes ? [] : (chart.isLog ? logTicks(...domain) : roundTicks(...domain, tall / 50)).map((value) => {
      const isPower = chart.isLog && domain[1] - domain[0] > 2;
      return [value, written(value, isPower) + y.unit];
    });
    const left = 10 + Math.max(...(lanes ?? yTicks.map(([, text]) => text)).map(widthOf), 8);
    const wide = width - left - 10;
    const names = x.names?.map((name, place) => [place + 1, name]).filter(([place]) => place >= low && place <= high);
    const longest = Math.max(0, ...(names ?? []).map(([, name]) => widthOf(name)));
    const isTilted = names !== undefined && longest + 8 > wide / names.length;
    const xTicks = names ?? roundTicks(low, high, Math.max(3, wide / 90), x.whole).map((value) => [value, written(value)]);
    const bottom = (isTilted ? Math.min(0.64 * longest + 18, height / 2) : 22) + (x.title ? 20 : 0);
    const box = { left, top: 10, right: width - 10, bottom: height - bottom };
    const scale = (value) => (chart.isLog ? Math.log10(value) : value);
    return {
      ...box, xTicks, yTicks, isTilted, lanes, low, high,
      px: (value) => box.left + ((value - low) / (high - low)) * (box.right - box.left),
      py: (value) => box.bottom - ((scale(value) - domain[0]) / (domain[1] - domain[0])) * (box.bottom - box.top),
      lane: (index) => [box.top + ((index + 0.15) / y.lanes.length) * (box.bottom - box.top), (0.7 / y.lanes.length) * (box.bottom - box.top)],
    };
  };

  const drawAxes = (chart, frame, picture) => {
    const grid = svg("g", { class: "axes" }, picture);
    for (const [value, text] of frame.yTicks) {
      const y = frame.py(value);
      svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y, y2: y }, grid);
      svg("text", { class: "tick y", x: frame.left - 6, y: y + 4, "text-anchor": "end" }, grid, text);
    }
    frame.lanes?.forEach((lane, index) => {
      const [top, tall] = frame.lane(index);
      svg("text", { class: "tick y", x: frame.left - 6, y: top + tall / 2 + 4, "text-anchor": "end" }, grid, lane);
    });
    for (const [value, text] of frame.xTicks) {
      const x = frame.px(value);
      if (frame.lanes) svg("line", { class: "grid", x1: x, x2: x, y1: frame.top, y2: frame.bottom }, grid);
      const place = frame.isTilted ? { transform: `translate(${x + 4},${frame.bottom + 14}) rotate(-40)`, "text-anchor": "end" } : { x, y: frame.bottom + 17, "text-anchor": "middle" };
      svg("text", { class: "tick x", ...place }, grid, text);
    }
    svg("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }, grid);
    const { title } = chart.figure.x;
    if (title) svg("text", { class: "tick title", x: (frame.left + frame.right) / 2, y: chart.height - 5, "text-anchor": "middle" }, grid, title);
  };

  const drawLine = (trace, frame, isLog, picture) => {
    const places = trace.x.map((x, place) => (trace.y[place] === null || (isLog && trace.y[place] <= 0) ? null : [frame.px(x), frame.py(trace.y[place])].map((one) => Number(one.toFixed(1)))));
    const path = places.map((place, index) => (place ? `${index && places[index - 1] ? "L" : "M"}${place}` : "")).join("");
    const group = svg("g", { class: "trace", "data-group": trace.group }, picture);
    if (trace.kind === "band") return svg("path", { class: "band", style: `fill: var(${trace.colour})`, d: path && `${path}z` }, group);
    const known = places.filter((place) => place);
    if (trace.kind === "area" && known.length) svg("path", { class: "band", style: `fill: var(${trace.fill})`, d: `M${known[0][0]},${frame.bottom}L${known.join("L")}L${known.at(-1)[0]},${frame.bottom}z` }, group);
    if (trace.kind !== "points") svg("path", { ...strokeOf(trace), d: path }, group);
    if (trace.kind === "points" || (trace.kind !== "faint" && trace.x.length <= FEW)) markers(trace, known, group);
    return group;
  };
  const drawBars = (chart, trace, frame, picture) => {
    const group = svg("g", { class: "trace", "data-group": trace.group }, picture);
    trace.x.forEach((length, place) => {
      const [top, tall] = frame.lane(chart.figure.y.lanes.indexOf(trace.lanes[place]));
      const start = frame.px(trace.starts[place]);
      svg("rect", { class: "bar", style: `fill: var(${trace.colour})`, x: start, y: top, width: Math.max(0.5, frame.px(trace.starts[place] + length) - start), height: tall }, group);
    });
  };

  const draw = (chart) => {
    const width = Math.max(200, chart.drawing.clientWidth);
    const traces = chart.figure.data.filter((trace) => !chart.hidden.has(trace.group));
    const frame = frameOf(chart, width, chart.height, traces);
    const picture = svg("svg", { class: "picture", width, height: chart.height, viewBox: `0 0 ${width} ${chart.height}` });
    drawAxes(chart, frame, picture);
    const name = `inside-${chart.element.dataset.chart}`;
    svg("rect", { x: frame.left - 5, y: 0, width: frame.right - frame.left + 10, height: frame.bottom + 5 }, svg("clipPath", { id: name }, picture));
    const inside = svg("g", { "clip-path": `url(#${name})` }, picture);
    for (const trace of traces) if (trace.kind === "bars") drawBars(chart, trace, frame, inside); else drawLine(trace, frame, chart.isLog, inside);
    chart.frame = frame;
    chart.cursor = svg("g", { class: "cursor" }, picture);
    chart.tip.hidden = true;
    chart.drawing.querySelector("svg")?.remove();
    chart.drawing.prepend(picture);
    Object.assign(chart.drawing.dataset, { x: `${frame.low} ${frame.high}`, scale: chart.isLog ? "log" : "linear" });
  };

  // What the arrow keys walk along: every place on the x axis, or every bar in the order of time.
  const stops = (chart) => {
    const places = new Map();
    const isBar = chart.figure.stops === "bars";
    chart.figure.data.forEach((trace, index) => {
      if (trace.kind === "band" || chart.hidden.has(trace.group)) return;
      trace.x.forEach((x, place) => {
        if (!isBar && trace.y[place] === null) return;
        const key = isBar ? `${index}/${place}` : x;
        if (!places.has(key)) places.set(key, { at: isBar ? trace.starts[place] : x, points: [] });
        places.get(key).points.push({ trace, place });
      });
    });
    return [...places.values()].sort((one, other) => one.at - other.at);
  };

  const wordsOf = (chart, stop) => stop.points.map(({ trace, place }) => {
    if (trace.kind === "bars") return `${trace.lanes[place]}: ${trace.name} ${trace.texts[place]}`;
    const value = trace.y[place];
    return `${trace.labels ? trace.labels[place] : trace.name} ${trace.percent ? value.toFixed(1) : brief(value)}${trace.unit}`;
  });
  const whereOf = (chart, stop) => {
    const [before, after] = chart.figure.where;
    return chart.figure.stops === "bars" ? "" : `${before}${brief(stop.at)}${after}`;
  };

  // Marks a stop in the picture and shows its numbers beside it.
  const point = (chart, stop) => {
    const { frame, cursor, tip } = chart;
    cursor.replaceChildren();
    let [x, y] = [frame.px(stop.at), frame.top];
    if (chart.figure.stops === "bars") {
      const [{ trace, place }] = stop.points;
      const [top, tall] = frame.lane(chart.figure.y.lanes.indexOf(trace.lanes[place]));
      svg("rect", { class: "chosen", x: x - 1, y: top - 1, width: Math.max(3, frame.px(stop.at + trace.x[place]) - x + 2), height: tall + 2 }, cursor);
      y = top + tall;
    } else {
      svg("line", { class: "chosen", x1: x, x2: x, y1: frame.top, y2: frame.bottom }, cursor);
      for (const { trace, place } of stop.points) if (!chart.isLog || trace.y[place] > 0) svg("circle", { cx: x, cy: frame.py(trace.y[place]), r: 4, style: `fill: var(${trace.colour})` }, cursor);
    }
    const lines = [whereOf(chart, stop), ...wordsOf(chart, stop)].filter((text) => text);
    tip.replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
    tip.hidden = false;
    const room = chart.drawing.clientWidth;
    tip.style.left = `${Math.max(0, x > room / 2 ? x - tip.offsetWidth - 10 : Math.min(x + 10, room - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, Math.min(y + 4, chart.height - tip.offsetHeight))}px`;
  };
  const unpoint = (chart) => { chart.cursor.replaceChildren(); chart.tip.hidden = true; };

  const move = (chart, step) => {
    const all = stops(chart);
    if (!all.length) return;
    const next = { first: 0, last: all.length - 1, back: (chart.stop ?? all.length) - 1, on: (chart.stop ?? -1) + 1 }[step];
    chart.stop = Math.min(all.length - 1, Math.max(0, next));
    const stop = all[chart.stop];
    if (chart.view && (stop.at < chart.view[0] || stop.at > chart.view[1])) {
      const shift = stop.at - (chart.view[0] + chart.view[1]) / 2;
      chart.view = chart.view.map((edge) => edge + shift);
      draw(chart);
    }
    point(chart, stop);
    const where = whereOf(chart, stop);
    chart.readout.textContent = (where ? `${where}: ` : "") + wordsOf(chart, stop).join(", ");
  };

  const zoom = (chart, factor) => {
    if (factor === null) chart.view = null;
    else {
      const [low, high] = chart.view ?? xDomain(chart);
      const stop = chart.stop === null ? null : stops(chart)[chart.stop];
      const middle = stop ? stop.at : (low + high) / 2;
      chart.view = [middle - (middle - low) * factor, middle + (high - middle) * factor];
    }
    draw(chart);
  };

  const actions = {
    ArrowLeft: (chart) => move(chart, "back"), ArrowRight: (chart) => move(chart, "on"),
    Home: (chart) => move(chart, "first"), End: (chart) => move(chart, "last"),
    "+": (chart) => zoom(chart, 0.5), "=": (chart) => zoom(chart, 0.5), "-": (chart) => zoom(chart, 2), 0: (chart) => zoom(chart, null),
  };

  // The mouse: the nearest stop is shown, a stretch that is dragged over fills the plot, a double click shows all.
  const listen = (chart) => {
    const placeOf = (event) => {
      const box = chart.drawing.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const valueAt = (x) => chart.frame.low + ((x - chart.frame.left) / (chart.frame.right - chart.frame.left)) * (chart.frame.high - chart.frame.low);
    let from = null;
    chart.drawing.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") [from] = placeOf(event); });
    chart.drawing.addEventListener("pointermove", (event) => {
      const [x, y] = placeOf(event);
      if (event.target.classList.contains("bar")) {
        const all = stops(chart);
        const bars = [...chart.drawing.querySelectorAll(".bar")];
        const flat = chart.figure.data.filter((trace) => !chart.hidden.has(trace.group)).flatMap((trace) => trace.x.map((_, place) => [trace, place]));
        const [trace, place] = flat[bars.indexOf(event.target)];
        point(chart, all.find((stop) => stop.points[0].trace === trace && stop.points[0].place === place));
      } else if (chart.figure.stops !== "bars" && y <= chart.frame.bottom) {
        const at = valueAt(x);
        const nearest = stops(chart).reduce((best, stop) => (best && Math.abs(best.at - at) <= Math.abs(stop.at - at) ? best : stop), null);
        if (nearest) point(chart, nearest);
      } else unpoint(chart);
      if (from !== null && Math.abs(x - from) > 4) svg("rect", { class: "dragged", x: Math.min(x, from), y: chart.frame.top, width: Math.abs(x - from), height: chart.frame.bottom - chart.frame.top }, chart.cursor);
    });
    chart.drawing.addEventListener("pointerup", (event) => {
      const [x] = placeOf(event);
      if (from !== null && Math.abs(x - from) > 10) {
        chart.view = [Math.min(valueAt(x), valueAt(from)), Math.max(valueAt(x), valueAt(from))];
        draw(chart);
      }
      from = null;
    });
    chart.drawing.addEventListener("pointerleave", () => { from = null; unpoint(chart); });
    chart.drawing.addEventListener("dblclick", () => zoom(chart, null));
  };

  // A key of the legend looks as its series is drawn.
  const drawSwatch = (button, trace) => {
    const swatch = button.querySelector(".swatch");
    if (trace.kind === "bars") return svg("rect", { style: `fill: var(${trace.colour})`, x: 7, y: 0, width: 12, height: 12, rx: 3 }, swatch);
    if (trace.kind !== "points") svg("path", { ...strokeOf(trace), d: "M0,6H26" }, swatch);
    if (trace.kind === "points" || (trace.kind !== "faint" && trace.x.length <= FEW)) markers(trace, [[13, 6]], swatch);
    return swatch;
  };

  const press = (button) => {
    const isPressed = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", isPressed);
    return isPressed;
  };

  const charts = [...document.querySelectorAll("figure[data-chart]")].map((element) => {
    const figure = JSON.parse(element.querySelector('script[type="application/json"]').textContent);
    const plot = element.querySelector(".plot");
    const chart = {
      element, figure, hidden: new Set(), isLog: Boolean(figure.y.log), stop: null, view: null, height: Number(plot.dataset.height),
      drawing: element.querySelector(".drawing"), readout: element.querySelector(".readout"), tip: element.querySelector(".tip"),
    };
    element.querySelectorAll(".key").forEach((button) => {
      const group = Number(button.dataset.group);
      drawSwatch(button, figure.data.find((trace) => trace.group === group && trace.kind !== "band"));
      button.addEventListener("click", () => {
        if (press(button)) chart.hidden.delete(group); else chart.hidden.add(group);
        chart.stop = null;
        draw(chart);
      });
    });
    element.querySelector(".log")?.addEventListener("click", (event) => {
      chart.isLog = press(event.currentTarget);
      draw(chart);
    });
    plot.addEventListener("keydown", (event) => {
      const action = actions[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action(chart);
    });
    plot.addEventListener("blur", () => {
      unpoint(chart);
      chart.readout.textContent = "";
    });
    draw(chart);
    listen(chart);
    let width = chart.drawing.clientWidth;
    new ResizeObserver(() => {
      if (chart.drawing.clientWidth === width) return;
      width = chart.drawing.clientWidth;
      draw(chart);
    }).observe(chart.drawing);
    return chart;
  });

  document.documentElement.dataset.drawn = String(charts.length);
})();
