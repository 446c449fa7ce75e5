// The lists of runs, of evaluations and of sweeps.

const COLUMNS = {
  name: ["run", (run) => run.name], state: ["state", (run) => run.state], recipe: ["recipe", (run) => run.recipe || ""], model: ["model", (run) => run.model || ""],
  step: ["#step", (run) => run.step], metric: ["metric", (run) => run.metric || ""], best: ["#best", (run) => run.best], last: ["#last", (run) => run.last],
  minutes: ["#time", (run) => run.minutes], tokens: ["#trained tokens", (run) => run.tokens], cost: ["#cost", (run) => run.cost], updated: ["#changed", (run) => run.updated],
};

async function listView() {
  const found = await get("runs"), { runs, evaluations, sweeps } = found;
  const lists = { runs: ["Runs", runs], evaluations: ["Evaluations", evaluations], sweeps: ["Sweeps", sweeps] };
  const wanted = state().list, name = lists[wanted] ? wanted : Object.keys(lists).find((key) => lists[key][1].length) || "runs";
  const shown = { runs: runsTable, evaluations: evaluationsTable, sweeps: sweepsTable }[name](lists[name][1]);
  const links = Object.entries(lists).filter(([key, [, items]]) => items.length || key === name).map(([key, [label, items]]) => make("a", { href: link({ list: key }, {}), "aria-current": key === name ? "page" : null }, `${label} (${items.length})`));
  document.title = "Runs";
  return [make("header", {}, make("h1", {}, found.folder), make("nav", {}, links)), make("main", {}, shown)];
}

function sorted(rows, columns) {
  const read = (columns[settings.sort] || columns.updated)[1], sign = settings.down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [read(a), read(b)];
    if (!isNumber(x) && !isNumber(y)) return sign * String(x ?? "").localeCompare(String(y ?? ""), "en", { numeric: true });
    return !isNumber(x) ? 1 : !isNumber(y) ? -1 : sign * (x - y);  // rows without a value are last
  });
}

function sortTitles(columns) {
  return Object.entries(columns).map(([key, [title]]) => {
    const now = settings.sort === key;
    return [title, make("button", { class: "plain", "aria-label": `sort by ${title.replace("#", "")}`, onclick: () => set({ down: now ? !settings.down : title.startsWith("#"), sort: key }) }, title.replace("#", ""), now ? (settings.down ? " ↓" : " ↑") : "")];
  });
}

const spaced = (name) => name.replaceAll("_", " ");
function matches(text, query) { return query.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word)); }

/** Boxes that choose items to compare, and the link to the comparison. */
function chooser(items, label, address) {
  for (const name of chosen) if (!items.some((one) => one.name === name)) chosen.delete(name);
  const say = () => chosen.size > 1 ? make("a", { href: address([...chosen].join("|")) }, `Compare ${chosen.size} ${label}`) : quiet(`Tick two or more ${label} to compare them.`);
  const place = make("span", {}, say());
  const box = (name) => make("input", { type: "checkbox", checked: chosen.has(name), "aria-label": `compare ${name}`, onchange: (event) => { event.target.checked ? chosen.add(name) : chosen.delete(name); place.replaceChildren(say()); } });
  return [box, place];
}

function runsTable(runs) {
  if (!runs.length) return [make("p", {}, "This folder has no runs yet.")];
  const columns = { ...COLUMNS };
  if (!runs.some((run) => run.cost !== null)) delete columns.cost;
  const shown = sorted(runs.filter((run) => matches([run.name, run.recipe, run.model, run.state, ...run.causes].join(" "), settings.runs)), columns);
  const [box, compare] = chooser(runs, "runs", (names) => link({ run: names, tab: "curves" }, {}));
  const cells = {
    name: (run) => [anchor(run.name === "." ? run.title : run.name, { run: run.name, tab: "curves" }, {})],
    state: (run) => [make("span", { class: `badge ${run.state}` }, run.state), run.causes.slice(0, 3).map((one) => [" ", make("span", { class: "badge cause" }, `⚠ ${spaced(one)}`)])], model: (run) => run.model ? run.model.split("/").slice(-1)[0] : "–",
    minutes: (run) => clock(run.minutes), cost: (run) => run.cost === null ? "–" : `$${run.cost.toFixed(2)}`, updated: (run) => ago(run.updated), tokens: (run) => run.tokens ? short(run.tokens) : "–",
  };
  const rows = shown.map((run) => [box(run.name), ...Object.entries(columns).map(([key, [, read]]) => cells[key] ? cells[key](run) : short(read(run) === "" ? null : read(run)))]);
  return [bar(search("runs", "filter runs"), compare, quiet(`${shown.length} of ${runs.length} runs`)), table(["", ...sortTitles(columns)], rows, "stack")];
}

function head(title, tab, runs = []) {
  const items = Object.entries(TABS).filter(([name, [, , several, some]]) => runs.length === 1 ? !some || runs[0].has.includes(name) : several).map(([name, [label]]) =>
    make("a", { href: link({ run: state().run ?? runs[0].name, tab: name }, {}), "aria-current": name === tab ? "page" : null }, label));
  return make("header", {}, make("h1", {}, title), runs.length === 1 && runs[0].state && runs[0].step !== null ? [make("span", { class: `badge ${runs[0].state}` }, runs[0].state), quiet([runs[0].recipe, runs[0].model].filter(Boolean).join(" · "))] : null,
    state().only ? null : make("nav", {}, anchor("All runs", { list: "runs" }, {}), runs.length ? items : null));
}
