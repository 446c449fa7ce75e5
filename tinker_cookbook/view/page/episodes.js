// Episodes of a step, a group side by side, and one problem over the steps.

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
    text = visible(text);
    if (!mark) { element.append(text); return; }
    const span = make("span", {}, text);
    const about = mark(span, i);
    span.addEventListener("pointermove", (event) => showTip(event, about));
    span.addEventListener("pointerleave", () => { tip.hidden = true; });
    element.append(span);
  });
  return element;
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
