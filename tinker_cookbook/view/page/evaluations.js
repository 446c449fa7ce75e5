// Evaluations with intervals, the comparison of two, and sweeps. All numbers come from the server.

function interval(low, high, score) {
  if (!isNumber(low) || low < 0 || high > 1) return null;
  const svg = make("svg", { viewBox: "-5 0 110 12", class: "interval", role: "img", "aria-label": `95% interval ${percent(low)} to ${percent(high)}` });
  svg.append(make("line", { class: "grid", x1: 0, x2: 100, y1: 6, y2: 6 }), make("line", { class: "bar95", x1: low * 100, x2: high * 100, y1: 6, y2: 6 }), make("circle", { cx: score * 100, cy: 6, r: 3 }));
  return svg;
}

function evaluationsTable(evaluations) {
  const [box, compare] = chooser(evaluations, "evaluations", (names) => link({ eval: names }, {}));
  const shown = evaluations.filter((one) => matches([one.name, one.model, ...Object.keys(one.tasks)].join(" "), settings.runs));
  const rows = shown.flatMap((one) => Object.values(one.tasks).map((task, i) => [i ? null : box(one.name), anchor([i ? "" : one.name, i ? "answers" : null], { eval: one.name, task: task.name }, {}), i ? "" : (one.model || "–").replace(/^.*\/(?=[^/]+\/[^/]+\/)/, "…/"), task.name,
    ...scoreCells(task), i ? "" : ago(one.updated)]));
  const problems = evaluations.filter((one) => one.problem).map((one) => note(`${one.name}: ${one.problem}`));
  return [bar(search("runs", "filter evaluations"), compare), problems, table(["", "evaluation", "model", "task", "#answers", "#score", "", "95% interval", "#errors", "#cut off", "", "#changed"], rows)];
}

function scoreCells(task) {
  const { ci_low: low, ci_high: high } = task.metrics, known = isNumber(low);
  return [short(task.num_examples), task.num_examples > task.num_errors ? percent(task.score) : "–", known ? interval(low, high, task.score) : null, known ? `${percent(low)} to ${percent(high)}` : "–", short(task.num_errors), short(task.num_truncated), task.done ? "" : "not finished"];
}

async function evaluationView() {
  const names = state().eval.split("|"), { evaluations } = await get("runs");
  const found = names.map((name) => evaluations.find((one) => one.name === name));
  const missing = names.find((_, i) => !found[i]);
  if (missing !== undefined) throw new Error(`This folder has no evaluation ${missing} (any more).`);
  const tasks = Object.keys(found[0].tasks).filter((task) => found.every((one) => task in one.tasks)), task = tasks.includes(state().task) ? state().task : tasks[0];
  document.title = names.join(", ");
  keys = { Escape: [() => { location.hash = "#list=evaluations"; }, "all evaluations"] };
  const shown = task === undefined ? note("These evaluations have no task in common.") : found.length === 1 ? await answersView(found[0], task) : await verdictView(found, task);
  return [make("header", {}, make("h1", {}, found.map((one) => one.title).join(", ")), make("nav", {}, make("a", { href: "#list=evaluations" }, "All evaluations"), tasks.map((name) => make("a", { href: link({ task: name }), "aria-current": name === task ? "page" : null }, name)))),
    make("main", {}, table(["evaluation", "#answers", "#score", "", "95% interval", "#errors", "#cut off", ""], found.map((one) => [one.title, ...scoreCells(one.tasks[task])])), shown)];
}

const answerText = (one) => one.messages.filter((turn) => turn.role === "assistant").map((turn) => turn.content).join("\n⏎\n");
const questionText = (one) => one.messages.filter((turn) => turn.role === "user").map((turn) => turn.content).join("\n");

async function answersView(evaluation, task) {
  const { answers: all } = await get("answers", { name: evaluation.name, task });
  const kinds = { all: () => true, right: (one) => !one.error && one.reward >= 1, "partly right": (one) => !one.error && one.reward > 0 && one.reward < 1, wrong: (one) => !one.error && one.reward <= 0, "cut off": (one) => one.truncated, errors: (one) => one.error };
  const wanted = all.filter(kinds[settings.kind] || kinds.all).filter((one) => matches(`${one.id} ${one.messages.map((turn) => turn.content).join("\n")}`, settings.text));
  return [bar(search("text", "search whole texts"), choice("show", "kind", Object.keys(kinds)), quiet(`${wanted.length} of ${all.length} answers`)),
    make("div", { class: "members" }, wanted.slice(0, 100).map((one) => make("section", { class: "episode" }, make("h3", {}, one.id, make("span", {}, one.error ? "error" : `reward ${short(one.reward)}`), one.truncated ? quiet("cut off") : null, evaluation.tasks[task].recorded ? anchor("tokens", { run: `${evaluation.name}/${task}`, tab: "episodes", step: 0, group: one.group, member: one.sample }, {}) : null), messages(one.messages), one.error ? note(one.error) : null, facts(one.logs)))),
    first(100, wanted.length)];
}

