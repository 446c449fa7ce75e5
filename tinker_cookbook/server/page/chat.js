"use strict";
// The chat page. Text of a model is only ever set as text, never parsed as HTML.

const $ = (id) => document.getElementById(id);
const SETTINGS = { temperature: "0.7", top_p: "0.9", max_tokens: "512", seed: "", system: "" };
const OPTIONS = ["temperature", "top_p", "max_tokens", "seed"];

// A turn is {user, images, answers: [answer or null, answer or null]}, one answer for each chosen
// model; images are data URLs.
let turns = [];
let images = []; // of the next message
let running = null; // the AbortController of the turn in progress
let sampled = 0; // turns sampled so far, for the seed

// --- requests ------------------------------------------------------------------------------------

async function api(path, body, signal) {
  // Relative, so that the page also works behind a proxy with a prefix.
  const response = await fetch("oai/api/v1/" + path, {
    method: body ? "POST" : "GET",
    headers: { Authorization: "Bearer " + $("key").value.trim(), "Content-Type": "application/json" },
    body: body && JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  if (response.status === 401) $("settings").open = true;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not the form of this server's errors */ }
  throw new Error(message);
}

// Yields the objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop(); // a chunk may end within a line
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function loadModels() {
  if (!$("key").value.trim()) {
    $("settings").open = true;
    return notice("Enter the API key in the settings.");
  }
  try {
    const { data } = await (await api("models")).json();
    fillModels(data);
    notice("");
    return true;
  } catch (error) {
    notice(error.message);
  }
}

// --- models --------------------------------------------------------------------------------------

const lastPart = (name) => name.split("/").pop();

const names = new Map(); // by the id of a model, as the server shows it

function shortName(id) {
  if (names.has(id)) return names.get(id);
  if (!id.startsWith("tinker://")) return lastPart(id);
  const [run, , name] = id.slice("tinker://".length).split("/");
  return `${name} · ${run.replace(/:train:0$/, "")}`;
}

function fillModels(models) {
  for (const model of models) if (model.name) names.set(model.id, model.name);
  const wanted = new URLSearchParams(location.search).getAll("model");
  for (const side of [0, 1]) {
    const select = $(`model-${side}`);
    const chosen = select.value || wanted[side] || sessionStorage.getItem(`model-${side}`) || "";
    select.replaceChildren();
    if (side === 1) select.append(new Option("no other", ""));
    const groups = new Map();
    for (const model of models) {
      const title = model.parent ? `Checkpoints of ${lastPart(model.parent)}` : "Base models";
      if (!groups.has(title)) groups.set(title, []);
      const option = new Option(shortName(model.id), model.id);
      option.title = model.id;
      groups.get(title).push(option);
    }
    for (const [title, options] of groups) {
      const group = document.createElement("optgroup");
      group.label = title;
      group.append(...options);
      select.append(group);
    }
    if (models.some((model) => model.id === chosen)) select.value = chosen;
    select.disabled = false;
  }
  remember();
}

const chosenModels = () => [0, 1].map((side) => $(`model-${side}`).value);

// --- answers -------------------------------------------------------------------------------------

// The messages of one side: an answer of the other side where this one had no model yet.
function messagesOf(side, before = turns.length) {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns.slice(0, before)) {
    const answer = turn.answers[side] || turn.answers[1 - side];
    // A message without an answer is left out, as two messages of the user in a row are no chat.
    if (!answer || answer.error || !(answer.text || answer.thinking)) continue;
    messages.push({ role: "user", content: contentOf(turn) });
    const message = { role: "assistant", content: answer.text };
    if (answer.thinking) message.reasoning_content = answer.thinking;
    messages.push(message);
  }
  return messages;
}

// Text alone is a string, so that text models and saved chats stay as they were.
function contentOf({ user, images }) {
  if (!images.length) return user;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return user ? [...parts, { type: "text", text: user }] : parts;
}

function requestOf(model, side, index) {
  const body = {
    model,
    messages: [...messagesOf(side, index), { role: "user", content: contentOf(turns[index]) }],
    stream: true,
    logprobs: true,
  };
  for (const name of OPTIONS) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  // Each turn has another seed, or Retry would sample the same answer again.
  if ("seed" in body) body.seed += sampled - 1;
  return body;
}

async function answerTurn(index) {
  const turn = turns[index];
  running = new AbortController();
  sampled += 1;
  showRunning();
  const chosen = chosenModels();
  turn.answers = chosen.map((model) => model && {
    model, text: "", thinking: "", calls: "", tokens: [], mark: "", error: "", done: false,
  });
  drawTurn(index);
  await Promise.all(turn.answers.map((answer, side) => answer && receive(answer, side, index)));
  running = null;
  showRunning();
  drawTurn(index);
}

async function receive(answer, side, index) {
  try {
    const body = requestOf(answer.model, side, index);
    const response = await api("chat/completions", body, running.signal);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        answer.thinking += choice.delta.reasoning_content || "";
        answer.text += choice.delta.content || "";
        for (const call of choice.delta.tool_calls || []) {
          answer.calls += `${call.function.name}(${call.function.arguments})\n`;
        }
        answer.tokens.push(...((choice.logprobs && choice.logprobs.content) || []));
        if (choice.finish_reason === "length") {
          const cut = answer.tokens.length >= body.max_tokens;
          answer.mark = cut ? `cut at max_tokens=${body.max_tokens}` : "cut at the end of the context";
        }
      }
      drawSoon(index);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.mark = "stopped";
    else answer.error = error.message;
  }
  answer.done = true;
  drawSoon(index);
}

