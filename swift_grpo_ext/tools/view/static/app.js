// Pages: samples, rounds, one group, curves. The address's hash says which, with its filters.
import { drawPanels } from "./charts.js";
import { get, imageAddress, offline } from "./data.js";
import { h } from "./dom.js";
import { number, state, t } from "./words.js";

const POLL_MS = 2000, PAGE = 50;
const RANGES = ["reward", "advantage", "num_tokens", "surprisal", "gap_max"];
const CHOICES = ["phase", "finish_reason", "stop_reason", "fate"];
const SORTS = ["reward", "advantage", "num_tokens", "surprisal", "gap_mean", "gap_max"];
const top_ = document.getElementById("top"), main = document.getElementById("main");
let known = {runs: []}, version = "", colour = "logprob", imageSize = "seen", smoothing = 0.6, drawing = 0;

const store = {
  get: (key) => { try { return localStorage.getItem(`swift-grpo-ext ${key}`); } catch { return null; } },
  set: (key, value) => { try { localStorage.setItem(`swift-grpo-ext ${key}`, value); } catch { /* private */ } },
};

// --- where we are ---

function here() {
  const [page, query = ""] = (location.hash.slice(1) || "samples").split("?");
  return {page, values: Object.fromEntries(new URLSearchParams(query))};
}

function go(page, values = {}, replace = false) {
  const kept = Object.entries(values).filter(([, value]) => value !== "" && value !== undefined && value !== false);
  const hash = `#${page}?${new URLSearchParams(kept)}`;
  if (!replace) location.hash = hash;
  else { history.replaceState(null, "", hash); draw(false); }
}

const runNumber = () => Math.min(Number(here().values.run || 0), Math.max(known.runs.length - 1, 0));
const run = () => known.runs[runNumber()] || {facets: {}, functions: [], settings: {}};
const link = (page, values, ...content) => h("a", {href: `#${page}?${new URLSearchParams(values)}`}, ...content);
const place = (sample) => ({run: runNumber(), round: sample.round, group: sample.group});

// --- the frame ---

function drawTop() {
  const {page} = here(), numberOfRun = runNumber();
  const tabs = ["samples", "rounds", "curves"].map((name) => h("a", {href: `#${name}?run=${numberOfRun}`,
    "aria-current": page === name ? "page" : null}, t(name)));
  const runs = known.runs.length < 2 ? h("b", {class: "run"}, run().name || "") : h("select", {
    id: "run", "aria-label": t("run"), onchange: (event) => go(page === "group" ? "samples" : page, {...here().values, offset: "", run: event.target.value}),
  }, known.runs.map((found, i) => h("option", {value: i, selected: i === numberOfRun}, found.name)));
  const status = offline ? t("offline") : run().is_whole === false ? t("reading") : t("live");
  top_.replaceChildren(h("nav", {}, runs, tabs), h("span", {class: "tools"},
    h("span", {id: "status", role: "status"}, status),
    h("button", {id: "keys", title: t("key_list"), onclick: () => alert(t("key_list"))}, t("keys")),
    h("button", {id: "theme", "aria-label": t("theme"), title: t("theme"), onclick: switchTheme}, "◐"),
    h("button", {id: "language", "aria-label": t("language_help"), onclick: switchLanguage}, t("language"))));
  document.title = `${run().name || ""} – swift-grpo-ext`;
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  store.set("theme", root.dataset.theme);
}

function switchLanguage() {
  state.language = 1 - state.language;
  store.set("language", state.language);
  document.documentElement.lang = state.language ? "zh" : "en";
  draw();
}

async function draw(whole = true) {
  const {page, values} = here(), mine = ++drawing;
  const pages = {samples: samplesPage, rounds: roundsPage, group: groupPage, curves: curvesPage};
  drawTop();
  try {
    if (run().problem) throw new Error(run().problem);
    const found = await (pages[page] || samplesPage)(values, whole);
    if (mine === drawing && found) main.replaceChildren(...[found].flat());
  } catch (error) {
    if (mine === drawing) main.replaceChildren(h("p", {class: "problem", role: "alert"}, error.message));
  }
}