async function verdictView(found, task) {
  const [a, b] = found, [verdict, ...sides] = await Promise.all([get("verdicts", { a: a.name, b: b.name }), ...[a, b].map((one) => get("answers", { name: one.name, task }))]);
  const text = verdict.tasks[task]?.lines || [verdict.problem];
  const maps = sides.map((side) => new Map(side.answers.map((one) => [`${one.id}, sample ${one.sample}`, one])));
  const kinds = { differ: (x, y) => x.reward !== y.reward, "only a is better": (x, y) => x.reward > y.reward, "only b is better": (x, y) => y.reward > x.reward, all: () => true };
  const kind = kinds[settings.pairs] || kinds.differ;
  const pairs = [...maps[0]].filter(([id, one]) => maps[1].has(id) && kind(one, maps[1].get(id)) && matches(`${questionText(one)} ${answerText(one)} ${answerText(maps[1].get(id))}`, settings.text));
  return [note(make("b", {}, text[0]), text.slice(1).map((sentence) => make("div", {}, sentence)), make("div", { class: "quiet" }, `a is ${a.title}, b is ${b.title}.`, found.length > 2 ? " Only the first two are compared." : "")),
    bar(search("text", "search whole texts"), choice("show", "pairs", Object.keys(kinds)), quiet(`${pairs.length} of ${maps[0].size} answers`)),
    pairs.slice(0, 50).map(([id, one]) => make("section", {}, make("h3", {}, id), make("div", { class: "tokens prompt", dir: "auto" }, questionText(one)),
      diffView([one, maps[1].get(id)].map((side, i) => ({ title: found[i].title, reward: side.error ? "error" : side.reward, stop: side.truncated ? "cut off" : "", text: answerText(side) }))))),
    first(50, pairs.length)];
}

function sweepsTable(sweeps) {
  return [make("ul", {}, sweeps.map((name) => make("li", {}, anchor(name, { sweep: name }, {}))))];
}

async function sweepView() {
  const name = state().sweep, { rows, swept, metric, best, lower_is_better: lower, note: caution, problem } = await get("sweep", { name });
  const { runs } = await get("runs"), prefix = name === "." ? "" : `${name}/`, states = new Map(runs.map((run) => [run.name, run.state]));
  document.title = name;
  keys = { Escape: [() => { location.hash = "#list=sweeps"; }, "all sweeps"] };
  // As in the sweep's own picture: the first numeric setting, a line for each combination of the others.
  const x = swept.find((key) => rows.every((row) => isNumber(row[key]))), lines = new Map();
  for (const row of rows.filter((one) => isNumber(one.value))) { const label = swept.filter((key) => key !== x).map((key) => `${key}=${row[key]}`).join(", "); lines.set(label, [...lines.get(label) || [], row]); }
  const series = x === undefined ? [] : [...lines].map(([label, points], i) => { const own = points.sort((a, b) => a[x] - b[x]); return { label, i, xs: own.map((row) => row[x]), values: own.map((row) => row.value), at: (k) => { location.hash = link({ run: prefix + own[k].run, tab: "curves" }, {}); } }; });
  const xs = series.flatMap((one) => one.xs), wide = xs.length > 0 && Math.min(...xs) > 0 && Math.max(...xs) > 10 * Math.min(...xs);
  const columns = { ...Object.fromEntries(swept.map((key) => [key, [isNumber(rows[0]?.[key]) ? `#${key}` : key, (row) => row[key]]])), value: [`#${metric || "value"}`, (row) => row.value], step: ["#step", (row) => row.step], seconds: ["#time", (row) => row.seconds], state: ["state", (row) => row.state] };
  const cells = sorted(rows, { ...columns, updated: [null, (row) => (lower ? -1 : 1) * row.value] }).map((row) => {
    const state = row.state === "done" ? "finished" : states.get(prefix + row.run) ?? row.state;
    return [anchor(row.run, { run: prefix + row.run, tab: "curves" }, {}), ...swept.map((key) => short(row[key])), [row.run === best ? make("b", {}, "best ") : null, short(row.value)], short(row.step), clock(row.seconds / 60), make("span", { class: `badge ${state}` }, state)];
  });
  return [make("header", {}, make("h1", {}, name), make("nav", {}, make("a", { href: "#list=sweeps" }, "All sweeps"), anchor("Curves of its runs", { run: rows.map((row) => prefix + row.run).filter((one) => states.has(one)).slice(0, 8).join("|"), tab: "curves" }, {}))),
    make("main", {}, problem ? note(problem) : null, caution ? note(caution) : null,
      series.length ? make("div", { class: "charts" }, make("figure", {}, make("figcaption", {}, make("span", {}, `${metric} by ${x}`)), chart(series, `${metric} by ${x}`, { x, logX: wide, dots: true }), series.length > 1 ? make("div", { class: "legends" }, series.map((one) => legend(one.i, one.label))) : null)) : null,
      table(["run", ...sortTitles(columns)], cells))];
}