// Returns pieces {start, end, logprob, token} of `text` for the tokens that spell it. `find` gives
// the place of the text among all tokens, which also spell thinking and markup.
function align(tokens, text, find) {
  const decoder = new TextDecoder();
  const pieces = [];
  let raw = "", logprob = 0;
  for (const token of tokens) {
    const part = decoder.decode(new Uint8Array(token.bytes), { stream: true });
    logprob += token.logprob; // tokens of one character are shown as one
    if (!part) continue;
    pieces.push({ start: raw.length, end: raw.length + part.length, logprob, token: part });
    raw += part;
    logprob = 0;
  }
  const at = text ? find(raw, text) : -1;
  if (at < 0) return [];
  return pieces
    .filter((piece) => piece.end > at && piece.start < at + text.length)
    .map((piece) => ({ ...piece, start: piece.start - at, end: piece.end - at }));
}

// --- drawing -------------------------------------------------------------------------------------

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

const levelOf = (p) => (p >= 0.9 ? "t3" : p >= 0.5 ? "t2" : p >= 0.1 ? "t1" : "t0");

// Appends text[start:end], a span for each token where they are known.
function appendText(parent, text, start, end, pieces) {
  let at = start;
  for (const piece of pieces) {
    const from = Math.max(piece.start, start), to = Math.min(piece.end, end);
    if (from >= to) continue;
    if (from > at) parent.append(text.slice(at, from));
    const p = Math.exp(piece.logprob);
    const span = element("span", levelOf(p), text.slice(from, to));
    span.title = `${JSON.stringify(piece.token)}  probability ${p.toFixed(3)}, `
      + `log-probability ${piece.logprob.toFixed(2)}`;
    parent.append(span);
    at = to;
  }
  if (at < end) parent.append(text.slice(at, end));
}

