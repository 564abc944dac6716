"use strict";
// Draws the charts of hjax/show/charts.py again from their values: over time, on a logarithmic
// scale, smoothed, without the series that were switched off. With the first view of the page it
// draws what stands there already.
const FIELD = { left: 46, right: 12, top: 10, bottom: 26, letter: 6.5 };
const view = { time: false, log: false, smooth: 0 };

function node(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const round1 = value => Math.round(value * 10) / 10;
const exact = (value, digits) => value.toFixed(Math.min(Math.max(digits, 0), 20));
const stripped = text => text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;

// Round numbers between two ends, with texts that can be told apart (hjax/show/format.py).
function ticks(low, high, wanted, whole) {
  const rough = (high - low) / wanted;
  let power = Math.floor(Math.log10(rough)), step = 1;
  if (whole && rough < 1) {
    power = 0;
  } else {
    const factors = [1, 2, 2.5, 5, 10].filter(f => !whole || Number.isInteger(f * 10 ** power));
    step = factors.find(f => f * 10 ** power >= rough * 0.999) ?? 10;
  }
  const size = step * 10 ** power, digits = (step === 2.5 ? 1 : 0) - power;
  const values = [];
  for (let k = Math.ceil(low / size - 1e-9); k <= Math.floor(high / size + 1e-9); k++)
    values.push(k === 0 ? 0 : Number(exact(k * size, digits)));
  return values.map((value, i) => ({ value, text: tickTexts(values, digits)[i] }));
}

function tickTexts(values, digits) {
  const needed = Math.max(0, ...values.map(v => (stripped(exact(v, digits)).split(".")[1] ?? "").length));
  const plain = values.map(v => exact(v, needed));
  const longest = texts => Math.max(0, ...texts.map(t => t.length));
  if (longest(plain) <= 6 && values.every(v => Math.abs(v) < 10000)) return plain;
  const units = [["T", 1e12, 12], ["G", 1e9, 9], ["M", 1e6, 6], ["k", 1e3, 3]];
  const short = values.map(v => {
    const unit = units.find(u => Math.abs(v) >= u[1]);
    if (!unit) return stripped(exact(v, digits));
    return stripped(exact(v / unit[1], Math.max(digits + unit[2], 0))) + unit[0];
  });
  const powers = values.map(v => {
    if (v === 0) return "0";
    const [mantissa, exponent] = v.toExponential(12).split("e");
    return stripped(mantissa) + "e" + Number(exponent);
  });
  return [plain, short, powers].reduce((a, b) => longest(b) < longest(a) ? b : a);
}

// Powers of ten between two logarithms, and 2 and 5 times them where there are few.
function logTicks(low, high) {
  const factors = high - low > 3 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil((high - low) / 6));
  const found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) {
    if (e % every) continue;
    for (const f of factors) {
      const at = e + Math.log10(f);
      if (at >= low - 1e-9 && at <= high + 1e-9)
        found.push({ value: at, text: valueText(f * 10 ** e) });
    }
  }
  return found.length > 1 ? found : [low, high].map(v => ({ value: v, text: valueText(10 ** v) }));
}

// Four significant digits, more where only these tell a value from others of its curve.
function valueText(value, among) {
  let digits = 4;
  if (among && value) {
    const width = among.high - among.low;
    if (width > 0)
      digits = Math.max(4, Math.min(15,
        Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(width)) + 3));
  }
  if (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5))
    return String(Number(value.toPrecision(digits)));
  return value.toExponential(2);
}

function secondsText(seconds) {
  if (seconds < 120) return stripped(seconds.toFixed(1)) + " s";
  if (seconds < 7200) return stripped((seconds / 60).toFixed(1)) + " min";
  return stripped((seconds / 3600).toFixed(2)) + " h";
}

