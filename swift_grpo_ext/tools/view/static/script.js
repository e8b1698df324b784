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
  show();
});

// What no style can choose: words of menus, and times by the reader's clock.
function show() {
  document.querySelectorAll("[data-en]").forEach((e) => { e.textContent = e.dataset[root.lang]; });
  showTimes();
  drawCharts();
}

function showTimes() {
  document.querySelectorAll("time").forEach((e) => {
    const then = e.dataset.time * 1000, seconds = Math.round((Date.now() - then) / 1000);
    const [unit, length] = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]].find(([, n]) => seconds >= n) || ["second", 1];
    const ago = new Intl.RelativeTimeFormat(root.lang).format(-Math.floor(seconds / length), unit);
    const text = "relative" in e.dataset ? ago : new Date(then).toLocaleString(root.lang, {dateStyle: "medium", timeStyle: "short"});
    if (e.textContent !== text) e.textContent = text;
  });
}

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

let charts = [];

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

// A legend has the values of the step that is pointed at, and else the last ones, with their step
// where it is not the last.
function last(values, steps) {
  const at = values.findLastIndex((value) => value !== null);
  return readable(values[at]) + (at < steps.length - 1 ? ` (${steps[at]})` : "");
}

// Later curves are dashed, so that those below show through where they coincide.
function lines(curves, steps) {
  const series = curves.map(({name, colour: own, values}) => {
    const number = Number(own[1]), dash = [[], [8, 6], [2, 4], [12, 4, 2, 4]][number % 4];
    const value = (u, pointed, index, at) => at === null ? last(values, steps) : readable(pointed);
    return {label: name, stroke: colour(own), width: number ? 1.6 : 2, dash, spanGaps: true, value};
  });
  return {series, data: curves.map(({values}) => values), bands: []};
}

// Curves that stand one on the other. A value fills the chart from the step before it to its own.
function areas(curves, steps) {
  const paths = uPlot.paths.stepped({align: -1}), points = {show: false};
  const sums = steps.map(() => 0), series = [], data = [], bands = [];
  curves.forEach(({name, colour: own, values}, number) => {
    const fill = colour(own, own.endsWith("light") ? 0.5 : 1);
    values.forEach((value, at) => { sums[at] += value; });
    data.push([sums[0], ...sums]);
    const value = (u, sum, index, at) => at === null ? last(values, steps) : readable(values[Math.max(at - 1, 0)]);
    series.push({label: name, stroke: fill, width: 0, paths, points, value, ...(number ? {} : {fill})});
    if (number) bands.push({series: [number + 1, number], fill});
  });
  return {series, data, bands};
}

// Room around curves; none below 0 where no value is, and none above 1 in what is a share.
const around = (isShare) => (u, least, most) => {
  if (least === null || (least === 0 && most === 0)) return [0, 1];  // null: all curves are hidden
  if (least === most) return [Math.min(2 * least, 0), Math.max(2 * least, 0)];
  const [low, high] = uPlot.rangeNum(least, most, 0.1, true);
  return [least >= 0 ? Math.max(low, 0) : low, isShare && most <= 1 ? Math.min(high, 1) : high];
};

function drawChart(figure) {
  const {axis: [low, high], range, steps, curves, unit, is_stacked: isStacked} = JSON.parse(figure.dataset.chart);
  const {alarms, step: names} = figure.parentElement.dataset, spoken = root.lang === "zh" ? 1 : 0;
  const [step, unitName] = [JSON.parse(names)[spoken], JSON.parse(figure.dataset.unit)[spoken]];
  const {series, data, bands} = isStacked ? areas(curves, steps) : lines(curves, steps);
  const plot = figure.querySelector(".plot");
  const shade = (u) => JSON.parse(alarms).forEach(({kind, first_step: first, last_step: last}) => {
    const [start, end] = [first - 0.5, last + 0.5].map((step) => Math.min(Math.max(
      u.valToPos(step, "x", true), u.bbox.left), u.bbox.left + u.bbox.width));
    u.ctx.fillStyle = colour(kind, 0.18);
    u.ctx.fillRect(start, u.bbox.top, Math.max(end - start, 2), u.bbox.height);
  });
  const height = figure.closest(".first") ? 280 : 190;
  const axis = {stroke: colour("soft"), grid: {stroke: colour("line"), width: 1}, ticks: {show: false}, font: "10px system-ui"};
  const options = {
    width: Math.max(plot.clientWidth, 100), height, bands,
    series: [{label: step, value: (u, value, index, at) => at === null ? steps[steps.length - 1] : value}, ...series],
    scales: {x: {time: false, min: low, max: high}, y: {range: range || around(unit === "share")}},
    axes: [
      {...axis, label: step, labelSize: 14, labelFont: axis.font, size: 22, incrs: [1, 2, 5].flatMap((n) => [n, n * 10, n * 100, n * 1000, n * 1e4, n * 1e5]).sort((a, b) => a - b)},
      {...axis, label: unitName || undefined, labelSize: unitName ? 16 : 0, labelFont: axis.font, size: 48, values: (u, ticks) => ticks.map(readable)},
    ],
    legend: {markers: {fill: (u, index) => series[index - 1].stroke}},
    cursor: {sync: {key: "steps"}, y: false}, hooks: {drawClear: [shade]},
  };
  const chart = new uPlot(options, [isStacked ? [steps[0] - 1, ...steps] : steps, ...data], plot);
  chart.setLegend({idx: null});
  const watcher = new ResizeObserver(() => chart.setSize({width: Math.max(plot.clientWidth, 100), height}));
  watcher.observe(plot);
  charts.push({chart, watcher, low, high});
}

function drawCharts() {
  charts.forEach(({chart, watcher}) => { watcher.disconnect(); chart.destroy(); });
  charts = [];
  document.querySelectorAll("[data-chart]").forEach(drawChart);
}

const isZoomed = ({chart, low, high}) => chart.scales.x.min > low + 1 || chart.scales.x.max < high - 1;

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
show();

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
      const opened = [...document.querySelectorAll("details[id]")].map(({id, open}) => [id, open]);
      for (const part of ["main", "#status"]) document.querySelector(part).replaceWith(page.querySelector(part));
      for (const [id, open] of opened) if (document.getElementById(id)) document.getElementById(id).open = open;
      show();
    }
    showTimes();
  } catch {
    lost.hidden = false;
  }
  setTimeout(follow, 2000);
}

if (document.querySelector("main[data-state]")) follow();
document.body.dataset.ready = "yes";