// Returns blocks {code, start, end} of a text with fenced code.
function blocksOf(text) {
  const blocks = [];
  let start = 0, at = 0, code = false;
  for (const line of text.split("\n")) {
    const next = Math.min(at + line.length + 1, text.length);
    if (/^\s*```/.test(line)) {
      if (at > start) blocks.push({ code, start, end: at });
      code = !code;
      start = next;
    }
    at = next;
  }
  if (text.length > start) blocks.push({ code, start, end: text.length });
  return blocks;
}

function textElement(text, pieces) {
  const made = element("div", "text");
  const blocks = blocksOf(text);
  for (let [i, { code, start, end }] of blocks.entries()) {
    if (code) {
      const inner = element("code");
      // The line break before the closing fence is no part of the code.
      appendText(inner, text, start, end - (text[end - 1] === "\n" ? 1 : 0), pieces);
      made.append(element("pre", "", inner));
      continue;
    }
    // A block of code has a margin, so empty lines next to it are left out.
    while (i > 0 && start < end && text[start] === "\n") start += 1;
    while (i < blocks.length - 1 && start < end && text[end - 1] === "\n") end -= 1;
    // Text in single backquotes has a fixed width too.
    let at = start;
    for (const found of text.slice(start, end).matchAll(/`[^`\n]+`/g)) {
      const from = start + found.index, to = from + found[0].length;
      appendText(made, text, at, from, pieces);
      const inner = element("code");
      appendText(inner, text, from + 1, to - 1, pieces);
      made.append(inner);
      at = to;
    }
    appendText(made, text, at, end, pieces);
  }
  return made;
}

function answerElement(answer, index, isLast) {
  const made = element("section", "answer");
  const label = element("div", "label", shortName(answer.model));
  label.title = answer.model;
  made.append(label);
  // Probabilities come with the whole answer: half a text may be found at a wrong place.
  const tokens = answer.done ? answer.tokens : [];
  if (answer.thinking) {
    const thinking = element("div");
    const pieces = align(tokens, answer.thinking, (raw, text) => raw.indexOf(text));
    appendText(thinking, answer.thinking, 0, answer.thinking.length, pieces);
    const details = element("details", "think", element("summary", "", "Thinking"), thinking);
    details.open = !answer.text;
    made.append(details);
  }
  const pieces = align(tokens, answer.text, (raw, text) => raw.lastIndexOf(text));
  made.append(textElement(answer.text, pieces));
  if (answer.calls) made.append(element("pre", "", element("code", "", answer.calls.trim())));
  if (answer.error) made.append(element("div", "error", answer.error));
  const foot = element("div", "foot");
  if (!answer.done) foot.append("…");
  if (answer.mark) foot.append(element("span", "mark", `[${answer.mark}]`));
  if (answer.done && answer.text) {
    foot.append(button("Copy", () => copy(answer.text)));
    if (answer.tokens.length) {
      foot.append(button("Tokens", () => made.classList.toggle("pinned")));
    }
  }
  if (answer.done && isLast) foot.append(button("Retry", () => running || answerTurn(index)));
  if (pieces.length) {
    const names = { t3: "≥ 0.9", t2: "≥ 0.5", t1: "≥ 0.1", t0: "< 0.1" };
    const levels = Object.entries(names).map(([name, text]) => element("i", name, text));
    foot.append(element("span", "legend", "probability", ...levels));
  }
  made.append(foot);
  return made;
}

function picture(url) {
  const made = element("img");
  made.src = url;
  made.alt = "image";
  return made;
}

function drawImages() {
  $("images").hidden = !images.length;
  $("images").replaceChildren(...images.map((url, i) => {
    const remove = button("×", () => {
      images.splice(i, 1);
      drawImages();
    });
    remove.title = "Remove the image";
    return element("span", "", picture(url), remove);
  }));
}

async function addImages(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      notice(`${file.name} is not an image.`);
      continue;
    }
    const url = await new Promise((resolve) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.readAsDataURL(file);
    });
    images.push(url);
  }
  drawImages();
  $("message").focus();
}

function button(text, action) {
  const made = element("button", "", text);
  made.addEventListener("click", action);
  return made;
}

function drawTurn(index) {
  const chat = $("chat"), turn = turns[index];
  const atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 80;
  const answers = turn.answers.filter(Boolean);
  const isLast = index === turns.length - 1;
  const row = element("div", "answers", ...answers.map((a) => answerElement(a, index, isLast)));
  const asked = element("div", "user", ...turn.images.map(picture), turn.user);
  const made = element("article", "turn", asked, row);
  if (answers.length > 1) made.classList.add("two");
  made.id = `turn-${index}`;
  const old = $(made.id);
  if (old) old.replaceWith(made);
  else chat.append(made);
  if (atEnd) chat.scrollTop = chat.scrollHeight;
}

