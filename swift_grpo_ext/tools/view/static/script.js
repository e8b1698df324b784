// What the pages do beside showing: language, forms, charts, following the run.
const root = document.documentElement;

// --- what a reader chose ---

function chosen(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(`swift-grpo-ext ${key}`, value);
    return localStorage.getItem(`swift-grpo-ext ${key}`);
  } catch {
    return null;  // a private window
  }
}

root.lang = chosen("language") || (navigator.language.startsWith("zh") ? "zh" : "en");
document.getElementById("language").addEventListener("click", () => {
  root.lang = root.lang === "en" ? "zh" : "en";
  chosen("language", root.lang);
  drawCharts();
});

// --- a saved page shows one section ---

if (document.querySelector("main.saved") && !document.getElementById(location.hash.slice(1))) {
  location.replace(`#${document.querySelector("main.saved").id}`);
}

// --- forms answer as soon as something is chosen; what is empty stays out of the address ---

document.addEventListener("change", (event) => event.target.form && event.target.form.requestSubmit());
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const values = [...new FormData(event.target)].filter(([, value]) => value !== "");
  location.search = new URLSearchParams(values);
});

// --- charts, drawn by uPlot ---

let charts = [], smoothing = Number(chosen("smoothing"));

function colour(name, alpha = 1) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.className = name;
  const parts = getComputedStyle(probe).getPropertyValue("outline-color").match(/[\d.]+/g);
  probe.remove();
  return `rgb(${parts.slice(0, 3).join(" ")} / ${alpha})`;
}

function readable(value) {
  if (value === null || value === undefined) return "–";
  const rounded = +value.toPrecision(4);
  return rounded && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

// The exponential mean of TensorBoard: without its bias towards 0 at the start.
function smooth(values, weight) {
  let mean = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    count += 1;
    return mean / (1 - weight ** count);
  });
}

// Each curve as it is, and, where it is smoothed, that in front of it.
function lines(curves, weight) {
  const series = [], data = [];
  curves.forEach(({name, colour: own, values}, number) => {
    const dash = [[], [7, 4], [2, 3]][Math.floor(number / 6) % 3];
    const line = {label: name, stroke: colour(own), width: 1.6, dash, spanGaps: true, value: (u, value) => readable(value)};
    if (weight) {
      series.push({...line, stroke: colour(own, 0.25), width: 1, class: "u-raw", points: {show: false}});
      data.push(values);
    }
    series.push(line);
    data.push(weight ? smooth(values, weight) : values);
  });
  return {series, data, bands: []};
}

// Curves that stand one on the other. A value fills the chart from the step before it to its own.
function areas(curves, steps) {
  const paths = uPlot.paths.stepped({align: -1}), points = {show: false};
  const sums = steps.map(() => 0), series = [], data = [], bands = [];
  curves.forEach(({name, colour: own, values}, number) => {
    const fill = colour(own, own.endsWith("light") ? 0.5 : 1);
    values.forEach((value, at) => { sums[at] += value; });
    data.push([sums[0], ...sums]);
    const value = (u, sum, index, at) => readable(at === null ? null : values[Math.max(at - 1, 0)]);
    series.push({label: name, stroke: fill, width: 0, paths, points, value, ...(number ? {} : {fill})});
    if (number) bands.push({series: [number + 1, number], fill});
  });
  return {series, data, bands};
}

// A flat curve has room, too.
function around(u, least, most) {
  if (least === null) return [0, 1];  // all curves are hidden
  const room = least === most ? Math.abs(least) / 10 || 1 : 0;
  return uPlot.rangeNum(least - room, most + room, 0.1, true);
}

function drawChart(figure) {
  const {axis: [low, high], range, steps, curves, is_stacked: isStacked} = JSON.parse(figure.dataset.chart);
  const {alarms, step: names} = figure.parentElement.dataset;
  const {series, data, bands} = isStacked ? areas(curves, steps) : lines(curves, smoothing);
  const plot = figure.querySelector(".plot");
  const shade = (u) => JSON.parse(alarms).forEach(({kind, first_step: first, last_step: last}) => {
    const [start, end] = [first - 0.5, last + 0.5].map((step) => Math.min(Math.max(
      u.valToPos(step, "x", true), u.bbox.left), u.bbox.left + u.bbox.width));
    u.ctx.fillStyle = colour(kind, 0.18);
    u.ctx.fillRect(start, u.bbox.top, Math.max(end - start, 2), u.bbox.height);
  });
  const axis = {stroke: colour("soft"), grid: {stroke: colour("line"), width: 1}, ticks: {show: false}, font: "10px system-ui"};
  const options = {
    width: Math.max(plot.clientWidth, 100), height: 200, series: [{label: JSON.parse(names)[root.lang]}, ...series], bands,
    scales: {x: {time: false, min: low, max: high}, y: {range: range || around}},
    axes: [
      {...axis, label: JSON.parse(names)[root.lang], labelSize: 14, labelFont: axis.font, size: 22, incrs: [1, 2, 5].flatMap((n) => [n, n * 10, n * 100, n * 1000, n * 1e4, n * 1e5]).sort((a, b) => a - b)},
      {...axis, size: 52, values: (u, ticks) => ticks.map(readable)},
    ],
    legend: {markers: {fill: (u, index) => series[index - 1].stroke}},
    cursor: {sync: {key: "steps"}, y: false}, hooks: {drawClear: [shade]},
  };
  const chart = new uPlot(options, [isStacked ? [steps[0] - 1, ...steps] : steps, ...data], plot);
  const watcher = new ResizeObserver(() => chart.setSize({width: Math.max(plot.clientWidth, 100), height: 200}));
  watcher.observe(plot);
  charts.push({chart, watcher, low, high});
}

function drawCharts() {
  charts.forEach(({chart, watcher}) => { watcher.disconnect(); chart.destroy(); });
  charts = [];
  document.querySelectorAll("[data-chart]").forEach(drawChart);
  const slider = document.getElementById("smoothing");
  if (slider) slider.value = smoothing;
}

const isZoomed = ({chart, low, high}) => chart.scales.x.min > low + 1 || chart.scales.x.max < high - 1;

document.addEventListener("input", ({target}) => {
  if (target.id !== "smoothing") return;
  smoothing = Number(target.value);
  chosen("smoothing", smoothing);
  drawCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
drawCharts();

// --- the run goes on: what is being read stays as it is, lists and charts follow ---

async function follow() {
  const main = document.querySelector("main[data-state]");
  const lost = document.getElementById("lost");
  try {
    const state = await (await fetch("state")).text();
    lost.hidden = true;
    const isBusy = main.contains(document.activeElement) || main.querySelector(".plot:hover") || charts.some(isZoomed);
    if (state !== main.dataset.state && "live" in main.dataset && !isBusy) {
      const answer = await (await fetch(location.href)).text();
      const page = new DOMParser().parseFromString(answer, "text/html");
      for (const part of ["main", "#status"]) document.querySelector(part).replaceWith(page.querySelector(part));
      drawCharts();
    }
  } catch {
    lost.hidden = false;
  }
  setTimeout(follow, 2000);
}

if (document.querySelector("main[data-state]")) follow();
document.body.dataset.ready = "yes";
