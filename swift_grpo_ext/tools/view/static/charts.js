// Curves as SVG: bands, alarms, smoothing, two runs, values by pointer and by keyboard.
import { h, svg } from "./dom.js";
import { number, state, t } from "./words.js";

const WIDTH = 460, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22, COLOURS = 6;

export function drawPanels(runs, names, smoothing) {
  const keys = [...new Set(runs.flatMap((run) => run.panels.map((panel) => panel.key)))];
  return keys.map((key) => {
    const curves = runs.flatMap((run, number) => {
      const panel = run.panels.find((found) => found.key === key);
      return (panel ? panel.curves : []).map((curve) => ({...curve, run: number}));
    });
    const found = runs.flatMap((run) => run.panels).find((panel) => panel.key === key);
    const title = found.title ? found.title[state.language] : t(`panel_${key}`);
    return drawPanel(key, title, curves, runs.flatMap((run) => run.alarms), names, smoothing);
  });
}

function drawPanel(key, title, curves, alarms, names, smoothing) {
  const shown = curves.map((curve) => ({...curve, drawn: smooth(curve.points, smoothing)}));
  const xs = shown.flatMap((curve) => curve.points.map((point) => point[0]));
  const bands = shown.flatMap((curve) => (curve.band || []).flatMap((point) => point.slice(1)));
  const ys = [...shown.flatMap((curve) => curve.drawn.map((point) => point[1])), ...bands];
  const x = scale(least(xs), greatest(xs), LEFT, WIDTH - RIGHT);
  const y = scale(...roomy(least(ys), greatest(ys)), HEIGHT - BOTTOM, TOP);
  const labels = [...new Set(shown.map((curve) => curve.name))];
  const colour = (curve) => `c${labels.indexOf(curve.name) % COLOURS}`;
  const chart = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img", "aria-label": title, "data-panel": key});
  for (const span of alarms) {
    chart.append(svg("rect", {x: x(span.first - 0.5), width: Math.max(x(span.last + 0.5) - x(span.first - 0.5), 1),
      y: TOP, height: HEIGHT - BOTTOM - TOP, class: `alarm ${span.kind}`}, svg("title", {}, t(span.kind))));
  }
  for (const value of ticks(y.low, y.high)) {
    chart.append(svg("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid"}),
      svg("text", {x: LEFT - 5, y: y(value) + 3, class: "tick end"}, short(value)));
  }
  for (const value of ticks(x.low, x.high)) {
    chart.append(svg("text", {x: x(value), y: HEIGHT - 7, class: "tick middle"}, short(value)));
  }
  for (const curve of shown) {
    const dashed = curve.run ? " dashed" : "";
    if (curve.band && curve.band.length > 1) {
      const edge = [...curve.band.map((b) => [b[0], b[2]]), ...curve.band.map((b) => [b[0], b[1]]).reverse()];
      chart.append(svg("path", {d: path(edge, x, y) + "Z", class: `band ${colour(curve)}`}));
    }
    const only = curve.drawn.length === 1;
    chart.append(svg("path", {d: path(only ? [curve.drawn[0], curve.drawn[0]] : curve.drawn, x, y), class: `curve ${colour(curve)}${dashed}`}));
  }
  const cursor = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  const values = h("output", {"aria-live": "polite"});
  chart.append(cursor);
  readable(chart, cursor, values, shown, x, names);
  const legend = labels.map((label) => h("span", {class: `key c${labels.indexOf(label) % COLOURS}`}, label));
  return h("figure", {class: "panel"}, h("figcaption", {}, h("b", {}, title), h("span", {class: "legend"}, legend)), chart, values);
}

// Arrow keys and the pointer move a cursor; the values at its step stand below the chart.
function readable(chart, cursor, values, curves, x, names) {
  const steps = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
  let at = steps.length - 1;
  const show = () => {
    const step = steps[at], both = curves.some((curve) => curve.run);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    const parts = curves.map((curve) => {
      const point = curve.points.find((found) => found[0] === step);
      return point && `${both ? names[curve.run] + " " : ""}${curve.name} ${number(point[1], 4)}`;
    });
    values.textContent = `${t("step")} ${step}: ${parts.filter(Boolean).join(" · ")}`;
  };
  const moves = {ArrowLeft: () => at - 1, ArrowRight: () => at + 1, PageUp: () => at - 10, PageDown: () => at + 10, Home: () => 0, End: () => steps.length - 1};
  chart.addEventListener("keydown", (event) => {
    if (!moves[event.key]) return;
    event.preventDefault();
    at = Math.min(Math.max(moves[event.key](), 0), steps.length - 1);
    show();
  });
  chart.addEventListener("focus", show);
  chart.addEventListener("blur", () => cursor.setAttribute("visibility", "hidden"));
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const step = x.back(((event.clientX - box.left) / box.width) * WIDTH);
    at = steps.reduce((best, value, index) => (Math.abs(value - step) < Math.abs(steps[best] - step) ? index : best), 0);
    show();
  });
}

// Exponential moving average, corrected for its start (as Adam's); 0 leaves the points as they are.
export function smooth(points, weight) {
  let mean = 0, total = 0;
  return points.map(([step, value]) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [step, mean / total];
  });
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function roomy(low, high) {
  const isFlat = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));  // rounding apart
  const room = isFlat ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.05;
  return [low - room, high + room];
}

function scale(low, high, start, end) {
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const to = (value) => start + ((value - low) / (high - low)) * (end - start);
  return Object.assign(to, {low, high, back: (place) => low + ((place - start) / (end - start)) * (high - low)});
}

function ticks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high; value += size) found.push(Math.abs(value) < size / 1e6 ? 0 : value);
  return found;
}

function short(value) {
  if (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

const path = (points, x, y) => points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