const waiting = new Set();
function drawSoon(index) {
  // Tokens may arrive faster than the screen refreshes.
  if (!waiting.size) {
    requestAnimationFrame(() => {
      for (const i of waiting) if (turns[i]) drawTurn(i);
      waiting.clear();
    });
  }
  waiting.add(index);
}

function drawAll() {
  for (const old of document.querySelectorAll(".turn")) old.remove();
  turns.forEach((_, index) => drawTurn(index));
  $("empty").hidden = turns.length > 0;
  $("chat").classList.toggle("single", !$("model-1").value);
}

function showRunning() {
  $("send").textContent = running ? "Stop" : "Send";
  for (const id of ["new", "model-0", "model-1"]) $(id).disabled = Boolean(running);
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function closeSettings() {
  $("settings").open = false;
  $("message").focus();
}

// --- actions -------------------------------------------------------------------------------------

async function send() {
  if (running) return running.abort();
  const text = $("message").value.trim();
  if (!text && !images.length) return;
  if (!$("model-0").value) {
    await loadModels();
    if (!$("model-0").value) return;
  }
  notice("");
  $("settings").open = false;
  $("message").value = "";
  fitMessage();
  turns.push({ user: text, images, answers: [] });
  images = [];
  drawImages();
  drawAll();
  $("chat").scrollTop = $("chat").scrollHeight;
  await answerTurn(turns.length - 1);
}

// A row for each model, as recipes.sl_basic trains on.
function rows() {
  return chosenModels()
    .map((model, side) => model && JSON.stringify({ messages: messagesOf(side), model }) + "\n")
    .filter(Boolean)
    .join("");
}

function save() {
  if (!turns.length) return notice("The chat is empty.");
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([rows()], { type: "application/jsonl" }));
  link.download = "chat.jsonl";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // browsers allow the clipboard only over https and on this machine
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function remember() {
  for (const name of [...Object.keys(SETTINGS), "key"]) sessionStorage.setItem(name, $(name).value);
  chosenModels().forEach((model, side) => model && sessionStorage.setItem(`model-${side}`, model));
  $("chat").classList.toggle("single", !$("model-1").value);
}

function fitMessage() {
  const area = $("message");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
}

for (const [name, value] of Object.entries({ ...SETTINGS, key: "" })) {
  $(name).value = sessionStorage.getItem(name) ?? value;
  $(name).addEventListener("change", remember);
}
$("key").addEventListener("change", async () => {
  if (await loadModels()) closeSettings();
});
for (const side of [0, 1]) $(`model-${side}`).addEventListener("change", remember);
$("send").addEventListener("click", send);
$("message").addEventListener("input", fitMessage);
$("message").addEventListener("keydown", (event) => {
  // Enter also ends the composition of a character, for example of Japanese.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) send();
});
$("new").addEventListener("click", () => {
  turns = [];
  images = [];
  drawImages();
  sampled = 0;
  notice("");
  drawAll();
  $("message").focus();
});
$("save").addEventListener("click", save);
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await addImages([...$("file").files]);
  $("file").value = ""; // or the same file could not be chosen again
});
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return; // text is pasted as usual
  event.preventDefault();
  addImages(files);
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault(); // the browser would open the file
  addImages([...event.dataTransfer.files]);
});
$("copy").addEventListener("click", () => (turns.length ? copy(rows()) : notice("The chat is empty.")));
$("theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", (event) => {
  // Escape also ends the composition of a character.
  if (event.key !== "Escape" || event.isComposing) return;
  if ($("settings").open) closeSettings();
  else if (running) running.abort();
});
document.addEventListener("click", (event) => {
  // A click elsewhere closes the settings. A removed element is nowhere.
  if (event.target.isConnected && !$("settings").contains(event.target)) $("settings").open = false;
});
drawAll();
loadModels();
$(sessionStorage.getItem("key") ? "message" : "key").focus();
