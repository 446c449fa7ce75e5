// The list of runs, their curves and their settings.

async function runsView() {
  const { folder, runs } = await get("runs");
  const filter = settings.runs || "";
  const wanted = runs.filter((run) => [run.name, run.recipe, run.model, run.state].join(" ").toLowerCase().includes(filter.toLowerCase()));
  const table = make("table", {}, make("tr", {}, ["", "run", "state", "recipe", "model"].map((name) => make("th", {}, name)),
    ["step", "metric", "best", "last", "changed"].map((name) => make("th", { class: name === "metric" ? "" : "number" }, name))));
  for (const run of wanted) {
    const box = make("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `compare ${run.name}`, onchange: () => { box.checked ? chosen.add(run.name) : chosen.delete(run.name); compare.replaceChildren(compareLink()); } });
    table.append(make("tr", {}, make("td", {}, box), make("td", {}, make("a", { href: link({ run: run.name, tab: "curves" }, {}) }, run.name)),
      make("td", {}, make("span", { class: `badge ${run.state}` }, run.state)), make("td", {}, run.recipe || "–"), make("td", {}, run.model || "–"),
      make("td", { class: "number" }, short(run.step)), make("td", {}, run.metric || "–"), make("td", { class: "number" }, short(run.best)),
      make("td", { class: "number" }, short(run.last)), make("td", { class: "number" }, ago(run.updated))));
  }
  const compareLink = () => chosen.size > 1 ? make("a", { href: link({ run: [...chosen].join("|"), tab: "curves" }, {}) }, `Compare ${chosen.size} runs`) : make("span", { class: "quiet" }, "Tick two or more runs to compare them.");
  const compare = make("span", {}, compareLink());
  const search = make("input", { type: "search", placeholder: "filter", value: filter, "aria-label": "filter runs", oninput: (event) => { settings.runs = event.target.value; redraw(); } });
  return [head(folder, null), make("main", {}, make("div", { class: "bar" }, search, compare, make("span", { class: "quiet" }, `${wanted.length} of ${runs.length} runs`)), make("div", { class: "scroll" }, table))];
}

function head(title, tab, runs = []) {
  const tabs = tab === null ? [] : Object.entries(TABS);
  const items = tabs.filter(([name, [, , several, some]]) => runs.length === 1 ? !some || runs[0].has.includes(name) : several).map(([name, [label]]) =>
    make("a", { href: link({ run: state().run, tab: name }, {}), "aria-current": name === tab ? "page" : null }, label));
  return make("header", {}, make("h1", {}, title), ...runs.length === 1 && runs[0].state ? [make("span", { class: `badge ${runs[0].state}` }, runs[0].state),
    make("span", { class: "quiet" }, [runs[0].recipe, runs[0].model].filter(Boolean).join(" · "))] : [], state().only ? "" : make("nav", {}, make("a", { href: "#" }, "All runs"), items));
}

function control(label, input) { return make("label", {}, label, input); }

/** Causes of a run: what, since when, which setting, and links to what shows it. */
function causesView(run) {
  return run.causes.map((one) => make("div", { class: "note" }, make("b", {}, one.name.replaceAll("_", " ")), ` ${one.since === one.until ? `at step ${one.since}` : `steps ${one.since} to ${one.until}`}: ${one.text} `,
    one.setting ? make("span", {}, make("code", {}, one.setting), `: ${one.advice}. `) : null,
    one.evidence.map(({ step, split, group, member, datum }) => [make("a", { href: link({ run: run.name, tab: "episodes", step, split, group }, {}) }, datum === undefined ? `group ${group}, member ${member}` : `example ${datum}`), " "])));
}

function curvesView(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const rank = (name) => { const i = FIRST.indexOf(name); return i < 0 ? FIRST.length : i; };
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  let pattern = () => true;
  try { const found = new RegExp(settings.filter, "i"); pattern = (name) => found.test(name); } catch { pattern = (name) => name.includes(settings.filter); }
  const shown = settings.filter ? names.filter(pattern) : settings.all ? names : names.filter((name) => FIRST.includes(name));
  const charts = make("div", { class: "charts" });
  const figures = (shown.length ? shown : names).map((name) => () => {
    const series = runs.map((run, i) => ({ run, i, data: run.metrics[name] })).filter((one) => one.data).map(({ run, i, data }) => ({
      label: run.title, colour: COLOURS[i % COLOURS.length], steps: data.steps, xs: positions(run, data.steps), values: data.values,
      onpoint: runs.length === 1 ? (step) => { location.hash = name.startsWith("time/") && run.has.includes("timing") ? link({ tab: "timing", step }) : link({ tab: "episodes", step, split: splitOf(run, step, name), group: null }); } : null,
    }));
    const last = series.map((one) => short(one.values[one.values.length - 1])).join("  ");
    return make("figure", {}, make("figcaption", {}, make("span", {}, name), make("b", {}, last)), chart(series, name));
  });
  for (const figure of figures.slice(0, 60)) charts.append(figure());
  const change = (name, read) => (event) => { settings[name] = read(event.target); redraw(); };
  const bar = make("div", { class: "bar" },
    make("input", { type: "search", placeholder: "metrics (regular expression)", value: settings.filter, "aria-label": "filter metrics", oninput: change("filter", (t) => t.value) }),
    control("all", make("input", { type: "checkbox", checked: settings.all, onchange: change("all", (t) => t.checked) })),
    control("smooth", make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, oninput: change("smooth", (t) => Number(t.value)) })),
    control("log", make("input", { type: "checkbox", checked: settings.log, onchange: change("log", (t) => t.checked) })),
    control("x", make("select", { onchange: change("x", (t) => t.value) }, ["step", "tokens", "minutes"].map((name) => make("option", { value: name, selected: name === settings.x }, name)))),
    runs.length > 1 ? runs.map((run, i) => { const swatch = make("i", { class: "swatch" }); swatch.style.background = COLOURS[i % COLOURS.length]; return make("span", {}, swatch, run.title); }) : make("span", { class: "quiet" }, "Click a point to see its episodes."));
  return [...runs.length === 1 ? causesView(runs[0]) : [], bar, charts];
}

