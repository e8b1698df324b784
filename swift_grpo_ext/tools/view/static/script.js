// Switches the language, shows one section of a saved page, and follows a run.
const root = document.documentElement;
let kept = {};
try { kept = localStorage; } catch {}  // a browser may refuse it

root.lang = kept["swift-grpo-ext language"] ?? (navigator.language.startsWith("zh") ? "zh" : "en");
document.getElementById("language").addEventListener("click", () => {
  root.lang = kept["swift-grpo-ext language"] = root.lang === "en" ? "zh" : "en";
});

const first = document.querySelector("main[id]");
if (first && !document.getElementById(location.hash.slice(1))) location.replace(`#${first.id}`);

// The page is replaced when the run has something new, unless the reader types in it.
async function follow() {
  const main = document.querySelector("main[data-state]");
  const lost = document.getElementById("lost");
  try {
    const state = await fetch("state");
    if (!state.ok) throw state;
    if (await state.text() !== main.dataset.state && !main.contains(document.activeElement)) {
      const answer = await (await fetch(location.href)).text();
      const page = new DOMParser().parseFromString(answer, "text/html");
      const opened = [...document.querySelectorAll("details[open][id]")].map(({id}) => id);
      for (const part of ["main", "#status"]) document.querySelector(part).replaceWith(page.querySelector(part));
      for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    }
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
  setTimeout(follow, 2000);
}

if (document.querySelector("main[data-state]")) follow();
document.body.dataset.ready = "yes";