// --- samples ---

async function samplesPage(values, whole) {
  const results = h("section", {id: "results", "aria-live": "polite"});
  if (!whole && document.getElementById("results")) {
    document.getElementById("results").replaceChildren(...(await list(values)));
    return null;
  }
  results.replaceChildren(...(await list(values)));
  return [filters(values), results];
}

async function list(values) {
  let found;
  try {
    found = await get(`${runNumber()}/samples`, {...values, limit: PAGE});
  } catch (error) {
    return [h("p", {class: "problem", role: "alert"}, error.message)];
  }
  const offset = found.offset, move = (by) => go("samples", {...here().values, offset: offset + by || ""}, true);
  const pager = h("div", {class: "pager"},
    h("span", {id: "count"}, t("count", number(found.count), number(run().samples))), " ",
    found.count ? t("page", number(offset + 1), number(Math.min(offset + PAGE, found.count))) : "",
    h("button", {disabled: offset <= 0, onclick: () => move(-Math.min(PAGE, offset))}, t("previous")),
    h("button", {id: "next-page", disabled: offset + PAGE >= found.count, onclick: () => move(PAGE)}, t("next")));
  if (!found.count) return [pager, h("p", {class: "soft"}, t("nothing"))];
  return [pager, h("ol", {class: "samples"}, found.rows.map(sampleRow))];
}

function sampleRow(sample) {
  const images = sample.num_media ? [h("img", {src: imageAddress(runNumber(), sample, 0, "small"), alt: t("prompt"), loading: "lazy", onerror: (e) => e.target.remove()})] : [];
  return h("li", {}, h("a", {class: "sample", href: `#group?${new URLSearchParams({...place(sample), index: sample.index})}`},
    h("span", {class: "thumb"}, images),
    h("span", {class: "what"},
      h("span", {class: "place"}, `${t("round")} ${sample.round} · ${t("group")} ${sample.group} · ${t("index")} ${sample.index}`, badges(sample)),
      h("span", {class: "text"}, sample.text, sample.is_cut ? " …" : "")),
    h("span", {class: "figures"},
      h("span", {class: "reward"}, rewardBar(sample), h("b", {}, sample.reward === null ? t("unscored") : number(sample.reward))),
      parts(sample),
      figure("advantage", sample.advantage), figure("num_tokens", sample.num_tokens),
      figure("surprisal", sample.surprisal), figure("gap_mean", sample.gap_mean))));
}

const figure = (key, value) => h("span", {class: "figure"}, h("i", {}, t(key)), " ", number(value));
const parts = (sample) => Object.entries(sample.parts).map(([name, value]) => h("span", {class: "figure"}, h("i", {}, name), " ", number(value)));

function rewardBar(sample) {
  const share = sample.reward === null ? 0 : Math.max(0, Math.min(1, sample.reward / (run().greatest || 1)));
  return h("span", {class: "bar", "aria-hidden": "true"}, h("span", {style: {width: `${share * 100}%`}}));
}

function badges(sample) {
  const found = [];
  if (sample.truncated) found.push(h("span", {class: "badge bad"}, t("truncated")));
  if (sample.replaced) found.push(h("span", {class: "badge"}, t("replaced")));
  if (sample.fate && sample.fate !== "trained") found.push(h("span", {class: "badge"}, t(sample.fate)));
  if (sample.turn) found.push(h("span", {class: "badge"}, `${t("turn")} ${sample.turn}`));
  return found;
}

