"use strict";

// Curves, one uPlot each. Those of a group, such as all over steps, share their cursor and the range that they show.

/** @param whole the first and the last position, such as [0, number of steps] */
function chartGroup(name, whole, noteOf) { return { name, whole, range: whole, noteOf, charts: [] }; }

function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function seriesColor(index) { return color(`--series-${index % 8}`); }

/** Shows the positions from `min` to `max` in all charts of a group. */
function zoom(group, [min, max]) {
  group.range = [min, max];
  for (const { plot } of group.charts) plot.setScale("x", { min, max });
}

function axisValue(name, value, digits) {
  if (value === null) return "";
  if (isShare(name)) return `${trimmed(100 * value, digits + 1)}\u202f%`;
  if (/bytes/.test(name)) return bytes(value, digits);
  if (/seconds/.test(name) && !/per_second/.test(name)) return seconds(value, digits);
  if (Math.abs(value) >= 1e4) return ofUnits(value, 1000, ["", "k", "M", "G"], digits);
  return value !== 0 && Math.abs(value) < 1e-3 ? Number(value.toPrecision(digits)).toExponential() : trimmed(value, digits + 1);
}

/** With as many digits as it takes to tell the places of the axis apart. */
function axisText(name) {
  return (plot, splits) => {
    const given = splits.filter((value) => value !== null);
    const isUnclear = (digits) => new Set(given.map((value) => axisValue(name, value, digits))).size < given.length;
    const digits = [3, 4, 5].find((count) => !isUnclear(count)) ?? 6;
    return splits.map((value) => axisValue(name, value, digits));
  };
}

/** As wide as the longest of the axis's texts; alike in most charts, so that they are aligned. */
function axisSize(plot, texts) {
  const longest = Math.max(0, ...(texts ?? []).map((text) => text.length));
  return Math.max(54, 14 + 6.4 * longest);
}

/** Draws a vertical line at a step. */
function markAt(step, text) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const x = Math.round(plot.valToPos(step, "x", true));
    if (step === null || x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("--muted");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.fillText(text, x, bbox.top - 4 * devicePixelRatio);
    ctx.restore();
  };
}

/** uPlot's series of a curve; of one with a range also its borders, between which the band is. */
function uplotSeries(curve, index) {
  const stroke = () => seriesColor(curve.color ?? index);
  const points = { show: curve.steps.length <= 40, size: 5, fill: stroke };
  const own = { label: curve.label, stroke, width: curve.isFaint ? 1 : 1.75, points, spanGaps: true, pxAlign: 0, dash: curve.dash, alpha: curve.isFaint ? 0.55 : 1 };
  const border = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
  return curve.low ? [own, { ...border }, { ...border }] : [own];
}

function lastOf(list) { return list.findLast((value) => value !== null && value !== undefined); }

/** Values at one place only, which a chart would show as a dot. */
function inWords(group, title, name, curves, place) {
  const texts = curves.map((curve) => `${curve.label} ${shown(name, lastOf(curve.values))}`.trim());
  return { figure: element("div", { class: "chart" }, element("h3", {}, title), element("p", {}, texts.join(" · ")),
    element("p", { class: "muted" }, group.noteOf(place))), draw() {}, group };
}

/**
 * A chart of curves {label, steps, values, low, high}, all of values that are called `name`.
 * @param options {best: step or null, canBeLog, hidesLast: show no values without a cursor}
 */
