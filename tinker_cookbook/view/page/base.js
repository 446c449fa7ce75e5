"use strict";
// The page of `python -m tinker_cookbook.view`. All text of runs is set as text, never as HTML.

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#a6761d"];
const FIRST = [
  "reward/total", "test/env/all/reward/total", "train_mean_nll", "test/nll", "dpo_loss", "teacher_kl",
  "optim/kl_sample_train_v1", "optim/entropy", "env/all/ac_tokens_per_turn", "optim/lr", "learning_rate", "time/total", "time/step",
];

/** Makes an element; `on…` are handlers, other properties are attributes. */
function make(tag, properties = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "rect", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(typeof child === "object" ? child : visible(child));
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

const answers = new Map();  // the last answer of the server to each request, as text
async function get(path, parameters = {}) {
  if (isReport) {
    // One element has all groups of a step, and one all problems of a run.
    const { group, problem, ...rest } = parameters, part = group ?? problem;
    const element = embedded.get(`${path}?${new URLSearchParams(rest)}`);
    if (!element) throw new Error("This report does not have these data.");
    const found = await unpack(element);
    return part === undefined ? found : found[part] ?? {};
  }
  const address = `api/${path}?${new URLSearchParams(parameters)}`;
  let answer;
  try { answer = await fetch(address); } catch { throw new Error("The program that serves this page has ended. Start it again: python -m tinker_cookbook.view FOLDER"); }
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail || `The server answered ${answer.status}.`);
  const text = await answer.text();
  if (answers.size > 50) answers.clear();
  answers.set(address, text);
  return JSON.parse(text);
}

/** Whether the server has other data for what the page shows. */
async function changed() {
  for (const [address, text] of answers) {
    if (!/^api\/runs?\?|^api\/sweep/.test(address)) continue;
    const answer = await fetch(address).catch(() => null);
    if (!answer || await answer.text() !== text) return true;
  }
  return false;
}

// ---- state: the part of the address after #, so that each view has a link

const begin = document.getElementById("page").dataset.start;
function state() { return Object.fromEntries(new URLSearchParams(location.hash.slice(1) || begin)); }
function link(changes, base = state()) {
  const next = { ...base, ...changes };
  for (const [name, usual] of Object.entries(DEFAULTS)) next[name] = settings[name] === usual ? null : settings[name];
  for (const name of Object.keys(next)) if (next[name] === null || next[name] === undefined) delete next[name];
  return "#" + new URLSearchParams(next);
}
function anchor(text, changes, base) { return make("a", { href: link(changes, base) }, text); }
const chosen = new Set();  // runs to compare
// Filters, axes and colours; the address has those that differ from these.
const DEFAULTS = { smooth: 0, log: false, all: false, x: "step", filter: "", overlay: "logprob", loss: true, show: "tokens", order: "group", sort: "updated", down: true,
  text: "", runs: "", key: "", stop: "", tag: "", low: "", high: "", kind: "all", pairs: "differ" };
const settings = { ...DEFAULTS };
function readSettings() {
  const now = state();
  for (const [name, usual] of Object.entries(DEFAULTS)) settings[name] = now[name] === undefined ? usual : typeof usual === "string" ? now[name] : JSON.parse(now[name]);
}
/** Changes settings and draws again; not at each key of a text. */
function set(changes, wait = 0) {
  Object.assign(settings, changes);
  clearTimeout(set.timer);
  set.timer = setTimeout(() => { history.replaceState(null, "", address = link({})); redraw(); }, wait);
}
/** Makes a handler that keeps the value of a field in a setting. */
function keep(name, read = (field) => field.value) { return (event) => set({ [name]: read(event.target) }, event.type === "input" ? 200 : 0); }
function search(name, label) { return make("input", { type: "search", placeholder: label, "aria-label": label, value: settings[name], oninput: keep(name) }); }
function control(label, input) { input.setAttribute("aria-label", label); return make("label", {}, label, input); }
/** A list of [value, text] or values, of which `now` is chosen. */
function select(options, now, onchange, label) { return make("select", { onchange, "aria-label": label }, options.map((one) => { const [value, text] = [one].flat(); return make("option", { value, selected: value === now }, text ?? value); })); }
function choice(label, name, options) { return control(label, select(options, settings[name], keep(name))); }
function tick(label, name) { return control(label, make("input", { type: "checkbox", checked: settings[name], onchange: keep(name, (field) => field.checked) })); }
function quiet(...content) { return make("span", { class: "quiet" }, content); }
function note(...content) { return make("div", { class: "note" }, content); }
function bar(...content) { return make("div", { class: "bar" }, content); }
/**
 * Makes a table that scrolls on a narrow screen. A column whose title begins with # has numbers;
 * a title may be [title, element to show].
 */
function table(titles, rows, kind = "") {
  const names = titles.map((title) => [title].flat()), number = names.map(([name]) => name.startsWith("#") ? "number" : null);
  const head = names.map(([name, element], i) => make("th", { class: number[i], scope: "col" }, element ?? name.replace("#", "")));
  const body = rows.map((row) => make("tr", {}, row.map((cell, i) => make("td", { class: number[i], "data-title": names[i][0].replace("#", "") }, cell ?? ""))));
  return make("div", { class: `scroll ${kind}` }, make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)));
}
function first(limit, total) { return total > limit ? quiet(`The first ${limit} of ${total} are shown; filters find others.`) : null; }

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

function clock(minutes) { return minutes === null || minutes === undefined ? "–" : minutes < 1 ? `${Math.round(minutes * 60)} s` : minutes < 120 ? `${Math.round(minutes)} min` : `${(minutes / 60).toFixed(1)} h`; }
function percent(value) { return `${(value * 100).toFixed(1)}%`; }
const isNumber = (value) => typeof value === "number";
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Colour of a value in [-1, 1], on which text stays readable: blue is negative, orange positive. */
function tint(share) {
  const s = Math.max(-1, Math.min(1, share || 0));
  return s < 0 ? `rgba(86,180,233,${(-s * 0.6).toFixed(3)})` : `rgba(230,159,0,${(s * 0.6).toFixed(3)})`;
}
function chip(reward, most, properties, ...mark) {
  const element = make("a", properties, mark, isNumber(reward) ? short(Number(reward.toPrecision(3))) : reward);
  element.style.background = isNumber(reward) && reward !== 0 ? tint(reward / most) : "var(--panel)";
  return element;
}

/** Text in which what could hide or reorder other text is shown: control characters, marks of direction. */
function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (c) => `⟨U+${c.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
}