function filters(values) {
  const set = (name, value) => go("samples", {...here().values, [name]: value, offset: ""}, true);
  let timer;
  const soon = (name) => (event) => { clearTimeout(timer); timer = setTimeout(() => set(name, event.target.value), 300); };
  const field = (label, ...content) => h("label", {}, h("span", {}, label), ...content);
  const input = (name, props) => h("input", {name, value: values[name] || "", oninput: soon(name), ...props});
  const select = (name, options) => h("select", {name, onchange: (event) => set(name, event.target.value)},
    h("option", {value: ""}, name === "sort" ? t("newest") : t("any")),
    options.map(([value, label]) => h("option", {value, selected: values[name] === value}, label)));
  const check = (name, label) => h("label", {class: "check"}, h("input", {type: "checkbox", name, checked: Boolean(values[name]),
    onchange: (event) => set(name, event.target.checked ? "1" : "")}), label || t(name));
  const jump = (to) => h("button", {id: to, type: "button", onclick: () => jumpTo(to)}, t(to));
  return h("form", {class: "filters", onsubmit: (event) => event.preventDefault()},
    h("div", {class: "row"},
      field(t("text"), input("text", {type: "search", id: "search"})), check("regex"), check("in_prompt"),
      field(t("steps"), input("steps", {placeholder: t("steps_example"), size: 10})),
      field(t("sort"), select("sort", SORTS.map((name) => [name, t(name)]))), check("descending"),
      h("span", {class: "jumps"}, ["best", "worst", "different"].map(jump)),
      h("button", {type: "button", id: "clear", onclick: () => { location.hash = `#samples?run=${runNumber()}`; }}, t("clear"))),
    h("details", {open: store.get("filters") === "open" || RANGES.some((n) => values[`min_${n}`] || values[`max_${n}`]) || CHOICES.some((n) => values[n]),
      ontoggle: (event) => store.set("filters", event.target.open ? "open" : "shut")},
      h("summary", {}, `${t("reward")}, ${t("truncated")}, ${t("stop_reason")} …`),
      h("div", {class: "row"},
        RANGES.map((name) => field(t(name), h("span", {class: "range"},
          input(`min_${name}`, {type: "number", step: "any", "aria-label": `${t(name)}, ${t("least")}`}), "–",
          input(`max_${name}`, {type: "number", step: "any", "aria-label": `${t(name)}, ${t("greatest")}`})))),
        field(t("truncated"), select("truncated", [["yes", t("yes")], ["no", t("no")]])),
        CHOICES.map((name) => field(t(name), select(name, (run().facets[name] || []).map(([value, count]) => [value, `${t(value)} (${number(count)})`])))))));
}

async function jumpTo(to) {
  const values = {...here().values};
  if (to === "different") {
    const found = (await get(`${runNumber()}/different`, values)).groups[0];
    return found && go("group", {run: runNumber(), round: found.round, group: found.group});
  }
  const found = await get(`${runNumber()}/samples`, {...values, sort: "reward", descending: to === "best" ? "1" : "", offset: "", limit: 1});
  const [sample] = found.rows;
  return sample && go("group", {...place(sample), index: sample.index});
}

// --- rounds ---

async function roundsPage(values) {
  const rounds = await get(`${runNumber()}/rounds`);
  if (!rounds.length) return h("p", {class: "soft"}, t("no_rounds"));
  const chosen = rounds.find((found) => found.round === values.round) || rounds[rounds.length - 1];
  const groups = await get(`${runNumber()}/groups`, {round: chosen.round});
  const at = rounds.indexOf(chosen);
  const step = (by, label, id) => h("button", {id, disabled: !rounds[at + by], onclick: () => go("rounds", {run: runNumber(), round: rounds[at + by].round})}, label);
  return [h("div", {class: "row"},
    step(-1, t("earlier_round"), "earlier-round"),
    h("select", {id: "round", "aria-label": t("round"), onchange: (event) => go("rounds", {run: runNumber(), round: event.target.value})},
      rounds.map((found) => h("option", {value: found.round, selected: found === chosen}, `${found.round} · ${t("mean_reward")} ${number(found.reward)}`))),
    step(1, t("later_round"), "later-round"),
    h("span", {class: "soft"}, `${number(chosen.samples)} ${t("samples")} · ${number(chosen.groups)} ${t("groups")}`)),
  h("ol", {class: "groups"}, groups.map((group) => groupCard(chosen.round, group)))];
}

