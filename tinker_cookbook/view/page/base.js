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
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
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

const begin = document.getElementById("page").dataset.start;
function state() { return Object.fromEntries(new URLSearchParams(location.hash.slice(1) || begin)); }
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

/** Returns text in which control characters and marks of direction are shown, so that they cannot hide or reorder text. */
function visible(text) { return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `⟨U+${c.charCodeAt(0).toString(16).padStart(4, "0")}⟩`); }

/** Colour of a value in [-1, 1]: blue is negative, orange positive; both differ in brightness too. */
function tint(share, alpha = 1) {
  const s = Math.max(-1, Math.min(1, share));
  return s < 0 ? `rgba(86,180,233,${(-s * alpha).toFixed(3)})` : `rgba(230,159,0,${(s * alpha).toFixed(3)})`;
}
