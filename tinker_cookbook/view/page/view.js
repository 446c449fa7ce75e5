"use strict";
// The page of `python -m tinker_cookbook.view`. All text of runs is set as text, never as HTML.

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#a6761d"];
const FIRST = [
  "reward/total", "test/env/all/reward/total", "train_mean_nll", "test/nll", "dpo_loss", "teacher_kl",
  "optim/kl_sample_train_v1", "optim/entropy", "env/all/ac_tokens_per_turn", "optim/lr", "learning_rate", "time/total", "time/step",
];

/** Makes an element; `on…` are handlers, other properties are attributes. */
function make(tag, properties = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "rect", "title", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// ---- data: from the server, or from the elements of a report

const embedded = new Map();
for (const element of document.querySelectorAll("script[data-path]")) embedded.set(element.dataset.path, element);
const isReport = embedded.size > 0;

async function unpack(element) {
  if (element.unpacked === undefined) {
    const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    element.unpacked = JSON.parse(await new Response(stream).text());
  }
  return element.unpacked;
}

async function get(path, parameters = {}) {
  if (isReport) {
    const { group, ...rest } = parameters;
    const element = embedded.get(`${path}?${new URLSearchParams(rest)}`);
    if (!element) throw new Error("This report does not have these data.");
    const found = await unpack(element);
    return group === undefined ? found : found[group];
  }
  const answer = await fetch(`api/${path}?${new URLSearchParams(parameters)}`);
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

// ---- state: the part of the address after #, so that each view has a link

function state() { return Object.fromEntries(new URLSearchParams(location.hash.slice(1))); }
function link(changes, base = state()) {
  const next = { ...base, ...changes };
  for (const name of Object.keys(next)) if (next[name] === null || next[name] === undefined) delete next[name];
  return "#" + new URLSearchParams(next);
}
const chosen = new Set();  // runs to compare
const settings = { smooth: 0, log: false, x: "step", filter: "", overlay: "logprob" };

// ---- numbers and times

function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (passed > size) return `${Math.floor(passed / size)} ${unit} ago`;
  return "now";
}

// ---- charts

function smoothed(values, amount) {
  if (!amount) return values;
  // Exponential moving average without the bias towards its first value.
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = amount * sum + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return sum / weight;
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

const tip = make("div", { class: "tip", hidden: true });
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 14 + "px";
}

/** Draws series [{label, colour, xs, values, onpoint}] as lines. */
function chart(series, title) {
  const W = 420, H = 190, L = 46, R = 8, T = 8, B = 20;
  const log = settings.log && series.every((one) => one.values.every((value) => value > 0));
  const f = log ? Math.log10 : (value) => value;
  const lines = series.map((one) => ({ ...one, smooth: smoothed(one.values, settings.smooth) }));
  const xs = lines.flatMap((one) => one.xs), ys = lines.flatMap((one) => one.values.map(f));
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const px = (x) => L + (W - L - R) * (x - x0) / (x1 - x0);
  const py = (value) => T + (H - T - B) * (1 - (f(value) - y0) / (y1 - y0));
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title, class: "live", tabindex: 0 });
  for (const y of ticks(y0, y1, 4)) {
    const value = log ? 10 ** y : y;
    svg.append(make("line", { class: "grid", x1: L, x2: W - R, y1: py(value), y2: py(value) }));
    svg.append(make("text", { x: L - 4, y: py(value) + 3, "text-anchor": "end" }, short(value)));
  }
  for (const x of ticks(x0, x1, 5)) svg.append(make("text", { x: px(x), y: H - 6, "text-anchor": "middle" }, short(x)));
  for (const one of lines) {
    const path = (values) => "M" + values.map((value, i) => `${px(one.xs[i]).toFixed(1)},${py(value).toFixed(1)}`).join("L");
    if (settings.smooth) svg.append(make("path", { class: "raw", d: path(one.values), stroke: one.colour }));
    svg.append(make("path", { class: "line", d: path(one.smooth), stroke: one.colour }));
    if (one.values.length === 1) svg.append(make("circle", { cx: px(one.xs[0]), cy: py(one.values[0]), r: 3, fill: one.colour }));
  }
  const cursor = make("line", { class: "cursor", y1: T, y2: H - B, visibility: "hidden" });
  svg.append(cursor);
  const nearest = (one, x) => {
    let low = 0, high = one.xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (one.xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(one.xs[low] - x) <= Math.abs(one.xs[high] - x) ? low : high;
  };
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return x0 + (x1 - x0) * ((event.clientX - box.left) / box.width * W - L) / (W - L - R);
  };
  svg.addEventListener("pointermove", (event) => {
    const x = at(event), i = nearest(lines[0], x), where = px(lines[0].xs[i]);
    cursor.setAttribute("x1", where); cursor.setAttribute("x2", where); cursor.setAttribute("visibility", "visible");
    const rows = lines.map((one) => `${lines.length > 1 ? one.label + "  " : ""}${short(one.values[nearest(one, x)])}`);
    showTip(event, `${settings.x} ${short(lines[0].xs[i])}\n${rows.join("\n")}`);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  svg.addEventListener("click", (event) => {
    const one = lines[0];
    if (one.onpoint) one.onpoint(one.steps[nearest(one, at(event))]);
  });
  return svg;
}

// ---- views

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
  const tabs = tab === null ? [] : [["curves", "Curves"], ["episodes", "Episodes"], ["settings", "Settings"]];
  const items = tabs.filter(([name]) => runs.length === 1 || name !== "episodes").map(([name, label]) =>
    make("a", { href: link({ run: state().run, tab: name }, {}), "aria-current": name === tab ? "page" : null }, label));
  return make("header", {}, make("h1", {}, title), ...runs.length === 1 ? [make("span", { class: `badge ${runs[0].state}` }, runs[0].state),
    make("span", { class: "quiet" }, [runs[0].recipe, runs[0].model].filter(Boolean).join(" · "))] : [], make("nav", {}, make("a", { href: "#" }, "All runs"), items));
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
      onpoint: runs.length === 1 ? (step) => { location.hash = link({ tab: "episodes", step, split: splitOf(run, step, name), group: null }); } : null,
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

/** Colour of a value in [-1, 1]: blue is negative, orange positive; both differ in brightness too. */
function tint(share, alpha = 1) {
  const s = Math.max(-1, Math.min(1, share));
  return s < 0 ? `rgba(86,180,233,${(-s * alpha).toFixed(3)})` : `rgba(230,159,0,${(s * alpha).toFixed(3)})`;
}

async function episodesView(run) {
  const steps = Object.keys(run.record).map(Number);
  if (!steps.length) return [make("p", { class: "note" }, "This run has no record of its episodes. Runs write one with record=full.")];
  const { step: asked, group, problem } = state();
  const step = steps.includes(Number(asked)) ? Number(asked) : steps[steps.length - 1];
  const splits = run.record[step], split = splits.includes(state().split) ? state().split : splits[0];
  if (problem) return problemView(run, problem);
  const place = { name: run.name, step, split };
  const stepper = (delta) => { const next = steps[steps.indexOf(step) + delta]; if (next !== undefined) location.hash = link({ step: next, group: group ?? null }); };
  keys = { ArrowLeft: () => stepper(-1), ArrowRight: () => stepper(1), Escape: () => { location.hash = link({ group: null }); } };
  const bar = make("div", { class: "bar" },
    make("button", { onclick: () => stepper(-1), "aria-label": "step before" }, "←"),
    control("step", make("input", { type: "number", min: steps[0], max: steps[steps.length - 1], value: step, onchange: (event) => { location.hash = link({ step: event.target.value }); } })),
    make("button", { onclick: () => stepper(1), "aria-label": "next step" }, "→"),
    splits.length > 1 ? control("of", make("select", { onchange: (event) => { location.hash = link({ split: event.target.value, group: null }); } }, splits.map((name) => make("option", { value: name, selected: name === split }, name)))) : null);
  if (group !== undefined) return [bar, ...await groupView(run, place, Number(group), steps)];
  const found = await get("episodes", place);
  if (found.examples) return [bar, ...examplesView(found)];
  const { episodes } = found;
  const query = (settings.text || "").toLowerCase();
  const wanted = episodes.filter((one) => !query || [one.text, one.stop, ...one.tags].join(" ").toLowerCase().includes(query));
  const groups = Map.groupBy ? Map.groupBy(wanted, (one) => one.group) : wanted.reduce((found, one) => found.set(one.group, [...found.get(one.group) || [], one]), new Map());
  const order = settings.order || "group";
  const rows = [...groups].map(([number, members]) => ({ number, members, mean: members.reduce((sum, one) => sum + one.reward, 0) / members.length, spread: Math.max(...members.map((one) => one.reward)) - Math.min(...members.map((one) => one.reward)) }));
  rows.sort({ group: (a, b) => a.number - b.number, "lowest reward": (a, b) => a.mean - b.mean, "highest reward": (a, b) => b.mean - a.mean, "largest spread": (a, b) => b.spread - a.spread }[order]);
  const limit = Math.max(...episodes.map((one) => Math.abs(one.reward)), 1e-9);
  const table = make("table", {}, make("tr", {}, ["group", "rewards", "stop", "tokens", "first answer", ""].map((name) => make("th", {}, name))));
  for (const { number, members } of rows.slice(0, 500)) {
    const dots = members.map((one) => { const dot = make("a", { href: link({ group: number, step, split, member: one.member }), title: `member ${one.member}: ${one.stop}` }, short(one.reward)); dot.style.background = one.reward === 0 ? "#bbb" : tint(one.reward / limit); return dot; });
    const stops = [...new Set(members.map((one) => one.stop))].join(", ");
    const tokens = members.reduce((sum, one) => sum + one.tokens, 0) / members.length;
    table.append(make("tr", {}, make("td", {}, make("a", { href: link({ group: number, step, split }) }, `${number}`), " ", make("span", { class: "quiet" }, members[0].tags.join(" "))), make("td", {}, make("span", { class: "dots" }, dots)),
      make("td", {}, stops), make("td", { class: "number" }, short(Math.round(tokens))), make("td", {}, make("div", { class: "preview" }, members[0].text)),
      make("td", {}, make("a", { href: link({ problem: members[0].problem, group: null }) }, "over steps"))));
  }
  bar.append(make("input", { type: "search", placeholder: "text, stop reason, tag", value: settings.text || "", "aria-label": "search episodes", oninput: (event) => { settings.text = event.target.value; redraw(); } }),
    control("order", make("select", { onchange: (event) => { settings.order = event.target.value; redraw(); } }, ["group", "lowest reward", "highest reward", "largest spread"].map((name) => make("option", { value: name, selected: name === order }, name)))),
    make("span", { class: "quiet" }, `${wanted.length} of ${episodes.length} episodes`));
  return [bar, make("div", { class: "scroll" }, table)];
}

const OVERLAYS = {
  logprob: { label: "sampler log-probability", of: (turn, i) => turn.logprobs?.[i], share: (value) => value / 5, low: "unlikely", high: "" },
  mismatch: { label: "trainer − sampler", of: (turn, i) => turn.trainer && turn.logprobs ? turn.trainer[i] - turn.logprobs[i] : undefined, share: (value) => value * 5, low: "lower", high: "higher" },
  advantage: { label: "advantage", of: (turn, i) => turn.advantages?.[i], share: (value, most) => value / most, low: "pushed down", high: "pushed up" },
  none: { label: "none", of: () => undefined, share: () => 0, low: "", high: "" },
};

async function groupView(run, place, number, steps) {
  const { members, tokens } = await get("group", { ...place, group: number });
  if (!members || !members.length) return [make("p", {}, "This step has no such group.")];
  const overlay = OVERLAYS[settings.overlay];
  const most = Math.max(1e-9, ...members.flatMap((one) => one.turns.flatMap((turn) => (turn.advantages || []).map(Math.abs))));
  const legend = make("i"); legend.style.background = `linear-gradient(90deg, ${tint(-1)}, transparent, ${overlay.high ? tint(1) : "transparent"})`;
  const bar = make("div", { class: "bar" }, make("b", {}, `group ${number}`),
    control("colour", make("select", { onchange: (event) => { settings.overlay = event.target.value; redraw(); } }, Object.entries(OVERLAYS).map(([name, one]) => make("option", { value: name, selected: name === settings.overlay }, one.label)))),
    overlay.low ? make("span", { class: "legend" }, overlay.low, legend, overlay.high) : null);
  const prompt = members[0].turns[0]?.prompt;
  const same = prompt && members.every((one) => one.turns[0] && one.turns[0].prompt.length === prompt.length && one.turns[0].prompt.every((token, i) => token === prompt[i]));
  const shared = same ? [make("div", { class: "facts" }, "prompt of all members"), pieces(prompt, tokens, "tokens prompt")] : [];
  return [bar, ...shared, make("div", { class: "members" }, members.map((one) => episode(one, tokens, overlay, most, same)))];
}

function facts(values) {
  const text = Object.entries(values).map(([name, value]) => `${name}: ${typeof value === "number" ? short(value) : value}`).join(" · ");
  return text ? make("div", { class: "facts" }, text) : null;
}

function episode(one, tokens, overlay, most, same) {
  const turns = one.turns.map((turn, number) => make("div", { class: "turn" },
    same && number === 0 ? null : pieces(turn.prompt, tokens, "tokens prompt"),
    pieces(turn.answer, tokens, "tokens", (span, i) => {
      const value = overlay.of(turn, i);
      if (value !== undefined && value !== null) span.style.background = tint(overlay.share(value, most), 0.8);
      if (turn.masked) span.classList.add("masked");
      const lines = [["sampler", turn.logprobs?.[i]], ["trainer", turn.trainer?.[i]], ["advantage", turn.advantages?.[i]]].filter(([, v]) => v !== undefined && v !== null).map(([name, v]) => `${name} ${short(v)}`);
      return [`token ${turn.answer[i]}`, ...lines, turn.datum === null ? "not trained" : `datum ${turn.datum}`].join("\n");
    }),
    facts({ reward: turn.reward, stop: turn.stop, ...turn.metrics, ...turn.logs })));
  return make("section", { class: "episode" }, make("h3", {}, `member ${one.member}`, make("span", {}, `reward ${short(one.reward)}`),
    one.advantage === null ? null : make("span", {}, `advantage ${short(one.advantage)}`), make("span", { class: "quiet" }, `${one.stop} · weights of step ${one.weights}`)),
  turns, facts({ ...one.metrics, ...one.logs }));
}

/** Shows tokens as text; parts of a character are joined. `mark(span, i)` returns the text of its tip. */
function pieces(ids, tokens, kind, mark) {
  const element = make("div", { class: kind, dir: "auto" });
  let pending = [];
  const decoder = new TextDecoder();
  ids.forEach((id, i) => {
    const piece = id < 0 ? "▧" : tokens[id] ?? `[${id}]`;
    if (Array.isArray(piece)) pending = pending.concat(piece);
    let text = piece;
    if (pending.length) {
      if (!Array.isArray(piece)) { text = decoder.decode(new Uint8Array(pending)) + piece; pending = []; }
      else { const joined = new TextDecoder().decode(new Uint8Array(pending)); if (joined.endsWith("\ufffd") && i + 1 < ids.length) text = ""; else { text = joined; pending = []; } }
    }
    // Control characters and marks of direction are shown, so that they cannot hide or reorder text.
    text = text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `⟨U+${c.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
    if (!mark) { element.append(text); return; }
    const span = make("span", {}, text);
    const about = mark(span, i);
    span.addEventListener("pointermove", (event) => showTip(event, about));
    span.addEventListener("pointerleave", () => { tip.hidden = true; });
    element.append(span);
  });
  return element;
}

/** Trained examples: green has weight, the depth of the colour is the loss of the token. */
function examplesView({ examples, tokens }) {
  const overlay = settings.loss !== false;
  const bar = make("div", { class: "bar" }, control("colour by loss", make("input", { type: "checkbox", checked: overlay, onchange: (event) => { settings.loss = event.target.checked; redraw(); } })),
    make("span", { class: "quiet" }, "Bold tokens are trained; the darker a token, the less probable it was."));
  return [bar, ...examples.slice(0, 200).map((one) => {
    const weights = one.weights || [], logprobs = one.logprobs || [];
    const total = weights.reduce((sum, weight) => sum + Math.abs(weight), 0);
    const loss = weights.reduce((sum, weight, i) => sum - weight * (logprobs[i] || 0), 0) / (total || 1);
    return make("section", { class: "episode" }, make("h3", {}, `example ${one.datum}`, make("span", {}, `loss ${short(loss)}`), make("span", { class: "quiet" }, `${one.tokens.length} tokens`)),
      pieces(one.tokens, tokens, "tokens", (span, i) => {
        // Position i - 1 predicts token i.
        const weight = weights[i - 1] ?? 0, logprob = logprobs[i - 1];
        span.className = weight ? (weight < 0 ? "down" : "trained") : "context";
        if (overlay && weight && logprob !== undefined) span.style.background = tint(logprob / 5, 0.8);
        return [`token ${one.tokens[i]}`, `weight ${short(weight)}`, weight && logprob !== undefined ? `log-probability ${short(logprob)}` : "context"].join("\n");
      }));
  })];
}

async function problemView(run, problem) {
  const { rows, tokens, prompt } = await get("problem", { name: run.name, problem });
  const table = make("table", {}, make("tr", {}, ["step", "of", "rewards", "an answer"].map((name) => make("th", {}, name))));
  const limit = Math.max(...rows.flatMap((row) => row.rewards.map(Math.abs)), 1e-9);
  for (const row of rows) {
    const dots = row.rewards.map((reward) => { const dot = make("a", { href: link({ problem: null, step: row.step, split: row.split, group: row.group }) }, short(reward)); dot.style.background = reward === 0 ? "#bbb" : tint(reward / limit); return dot; });
    table.append(make("tr", {}, make("td", {}, `${row.step}`), make("td", {}, row.split), make("td", {}, make("span", { class: "dots" }, dots)), make("td", {}, pieces(row.answer, tokens, "tokens"))));
  }
  return [make("div", { class: "bar" }, make("b", {}, "One problem over the steps"), make("a", { href: link({ problem: null }) }, "back")), pieces(prompt, tokens, "tokens prompt"), make("div", { class: "scroll" }, table)];
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

// ---- drawing

let keys = {}, drawn = 0;
async function redraw() {
  const number = ++drawn, page = document.getElementById("page");
  const focus = document.activeElement?.getAttribute("aria-label"), at = document.activeElement?.selectionStart;
  let content;
  keys = {};
  try {
    const { run: name, tab } = state();
    if (!name) content = await runsView();
    else {
      const runs = await Promise.all(name.split("|").map((one) => get("run", { name: one })));
      const views = { curves: curvesView, settings: settingsView, episodes: ([run]) => episodesView(run) };
      const shown = await (views[tab] || curvesView)(runs);
      const failed = runs.filter((run) => run.error || run.problem).map((run) => make("p", { class: "note" }, `${run.title}: ${run.problem || `ended by ${run.error}`}`));
      content = [head(runs.map((run) => run.title).join(", "), tab || "curves", runs), make("main", {}, failed, shown)];
      document.title = runs[0].title;
    }
  } catch (error) {
    content = [head("Runs", null), make("main", {}, make("p", { class: "note" }, String(error.message || error)))];
  }
  if (number !== drawn) return;  // a later call has begun
  tip.hidden = true;
  page.replaceChildren(...content, tip);
  if (focus) {
    const again = page.querySelector(`[aria-label="${CSS.escape(focus)}"]`);
    again?.focus();
    if (at !== undefined && at !== null) try { again?.setSelectionRange(at, at); } catch { /* not a text field */ }
  }
}
addEventListener("hashchange", redraw);
addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
redraw();
// New rows appear by themselves; a page in the background asks for nothing.
if (!isReport) setInterval(() => { if (!document.hidden && !["INPUT", "SELECT"].includes(document.activeElement?.tagName) && (!state().run || (state().tab || "curves") === "curves")) redraw(); }, 5000);