function groupCard(round, group) {
  const images = group.num_media ? [h("img", {src: imageAddress(runNumber(), {round, group: group.group}, 0, "small"), alt: t("prompt"), loading: "lazy", onerror: (e) => e.target.remove()})] : [];
  const dots = group.rewards.map((reward) => h("span", {class: "dot", title: number(reward), style: {"--share": reward === null ? 0 : Math.max(0, Math.min(1, reward / (run().greatest || 1)))}}));
  return h("li", {}, h("a", {href: `#group?${new URLSearchParams({run: runNumber(), round, group: group.group})}`},
    h("span", {class: "thumb"}, images), h("span", {class: "what"}, h("b", {}, `${t("group")} ${group.group}`), h("span", {class: "text"}, group.prompt), h("span", {class: "dots"}, dots),
      h("span", {class: "figures"}, figure("mean_reward", group.reward), figure("spread", group.spread), figure("distinct", group.distinct)))));
}

// --- one group ---

async function groupPage(values) {
  const round = values.round, group = Number(values.group);
  const [found, rounds, groups] = await Promise.all([get(`${runNumber()}/group`, {round, group}),
    get(`${runNumber()}/rounds`), get(`${runNumber()}/groups`, {round})]);
  const numbers = groups.map((g) => g.group), at = numbers.indexOf(group), ofRound = rounds.findIndex((r) => r.round === round);
  const to = (id, label, target) => h("button", {id, disabled: !target, onclick: () => target && go("group", {run: runNumber(), ...target})}, label);
  const near = (by) => (numbers[at + by] === undefined ? null : {round, group: numbers[at + by]});
  const later = (by) => (rounds[ofRound + by] ? {round: rounds[ofRound + by].round, group: 0} : null);
  const others = await Promise.all(known.runs.map((other, i) => (i === runNumber() ? null : sameElsewhere(i, other.name, round, group))));
  return [
    h("div", {class: "row"}, to("earlier-round", t("earlier_round"), later(-1)), to("earlier-group", t("earlier_group"), near(-1)),
      h("h1", {}, `${t("round")} ${round} · ${t("group")} ${group}`),
      to("later-group", t("later_group"), near(1)), to("later-round", t("later_round"), later(1))),
    h("div", {class: "asked"}, images(found), h("section", {class: "prompt"}, h("h2", {}, t("prompt")),
      found.prompt.map((message) => h("div", {class: "message"}, h("b", {}, message.role), h("div", {class: "text"}, message.content)))),
    h("section", {}, h("h2", {}, t("replay")), h("div", {class: "copy"}, h("code", {id: "replay"}, found.replay), copyButton(found.replay)))),
    colours(), h("div", {class: "completions"}, found.samples.map((sample) => completion(sample, values))), ...others.filter(Boolean)];
}

async function sameElsewhere(i, name, round, group) {
  try {
    const found = await get(`${i}/group`, {round, group});
    return h("section", {class: "other"}, h("h2", {}, t("other_run", name)), h("div", {class: "completions"}, found.samples.map((sample) => completion(sample, {}))));
  } catch {
    return h("p", {class: "soft"}, t("other_missing", name));
  }
}

function images(found) {
  if (!found.media.length) return null;
  const size = (name) => h("button", {id: `size-${name}`, "aria-pressed": String(imageSize === name), onclick: () => { imageSize = name; draw(); }}, t(name));
  const one = (medium, i) => {
    const shown = imageSize === "seen" ? medium.seen : medium.size;
    if (medium.problem) return h("figure", {}, h("figcaption", {}, medium.name), h("p", {class: "problem"}, medium.problem));
    const source = imageAddress(runNumber(), found, i, imageSize);
    return h("figure", {}, h("a", {href: offline ? null : imageAddress(runNumber(), found, i, "full"), target: "_blank"},
      h("img", {src: source, alt: `${t("prompt")}: ${medium.name}`, width: shown ? shown[0] : null})),
    h("figcaption", {}, medium.name, h("br"), shown ? t("pixels", ...shown) : t("seen_unknown")));
  };
  return h("section", {class: "images"}, offline ? null : h("div", {class: "row"}, size("seen"), size("full")), found.media.map(one));
}