// An exponential mean, corrected for its beginning.
function smoothed(values, weight) {
  let sum = 0, share = 0;
  return values.map(value => {
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

// The series of a chart as they are drawn now: x, y (of the scale), and what is said of them.
function drawnSeries(chart) {
  const log = view.log && chart.data.series.some(s => s.values.some(v => v > 0));
  const drawn = [];
  for (const series of chart.data.series) {
    const xs = view.time ? series.seconds : series.steps;
    if (!xs || chart.hidden.has(series.name)) continue;
    const values = view.smooth ? smoothed(series.values, view.smooth) : series.values;
    const points = [];
    series.steps.forEach((step, i) => {
      if (log && !(values[i] > 0)) return;
      points.push({
        x: xs[i], step, value: series.values[i], mean: values[i],
        y: log ? Math.log10(values[i]) : values[i],
        raw: log ? (series.values[i] > 0 ? Math.log10(series.values[i]) : null) : series.values[i],
        half: !log && !view.smooth && series.spread ? series.spread[i] : null,
      });
    });
    if (points.length) drawn.push({ series, points });
  }
  return { log, drawn };
}

function rangeOf(drawn, limit, clipped, log) {
  const all = drawn.flatMap(d => d.points);
  const open = all.filter(p => !clipped.has(p.step));
  const values = (open.length ? open : all).map(p => p.y);
  for (const p of all) if (p.half !== null) values.push(p.y - p.half, p.y + p.half);
  if (limit !== null) values.push(limit);
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) {
    const room = log ? 0.5 : Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }
  const room = 0.06 * (high - low);
  return [!log && low >= 0 && low < 0.35 * high ? 0 : low - room, high + room];
}

function draw(chart) {
  const svg = chart.svg, box = svg.viewBox.baseVal;
  const { log, drawn } = drawnSeries(chart);
  svg.replaceChildren();
  chart.at = [];
  if (!drawn.length) {
    const why = view.time && chart.data.series.every(s => !s.seconds) ? "no times are known" : "nothing is switched on";
    svg.append(node("text", { class: "nothing", x: box.width / 2, y: box.height / 2 }, why));
    return;
  }
  let limit = chart.data.limit ? chart.data.limit[1] : null;
  if (limit !== null && log) limit = limit > 0 ? Math.log10(limit) : null;
  const clipped = new Set(chart.data.clipped);
  const [low, high] = rangeOf(drawn, limit, clipped, log);
  const xs = [...new Set(drawn.flatMap(d => d.points.map(p => p.x)))].sort((a, b) => a - b);
  let first = xs[0], last = xs[xs.length - 1];
  if (first === last) { first -= 0.5; last += 0.5; }
  const heights = log ? logTicks(low, high) : ticks(low, high, 5, false);
  const left = Math.max(FIELD.left, 10 + FIELD.letter * Math.max(...heights.map(t => t.text.length)));
  const right = box.width - FIELD.right, bottom = box.height - FIELD.bottom;
  const xOf = x => round1(left + (x - first) / (last - first) * (right - left));
  const yOf = y => {
    let up = (y - low) / (high - low);
    if (clipped.size) up = Math.min(Math.max(up, 0), 1);
    return round1(bottom - up * (bottom - FIELD.top));
  };
  for (const tick of heights) {
    const y = yOf(tick.value);
    svg.append(node("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
      node("text", { class: "tick y", x: left - 6, y: y + 3.5 }, tick.text));
  }
  const below = view.time
    ? ticks(first, last, 5, false).map(t => ({ value: t.value, text: secondsText(t.value) }))
    : ticks(first, last, 5, true);
  for (const tick of below)
    svg.append(node("text", { class: "tick x", x: xOf(tick.value), y: box.height - 9 }, tick.text));
  if (limit !== null) {
    const y = yOf(limit);
    svg.append(node("line", { class: "limit", x1: left, x2: right, y1: y, y2: y }));
  }
  for (const { series, points } of drawn) {
    const color = " c" + series.color;
    const path = list => list.map(([x, y]) => xOf(x) + "," + yOf(y)).join(" ");
    if (points.every(p => p.half !== null)) {
      const around = points.map(p => [p.x, p.y + p.half])
        .concat(points.map(p => [p.x, p.y - p.half]).reverse());
      svg.append(node("polygon", { class: "band" + color, points: path(around) }));
    }
    if (view.smooth)
      svg.append(node("polyline", { class: "line raw" + color,
        points: path(points.filter(p => p.raw !== null).map(p => [p.x, p.raw])) }));
    svg.append(node("polyline", { class: "line" + color, points: path(points.map(p => [p.x, p.y])) }));
    if (series.dots || points.length === 1)
      for (const p of points)
        svg.append(node("circle", { class: "dot" + color, cx: xOf(p.x), cy: yOf(p.y), r: 3 }));
  }
  if (limit !== null)  // above the curves, which may cross it
    svg.append(node("text", { class: "limit", x: right, y: yOf(limit) - 4 }, chart.data.limit[0]));
  chart.cursor = node("line", { class: "cursor", y1: FIELD.top, y2: bottom });
  svg.append(chart.cursor);
  chart.at = xs.map(x => ({ x: xOf(x), lines: hoverLines(drawn, x) }));
}

function hoverLines(drawn, x) {
  const lines = [];
  for (const { series, points } of drawn) {
    const point = points.find(p => p.x === x);
    if (!point) continue;
    if (!lines.length)
      lines.push("step " + point.step + (view.time ? ", " + secondsText(x) : ""));
    const finite = series.values.filter(Number.isFinite);
    const among = { low: Math.min(...finite), high: Math.max(...finite) };
    const mean = view.smooth ? "  (mean " + valueText(point.mean, among) + ")" : "";
    lines.push(series.name + "  " + valueText(point.value, among) + mean);
  }
  return lines;
}

const charts = [...document.querySelectorAll("svg[data-chart]")].map(svg =>
  ({ svg, data: JSON.parse(svg.dataset.chart), hidden: new Set(), at: [] }));

for (const chart of charts) {
  const svg = chart.svg;
  svg.addEventListener("mousemove", event => {
    if (!chart.at.length) return;
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const best = chart.at.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);
    chart.cursor.setAttribute("x1", best.x);
    chart.cursor.setAttribute("x2", best.x);
    chart.cursor.style.visibility = "visible";
    show(best.lines.join("\n"), event);
  });
  svg.addEventListener("mouseleave", () => {
    if (chart.cursor) chart.cursor.style.visibility = "hidden";
    hide();
  });
  for (const button of svg.closest(".card").querySelectorAll(".legend button"))
    button.addEventListener("click", () => {
      const name = button.dataset.series;
      if (!chart.hidden.delete(name)) chart.hidden.add(name);
      button.setAttribute("aria-pressed", String(!chart.hidden.has(name)));
      draw(chart);
    });
  draw(chart);
}

for (const control of document.querySelectorAll("[data-view]"))
  control.addEventListener("input", () => {
    const key = control.dataset.view;
    if (key === "smooth") {
      view.smooth = Number(control.value);
      control.nextElementSibling.textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    } else {
      view[key] = control.type === "checkbox" ? control.checked : control.value === "time";
    }
    charts.forEach(draw);
  });
