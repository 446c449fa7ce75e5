// Tokens as text with a colour for each, messages, and pictures.

const difference = (a, b) => (turn, i) => turn[a] && turn[b] ? turn[a][i] - turn[b][i] : undefined;
const OVERLAYS = {
  logprob: { label: "sampler log-probability", of: (turn, i) => turn.sampler?.[i], limit: 5, low: "unlikely" },
  mismatch: { label: "trainer − sampler", of: difference("trainer", "sampler"), limit: 0.2, low: "lower", high: "higher" },
  reference: { label: "sampler − reference or teacher", of: difference("sampler", "reference"), limit: 3, low: "less likely here", high: "more likely here" },
  advantage: { label: "advantage", of: (turn, i) => turn.advantage?.[i], low: "pushed down", high: "pushed up", text: "full from the 95th percentile" },
  entropy: { label: "entropy of the sampler", of: (turn, i) => turn.entropy?.[i], limit: 3, high: "nats, unsure" },
  mask: { label: "mask", of: (turn) => turn.datum === null || turn.masked ? 0 : 1, limit: 1.4, high: "trained", text: "others were not" },
  none: { label: "none", of: () => undefined },
};

/** Calls `each(id or text, index)` for the text of each token; parts of a character are joined. */
function decode(ids, tokens, each) {
  let pending = [];
  ids.forEach((id, i) => {
    const piece = tokens[id] ?? `[${id}]`;
    if (typeof piece === "string" && !pending.length) { each(piece, i); return; }
    pending = pending.concat(Array.isArray(piece) ? piece : [...new TextEncoder().encode(piece)]);
    const text = new TextDecoder().decode(new Uint8Array(pending));
    const open = text.endsWith("\ufffd") && Array.isArray(piece) && pending.length < 4 && i + 1 < ids.length;
    each(open ? "" : text, i);
    if (!open) pending = [];
  });
}
function textOf(ids, tokens) { const parts = []; decode(ids.filter((id) => id >= 0), tokens, (text) => parts.push(text)); return parts.join(""); }

/** Shows tokens as text. `mark(span, i)` returns the text of its tip. An image is one box. */
function pieces(ids, tokens, kind, mark, images = [], begin = 0, pictures = {}) {
  const element = make("div", { class: kind, dir: "auto" });
  const at = new Map(images.map((image) => [image.offset - begin, image]));
  decode(ids, tokens, (text, i) => {
    if (ids[i] < 0) { if (ids[i - 1] >= 0 || i === 0 || at.has(i)) element.append(picture(at.get(i), pictures)); return; }
    if (!mark) { element.append(visible(text)); return; }
    const span = make("span", {}, text);
    const about = mark(span, i);
    span.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, about));
    span.addEventListener("pointerleave", () => { tip.hidden = true; });
    element.append(span);
  });
  return element;
}

function picture(image, pictures = {}) {
  if (!image) return make("span", { class: "picture" }, "▧ image");
  const source = pictures[image.sha256];
  if (source) return make("img", { src: source, alt: `image ${image.sha256.slice(0, 8)}`, class: "picture" });
  return make("span", { class: "picture", title: `SHA-256 ${image.sha256}` }, `▧ image ${image.sha256.slice(0, 8)}, ${image.length} tokens`);
}

/** Messages with their roles, thoughts, tool calls and tool results. */
function messages(list, images = [], calls = [], pictures = {}) {
  let image = 0, call = 0;
  const contentPart = (part) => {
    if (part.type === "text") return make("div", { class: "tokens", dir: "auto" }, part.text);
    if (part.type === "thinking") return make("div", { class: "thinking" }, part.thinking);
    if (part.type === "image") return make("div", {}, /^data:image/.test(part.image) ? picture({ sha256: "" }, { "": part.image }) : picture(images[image++], pictures));
    return make("div", { class: "tokens" }, JSON.stringify(part));
  };
  return list.map((one) => make("div", { class: `message ${["user", "assistant", "system", "tool"].includes(one.role) ? one.role : ""}` }, make("b", {}, one.role, one.name ? ` ${one.name}` : ""),
    one.thinking ? make("div", { class: "thinking" }, one.thinking) : null,
    [one.content ?? ""].flat().map((part) => typeof part === "string" ? make("div", { class: "tokens", dir: "auto" }, part) : contentPart(part)),
    (one.tool_calls || []).map((asked) => { const error = calls[call++]?.error; return make("div", { class: "call" }, "calls ", make("code", {}, `${asked.function?.name ?? asked.name}(${asked.function?.arguments ?? JSON.stringify(asked.arguments)})`), error ? make("b", {}, ` error: ${error}`) : null); })));
}

function facts(values) {
  const text = Object.entries(values).filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `${name}: ${isNumber(value) ? short(value) : typeof value === "string" ? value : JSON.stringify(value)}`).join(" · ");
  return text ? make("div", { class: "facts" }, text) : null;
}

/** One episode of a group. */
function episode(one, { tokens, pictures }, overlay, limit, same, marked) {
  const turns = one.turns.map((turn, number) => {
    const begin = number ? turn.kept : 0, length = turn.prompt.length;
    return make("div", { class: "turn" },
      (same && number === 0) || !length ? null : pieces(turn.prompt, tokens, "tokens prompt", null, turn.images, begin, pictures),
      pieces(turn.answer, tokens, "tokens", (span, i) => {
        const value = overlay.of(turn, i);
        if (isNumber(value)) { const share = value / limit; span.style.background = tint(share); if (overlay.high && share < 0) span.className = "negative"; }
        if (turn.masked) span.classList.add("masked");
        const lines = ["sampler", "trainer", "reference", "advantage", "entropy"].filter((name) => isNumber(turn[name]?.[i])).map((name) => `${name} ${short(turn[name][i])}`);
        return [`token ${turn.answer[i]}`, ...lines, turn.masked ? "masked: not trained" : turn.datum === null ? "not trained" : `datum ${turn.datum}`].join("\n");
      }),
      facts({ reward: turn.reward, stop: turn.stop, ...turn.metrics, ...turn.logs }));
  });
  const body = settings.show === "messages" && one.messages ? messages(one.messages, one.turns.flatMap((turn) => turn.images), one.calls, pictures) : turns;
  return make("section", { class: `episode ${marked ? "chosen" : ""}`, "aria-label": `member ${one.member}` }, make("h3", {}, `member ${one.member}`, make("span", {}, `reward ${short(one.reward)}`),
    one.advantage === null ? null : make("span", {}, `advantage ${short(one.advantage)}`), quiet([one.stop, one.weights === null ? null : `weights of step ${one.weights}`].filter(Boolean).join(" · "))),
  body, facts({ ...one.metrics, ...one.logs }));
}