function copyButton(text) {
  return h("button", {id: "copy", onclick: async (event) => {
    try { await navigator.clipboard.writeText(text); } catch { getSelection().selectAllChildren(document.getElementById("replay")); document.execCommand("copy"); }
    event.target.textContent = t("copied");
  }}, t("copy"));
}

function colours() {
  const choose = (name) => h("label", {class: "check"}, h("input", {type: "radio", name: "colour", value: name, checked: colour === name, onchange: () => { colour = name; draw(); }}), t(`by_${name}`));
  return h("div", {class: "row colours"}, h("b", {}, t("colour")), ["logprob", "gap", "none"].map(choose),
    colour === "none" ? null : h("span", {class: `scale ${colour}`}, t(`scale_${colour}`)), h("span", {class: "soft"}, t("shared")), h("output", {id: "token", "aria-live": "polite"}, t("token_help")));
}

function completion(sample, values) {
  const isChosen = values.index !== undefined && Number(values.index) === sample.index;
  const facts = [["num_tokens", number(sample.num_tokens)], ["surprisal", number(sample.surprisal)], ["gap_mean", number(sample.gap_mean)], ["gap_max", number(sample.gap_max)],
    ["finish_reason", sample.finish_reason], ["stop_reason", sample.stop_reason], ["fate", sample.fate && t(sample.fate)],
    ["seed", sample.seed], ["replica", sample.replica], ["weight_version", sample.weight_version]];
  return h("article", {class: isChosen ? "completion chosen" : "completion", "data-index": sample.index},
    h("h3", {}, `${t("index")} ${sample.index}`, badges(sample)),
    h("p", {class: "reward"}, rewardBar(sample), h("b", {}, sample.reward === null ? t("unscored") : number(sample.reward)), " ", figure("advantage", sample.advantage), parts(sample)),
    sample.pieces ? tokens(sample) : h("div", {class: "tokens"}, sample.text),
    sample.pieces ? null : h("p", {class: "soft"}, t("no_tokenizer")), sample.is_cut ? h("p", {class: "soft"}, t("cut")) : null,
    h("dl", {}, facts.filter(([, value]) => value !== null && value !== undefined).map(([key, value]) => [h("dt", {}, t(key)), h("dd", {}, value)])));
}

// The greatest gap among each piece's tokens, in nats; 0 below what the record keeps.
function gapsOf(sample) {
  let position = 0;
  return sample.pieces.map(([, count]) => {
    const found = Array.from({length: count}, (_, i) => (sample.gaps || {})[position + i] || 0);
    position += count;
    return Math.max(...found);
  });
}

function tokens(sample) {
  const describe = (span) => {
    const [text, count, logprob] = sample.pieces[span.dataset.at];
    const gap = gapAt[span.dataset.at];
    const known_ = logprob === null ? ["–", "–"] : [logprob.toFixed(4), number(Math.exp(logprob), 4)];
    const words = t("token", JSON.stringify(text), ...known_) + (gap ? ` · ${t("token_gap", number(gap))}` : "") + (count > 1 ? ` · ${t("tokens_together", count)}` : "");
    document.getElementById("token").textContent = words;
  };
  let position = 0;
  const gapAt = gapsOf(sample);
  const spans = sample.pieces.map(([text, count, logprob], at) => {
    const depth = colour === "gap" ? Math.min(1, gapAt[at]) : colour === "logprob" && logprob !== null ? Math.min(1, -logprob / 5) : 0;
    const shared = position + count <= sample.num_shared ? " shared" : "";
    position += count;
    return h("span", {class: `token ${colour}${shared}`, "data-at": at, style: {"--depth": depth.toFixed(3)}}, text);
  });
  const box = h("div", {class: "tokens", tabindex: 0, role: "group", "aria-label": t("token_help")}, spans);
  let at = -1;
  const choose = (next) => {
    if (spans[at]) spans[at].classList.remove("current");
    at = Math.min(Math.max(next, 0), spans.length - 1);
    if (!spans[at]) return;
    spans[at].classList.add("current");
    describe(spans[at]);
  };
  box.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (by) { event.preventDefault(); choose(at + by); }
  });
  box.addEventListener("pointerover", (event) => event.target.dataset.at && describe(event.target));
  box.addEventListener("click", (event) => event.target.dataset.at && choose(Number(event.target.dataset.at)));
  return box;
}

