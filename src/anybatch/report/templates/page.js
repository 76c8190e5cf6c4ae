"use strict";
// Draws every figure of the page, in the colours of the day or of the night, and makes it work from the keyboard.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isTouch = matchMedia("(pointer: coarse)").matches;

  // Colours and fonts are written as names of CSS custom properties; this puts in what they mean now.
  const paint = (value, style) => {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" ? value : value.map((one) => paint(one, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, paint(one, style)]));
  };

  const decades = (data) => {
    const values = data.flatMap((trace) => trace.y).filter((value) => value > 0);
    return Math.log10(values.reduce((one, other) => Math.max(one, other)) / values.reduce((one, other) => Math.min(one, other)));
  };

  const draw = (chart) => {
    const style = getComputedStyle(document.documentElement);
    const { data, layout } = paint(chart.figure, style);
    data.forEach((trace) => { trace.visible = !chart.hidden.has(trace.meta.group); });
    layout.dragmode = isTouch ? false : "zoom";
    if (chart.isLog) Object.assign(layout.yaxis, { type: "log", dtick: decades(data) > 2 ? 1 : "D2", minorloglabels: "complete" });
    layout.yaxis.uirevision = chart.isLog;
    return Plotly.react(chart.drawing, data, layout, { displayModeBar: false, responsive: true, showTips: false });
  };

  // What the arrow keys walk along: every place on the x axis, or every bar in the order of time.
  const stops = (chart) => {
    const places = new Map();
    chart.figure.data.forEach((trace, curveNumber) => {
      if (trace.meta.silent || chart.hidden.has(trace.meta.group)) return;
      trace.x.forEach((x, pointNumber) => {
        const isBar = chart.figure.stops === "bars";
        if (!isBar && trace.y[pointNumber] === null) return;
        const key = isBar ? `${curveNumber}/${pointNumber}` : x;
        if (!places.has(key)) places.set(key, { at: isBar ? trace.base[pointNumber] : x, points: [] });
        places.get(key).points.push({ curveNumber, pointNumber });
      });
    });
    return [...places.values()].sort((one, other) => one.at - other.at);
  };

  const plainText = (html) => new DOMParser().parseFromString(html, "text/html").documentElement.textContent;

  const brief = (number) => (Number.isInteger(number) ? number : Number(number.toPrecision(4)));

  const say = (chart, stop) => {
    const parts = stop.points.map(({ curveNumber, pointNumber }) => {
      const trace = chart.figure.data[curveNumber];
      if (chart.figure.stops === "bars") return `${trace.y[pointNumber]}: ${trace.name} ${trace.customdata[pointNumber]}`;
      const value = trace.y[pointNumber];
      const label = trace.customdata ? trace.customdata[pointNumber] : trace.name;
      return `${label} ${trace.meta.percent ? value.toFixed(1) : brief(value)}${trace.meta.unit}`;
    });
    const [before, after] = chart.figure.where;
    const where = chart.figure.stops === "bars" ? "" : `${before}${brief(stop.at)}${after}: `;
    chart.readout.textContent = plainText(where + parts.join(", "));
  };

  const move = (chart, step) => {
    const all = stops(chart);
    if (!all.length) return;
    const next = { first: 0, last: all.length - 1, back: (chart.stop ?? all.length) - 1, on: (chart.stop ?? -1) + 1 }[step];
    chart.stop = Math.min(all.length - 1, Math.max(0, next));
    Plotly.Fx.hover(chart.drawing, all[chart.stop].points);
    say(chart, all[chart.stop]);
  };

  const zoom = (chart, factor) => {
    if (factor === null) return Plotly.relayout(chart.drawing, { "xaxis.autorange": true, "yaxis.autorange": true });
    const [low, high] = chart.drawing.layout.xaxis.range;
    const all = stops(chart);
    const middle = chart.stop == null || !all[chart.stop] ? (low + high) / 2 : all[chart.stop].at;
    return Plotly.relayout(chart.drawing, { "xaxis.range": [middle - (middle - low) * factor, middle + (high - middle) * factor] });
  };

  const actions = {
    ArrowLeft: (chart) => move(chart, "back"), ArrowRight: (chart) => move(chart, "on"),
    Home: (chart) => move(chart, "first"), End: (chart) => move(chart, "last"),
    "+": (chart) => zoom(chart, 0.5), "=": (chart) => zoom(chart, 0.5), "-": (chart) => zoom(chart, 2), 0: (chart) => zoom(chart, null),
  };

  const charts = [...document.querySelectorAll("figure[data-chart]")].map((element) => {
    const chart = {
      element, hidden: new Set(), isLog: false, stop: null,
      drawing: element.querySelector(".drawing"), readout: element.querySelector(".readout"),
      figure: JSON.parse(element.querySelector('script[type="application/json"]').textContent),
    };
    const press = (button) => {
      const isPressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", isPressed);
      return isPressed;
    };
    element.querySelectorAll(".key").forEach((button) => button.addEventListener("click", () => {
      const group = Number(button.dataset.group);
      if (press(button)) chart.hidden.delete(group); else chart.hidden.add(group);
      chart.stop = null;
      draw(chart);
    }));
    element.querySelector(".log")?.addEventListener("click", (event) => {
      chart.isLog = press(event.currentTarget);
      draw(chart);
    });
    const plot = element.querySelector(".plot");
    plot.addEventListener("keydown", (event) => {
      const action = actions[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action(chart);
    });
    plot.addEventListener("blur", () => {
      Plotly.Fx.unhover(chart.drawing);
      chart.readout.textContent = "";
    });
    return chart;
  });

  Promise.all(charts.map(draw)).then(() => { document.documentElement.dataset.drawn = "true"; });
  dark.addEventListener("change", () => charts.forEach(draw));
})();
