// Causes, curves and settings of one run or of several.

/** Causes of a run: what, since when, which setting, and links to what shows it. */
function causesView(run) {
  if (!run.causes.length) return run.axes.steps.length ? make("p", { class: "quiet" }, run.checked ? "No problem found." : "Causes were not looked for: this run has fewer than three steps of training, or another program wrote it.") : null;
  return run.causes.map((one) => note(make("b", {}, spaced(one.name)), ` ${one.since === one.until ? `at step ${one.since}` : `steps ${one.since} to ${one.until}`}${one.holds ? "" : ", no longer"}: ${one.text}. `,
    "To change: ", one.setting ? make("code", {}, one.setting) : null, `${one.setting ? ": " : ""}${one.advice}. `,
    one.evidence.map(({ step, split, group, member, datum, text }, i) => [i ? " · " : null, anchor(`step ${step}, ${datum === undefined ? `group ${group}, member ${member}` : `example ${datum}`}: ${text}`, { run: run.name, tab: "episodes", step, split, group, member, datum }, {})])));
}

function curvesView(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  // The metrics that a cause reads stand first.
  const main = [...runs.flatMap((run) => run.causes.flatMap((one) => one.metrics)), ...FIRST, ...runs.map((run) => run.metric)];
  const rank = (name) => { const i = main.indexOf(name); return i < 0 ? main.length : i; };
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  let pattern = (name) => name.includes(settings.filter);
  try { const found = new RegExp(settings.filter, "i"); pattern = (name) => found.test(name); } catch { /* not a whole regular expression yet */ }
  const usual = names.filter((name) => main.includes(name));
  const shown = settings.filter ? names.filter(pattern) : settings.all || !usual.length ? names : usual;
  const figures = shown.slice(0, 80).map((name) => {
    const series = runs.map((run, i) => ({ run, i, data: run.metrics[name] })).filter((one) => one.data).map(({ run, i, data }) => {
      const place = name.startsWith("time/") && run.has.includes("timing") ? { tab: "timing" } : { tab: "episodes", split: splitOf(run, name) }, last = data.steps.at(-1);
      return { label: run.title, i, xs: positions(run, data.steps), values: data.values, gaps: data.gaps,
        at: place.split === null ? null : (k) => { location.hash = link({ run: run.name, step: data.steps[k], ...place }, {}); },
        last: short(data.values.at(-1)) + (last < run.axes.steps.at(-1) ? ` at step ${last}` : "") };
    });
    const last = series.map((one) => one.last).join(" · ");
    return make("figure", {}, make("figcaption", {}, make("span", {}, name), make("b", {}, last)), chart(series, name));
  });
  return [runs.map((run) => [runs.length > 1 ? make("h3", {}, run.title) : null, causesView(run)]),
    bar(search("filter", "filter metrics (regex)"), tick("all", "all"),
      control("smooth", make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, oninput: keep("smooth", (field) => Number(field.value)) })),
      tick("log", "log"), choice("x", "x", ["step", "tokens", "minutes"]), quiet(`${shown.length} of ${names.length} metrics`)),
    runs.length > 1 ? make("div", { class: "legends" }, runs.map((run, i) => legend(i, run.title))) : null,
    make("div", { class: "charts" }, figures), first(80, shown.length)];
}

/** Positions of steps on the x axis: steps, trained tokens, or minutes of training. */
function positions(run, steps) {
  if (settings.x === "step") return steps;
  const at = new Map(run.axes.steps.map((step, i) => [step, run.axes[settings.x][i]]));
  return steps.map((step) => at.get(step) ?? 0);
}

function mainSplit(splits) { return splits.includes("train") ? "train" : splits[0]; }

/** Split of the record that a metric was computed from; null if test data are not recorded. */
function splitOf(run, metric) {
  const splits = Object.values(run.record).flat();
  return splits.find((split) => split.startsWith("eval_") && metric.startsWith(split.slice(5) + "/")) ?? (metric.startsWith("test/") ? null : mainSplit(splits));
}

function settingsView(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((name) => matches(name, settings.key));
  const text = (value) => value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  const rows = names.map((name) => [name, ...runs.map((run) => text(run.config[name]))]).filter(([, ...values]) => runs.length === 1 || new Set(values).size > 1);
  return [bar(search("key", "filter settings"), quiet(runs.length > 1 ? `${rows.length} settings in which these runs differ` : `${rows.length} settings`)),
    table(["setting", ...runs.map((run) => runs.length === 1 ? "value" : run.title)], rows.map(([name, ...values]) => [make("code", {}, name), ...values]), "stack settings")];
}