function chart(group, title, name, curves, options = {}) {
  const places = [...new Set(curves.flatMap((curve) => curve.steps.filter((_, i) => typeof curve.values[i] === "number")))];
  if (places.length === 1) return inWords(group, title, name, curves, places[0]);
  let isLog = false;
  let plot = null;
  const area = element("div", { class: "plot", tabindex: "0", role: "group",
    "aria-label": `${title}: arrow keys move the cursor, plus and minus zoom, 0 shows all` });
  const position = element("span", { class: "position" });
  const buttons = curves.map((curve, index) => {
    const value = element("span", { class: "value" });
    const swatch = element("span", { class: "swatch", style: `background: var(--series-${(curve.color ?? index) % 8})` });
    const button = element("button", { type: "button", "aria-pressed": "true", title: "show or hide", onclick: () => {
      const show = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", show);
      for (const place of curve.places) plot.setSeries(place, { show });
    } }, swatch, `${curve.label} `, value);
    return { button, value };
  });
  const logButton = options.canBeLog ? element("button", { type: "button", class: "toggle controls-button", "aria-pressed": "false", onclick: () => {
    isLog = !isLog;
    logButton.setAttribute("aria-pressed", isLog);
    draw();
  } }, "log") : null;
  const figure = element("div", { class: "chart" },
      element("div", { class: "chart-head" }, element("h3", {}, title),
          element("div", { class: "legend" }, position, buttons.map(({ button }) => button), logButton)), area);

  const tables = curves.map((curve) => curve.low ? [curve.steps, curve.values, curve.low, curve.high] : [curve.steps, curve.values]);
  const series = [{}];
  const bands = [];
  curves.forEach((curve, index) => {
    const own = uplotSeries(curve, index);
    curve.places = own.map((_, k) => series.length + k);
    if (curve.low) bands.push({ series: [series.length + 2, series.length + 1], fill: () => `${seriesColor(curve.color ?? index)}22` });
    series.push(...own);
  });
  const data = uPlot.join(tables);
  const height = options.height ?? 210;

  function showValues() {
    const index = plot.cursor.idx;
    const isInside = index !== null && index !== undefined && plot.cursor.left >= 0;
    const step = isInside ? plot.data[0][index] : null;
    position.textContent = isInside ? group.noteOf(step) : "";
    curves.forEach((curve, i) => {
      const column = plot.data[curve.places[0]];
      // Curves have values at different steps: the last one up to the cursor.
      const value = isInside ? lastOf(column.slice(0, index + 1)) : lastOf(column);
      buttons[i].value.textContent = isInside || !options.hidesLast ? shown(name, value) : "";
    });
  }

  const axis = { stroke: () => color("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: () => color("--rule"), width: 1 }, ticks: { show: false }, gap: 4 };
  function draw() {
    if (plot) { group.charts.splice(group.charts.findIndex((one) => one.plot === plot), 1); plot.destroy(); }
    plot = new uPlot({
      width: Math.max(240, area.clientWidth), height, series, bands,
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [{ ...axis, values: axisText(group.name), size: 24 }, { ...axis, values: axisText(name), size: axisSize, space: 28 }],
      cursor: { sync: { key: group.name, scales: ["x", null] }, y: false, points: { size: 6 },
        bind: { dblclick: () => () => { zoom(group, group.whole); return null; } } },
      hooks: {
        draw: options.best ? [markAt(options.best, "best")] : [],
        setCursor: [(own) => { plot = own; showValues(); }],
        // Called after each change, also after those by zoom().
        setScale: [(own, key) => {
          const { min, max } = own.scales.x;
          if (key === "x" && own.status === 1 && (min !== group.range[0] || max !== group.range[1])) zoom(group, [min, max]);
        }],
      },
    }, isLog ? data.map((column, i) => i === 0 ? column : column.map((value) => value > 0 ? value : null)) : data, area);
    group.charts.push({ plot, area, height });
    plot.setScale("x", { min: group.range[0], max: group.range[1] });
    buttons.forEach(({ button }, i) => {
      if (button.getAttribute("aria-pressed") === "false") for (const place of curves[i].places) plot.setSeries(place, { show: false });
    });
    showValues();
  }

  area.addEventListener("keydown", (event) => {
    const steps = plot.data[0];
    const { min, max } = plot.scales.x;
    const index = plot.cursor.idx ?? steps.length - 1;
    const at = (place) => {
      const step = steps[Math.min(Math.max(place, 0), steps.length - 1)];
      plot.setCursor({ left: plot.valToPos(step, "x"), top: 10 });
    };
    const scale = (factor) => {
      const middle = Math.min(Math.max(steps[index], min), max);
      const [first, last] = group.whole;
      zoom(group, [Math.max(first, middle - (middle - min) * factor), Math.min(last, middle + (max - middle) * factor)]);
    };
    const stride = event.shiftKey ? Math.max(1, Math.round(steps.length / 20)) : 1;
    const actions = { ArrowLeft: () => at(index - stride), ArrowRight: () => at(index + stride), Home: () => at(0), End: () => at(steps.length - 1),
      "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), 0: () => zoom(group, group.whole), Escape: () => zoom(group, group.whole) };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  });
  return { figure, draw, group };
}

/** Draws charts that are in the document, and keeps them as wide as their place. */
function drawCharts(made) {
  for (const { draw } of made) draw();
  const drawn = () => [...new Set(made.map(({ group }) => group))].flatMap(({ charts }) => charts);
  const fit = () => {
    for (const { plot, area, height } of drawn()) {
      if (area.clientWidth > 0 && area.clientWidth !== plot.width) plot.setSize({ width: area.clientWidth, height });
    }
  };
  new ResizeObserver(fit).observe(document.getElementById("page"));
  document.addEventListener("toggle", fit, true);
  const redraw = () => drawn().forEach(({ plot }) => plot.redraw(false, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Once the page is as wide as the paper, which it is not yet in beforeprint, and once it is a screen's again.
  matchMedia("print").addEventListener("change", () => {
    fit();
    redraw();
  });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
}
