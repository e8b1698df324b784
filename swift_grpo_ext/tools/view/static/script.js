// What the pages do beside showing: language, forms, values of charts, following the run.
const root = document.documentElement;

// --- language ---

function stored(value) {
  try {
    if (value) localStorage.setItem("swift-grpo-ext language", value);
    return localStorage.getItem("swift-grpo-ext language");
  } catch {
    return null;  // a private window
  }
}

root.lang = stored() || (navigator.language.startsWith("zh") ? "zh" : "en");
document.getElementById("language").addEventListener("click", () => {
  root.lang = root.lang === "en" ? "zh" : "en";
  stored(root.lang);
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

// --- values of a chart, by pointer ---

function readable(svg) {
  const {axis: [low, high, start, end, width], curves} = JSON.parse(svg.dataset.chart);
  const steps = [...new Set(curves.flatMap((curve) => curve.points.map(([step]) => step)))].sort((a, b) => a - b);
  const cursor = svg.querySelector(".cursor");

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pointed = low + ((((event.clientX - box.left) / box.width) * width - start) / (end - start)) * (high - low);
    const step = steps.reduce((best, other) => Math.abs(other - pointed) < Math.abs(best - pointed) ? other : best);
    const place = start + ((step - low) / (high - low)) * (end - start);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.classList.add("shown");
    const values = curves.map((curve) => {
      const point = curve.points.find(([x]) => x === step);
      return point ? ` · ${curve.name} ${point[1]}` : "";
    });
    svg.parentElement.querySelector("output").textContent = `${step}${values.join("")}`;
  });
}

document.querySelectorAll("svg[data-chart]").forEach(readable);

// --- the run goes on: what is being read stays as it is, lists and charts follow ---

async function follow() {
  const main = document.querySelector("main[data-state]");
  const lost = document.getElementById("lost");
  try {
    const state = await (await fetch("state")).text();
    lost.hidden = true;
    const isBusy = main.contains(document.activeElement) || main.matches(":hover svg");
    if (state !== main.dataset.state && "live" in main.dataset && !isBusy) {
      const answer = await (await fetch(location.href)).text();
      const page = new DOMParser().parseFromString(answer, "text/html");
      for (const part of ["main", "#status"]) document.querySelector(part).replaceWith(page.querySelector(part));
      document.querySelectorAll("svg[data-chart]").forEach(readable);
    }
  } catch {
    lost.hidden = false;
  }
  setTimeout(follow, 2000);
}

if (document.querySelector("main[data-state]")) follow();
document.body.dataset.ready = "yes";