/** Positions of steps on the x axis: steps, trained tokens, or minutes of training. */
function positions(run, steps) {
  if (settings.x === "step") return steps;
  const names = settings.x === "tokens" ? ["tokens/cumulative/trained"] : ["time/total", "time/step"];
  const data = names.map((name) => run.metrics[name]).find(Boolean);
  if (!data) return steps;
  const at = new Map();
  let sum = 0;
  data.steps.forEach((step, i) => { sum = settings.x === "tokens" ? data.values[i] : sum + data.values[i] / 60; at.set(step, sum); });
  return steps.map((step) => at.get(step) ?? 0);
}

function splitOf(run, step, metric) {
  const splits = run.record[step] || [];
  const named = splits.find((split) => split.startsWith("eval_") && metric.startsWith(split.slice(5) + "/"));
  return named || splits[0] || "train";
}

function settingsView(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((name) => name.includes(settings.key || ""));
  const text = (value) => value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  const rows = names.map((name) => [name, ...runs.map((run) => text(run.config[name]))]).filter(([, ...values]) => runs.length === 1 || new Set(values).size > 1);
  const table = make("table", {}, make("tr", {}, ["setting", ...runs.map((run) => runs.length === 1 ? "value" : run.title)].map((name) => make("th", {}, name))),
    rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell)))));
  return [make("div", { class: "bar" }, make("input", { type: "search", placeholder: "setting", value: settings.key || "", "aria-label": "filter settings", oninput: (event) => { settings.key = event.target.value; redraw(); } }),
    runs.length > 1 ? make("span", { class: "quiet" }, "Settings in which these runs differ.") : null), make("div", { class: "scroll" }, table)];
}
