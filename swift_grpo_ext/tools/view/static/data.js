// What the page asks for: from the server, or, in a page that was saved, from the page itself.
const saved = document.getElementById("data");
export const offline = saved ? JSON.parse(saved.textContent) : null;

export async function get(path, values = {}) {
  if (offline) return answer(path, values);
  const query = new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== false));
  const response = await fetch(`api/${path}?${query}`);
  const found = await response.json();
  if (!response.ok) throw new Error(found.problem);
  return found;
}

export function imageAddress(run, place, number, size) {
  if (offline) return offline.images[offline.runs[run].groups[`${place.round}/${place.group}`].images[number]] || "";
  const query = new URLSearchParams({round: place.round, group: place.group, number, size});
  return `api/${run}/image?${query}`;
}

// --- a saved page ---

function answer(path, values) {
  if (path === "state") return offline.state;
  const [number, what] = path.split("/"), run = offline.runs[number];
  if (what === "curves") return run.curves;
  if (what === "group") {
    const found = run.groups[`${values.round}/${values.group}`];
    if (!found) throw new Error(`${values.round} ${values.group}`);
    return found;
  }
  const groups = Object.values(run.groups);
  const samples = groups.flatMap((group) => group.samples);
  if (what === "rounds") return run.rounds;
  if (what === "groups") return run.summaries[values.round] || [];
  const found = matching(samples, values);
  if (what === "different") return {groups: mostDifferent(found)};
  const offset = Number(values.offset || 0);
  const rows = found.slice(offset, offset + Number(values.limit || 50));
  return {count: found.length, offset, rows, version: 0};
}

function matching(samples, values) {
  const [low, high] = range(values.steps || "");
  let pattern = null;
  if (values.text) {
    const source = values.regex ? values.text : values.text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    pattern = new RegExp(source, "i");
  }
  const found = samples.filter((sample) => {
    if (sample.step < low || sample.step > high) return false;
    for (const name of ["phase", "finish_reason", "stop_reason", "fate"]) {
      if (values[name] && sample[name] !== values[name]) return false;
    }
    for (const name of ["reward", "advantage", "num_tokens", "surprisal", "gap_max"]) {
      const least = values[`min_${name}`], greatest = values[`max_${name}`];
      if ((least || greatest) && sample[name] === null) return false;
      if (least && sample[name] < Number(least)) return false;
      if (greatest && sample[name] > Number(greatest)) return false;
    }
    if (values.truncated && sample.truncated !== (values.truncated === "yes")) return false;
    return !pattern || pattern.test(values.in_prompt ? promptOf(sample) : sample.text);
  });
  if (!values.sort) return found;
  const sign = values.descending ? -1 : 1;
  const key = (sample) => (sample[values.sort] === null ? Infinity : sign * sample[values.sort]);
  return found.sort((a, b) => key(a) - key(b) || 0);
}

function promptOf(sample) {
  for (const run of offline.runs) {
    const group = run.groups[`${sample.round}/${sample.group}`];
    if (group) return group.prompt.map((message) => message.content).join("\n");
  }
  return "";
}

function range(text) {
  const [low, high] = text.split(":");
  return [low ? Number(low) : -Infinity, Number((high === undefined ? low : high) || Infinity)];
}

function mostDifferent(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.round}/${sample.group}`;
    groups.set(key, [...(groups.get(key) || []), sample]);
  }
  const spread = (rows) => {
    const mean = rows.reduce((sum, row) => sum + row.reward, 0) / rows.length;
    return rows.reduce((sum, row) => sum + (row.reward - mean) ** 2, 0) / rows.length;
  };
  const best = [...groups.values()].sort((a, b) => spread(b) - spread(a))[0];
  return best ? [{round: best[0].round, group: best[0].group}] : [];
}