// --- curves ---

async function curvesPage() {
  const found = await Promise.all(known.runs.map((_, i) => get(`${i}/curves`)));
  const names = known.runs.map((each) => each.name);
  const grid = h("div", {class: "panels"});
  const fill = () => grid.replaceChildren(...drawPanels(found, names, smoothing));
  fill();
  if (!grid.children.length) return h("p", {class: "soft"}, t("no_curves"));
  const slider = h("input", {id: "smoothing", type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing, oninput: (event) => { smoothing = Number(event.target.value); fill(); }});
  const legend = names.length > 1 ? h("span", {class: "legend"}, h("span", {}, `— ${names[0]}`), h("span", {}, `┄ ${names[1]}`)) : null;
  return [h("div", {class: "row"}, h("label", {}, h("span", {}, t("smoothing")), slider), legend, h("span", {class: "soft"}, t("curve_help"))), grid];
}

// --- keys, and what is new ---

document.addEventListener("keydown", (event) => {
  const {page} = here(), isTyping = event.target.closest("input, select, textarea");
  if (event.key === "Escape") return isTyping ? event.target.blur() : page === "group" && history.back();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const click = (id) => () => { const found = document.getElementById(id); if (found) found.click(); };
  const actions = {"/": () => document.getElementById("search") && document.getElementById("search").focus(),
    j: () => step(1), k: () => step(-1), n: click("later-group"), p: click("earlier-group"), "]": click("later-round"), "[": click("earlier-round"),
    b: () => jumpTo("best"), w: () => jumpTo("worst"), d: () => jumpTo("different"), "?": click("keys"),
    1: () => go("samples", {run: runNumber()}), 2: () => go("rounds", {run: runNumber()}), 3: () => go("curves", {run: runNumber()})};
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  return undefined;
});

function step(by) {
  const links = [...main.querySelectorAll("ol a")];
  const at = links.indexOf(document.activeElement);
  const next = links[at < 0 ? 0 : Math.min(Math.max(at + by, 0), links.length - 1)];
  if (next) next.focus();
}

async function poll() {
  try {
    known = await get("state");
    document.body.classList.remove("lost");
    const now = JSON.stringify(known.runs.map((found) => [found.version, found.is_whole]));
    if (now !== version && version) refresh();
    version = now;
  } catch {
    document.body.classList.add("lost");
    const status = document.getElementById("status");
    if (status) status.textContent = t("lost");
  }
  if (!offline) setTimeout(poll, POLL_MS);
}

// New samples come where the reader looks at the first page; what is being read stays as it is.
function refresh() {
  const {page, values} = here();
  drawTop();
  if (page === "samples" && !values.offset && !main.querySelector("ol a:focus")) draw(false);
  if (page === "rounds" && !values.round) draw();
  if (page === "curves" && !main.contains(document.activeElement)) draw();
}

async function begin() {
  const theme = store.get("theme"), language = store.get("language");
  if (theme) document.documentElement.dataset.theme = theme;
  else document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  state.language = language === null ? Number(navigator.language.startsWith("zh")) : Number(language);
  document.documentElement.lang = state.language ? "zh" : "en";
  addEventListener("hashchange", () => { draw(); main.focus({preventScroll: true}); scrollTo(0, 0); });
  await poll();
  await draw();
  document.body.dataset.ready = "yes";
}

begin();
