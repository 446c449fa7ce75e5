// Timeline of a step: the spans of timing_spans.jsonl, a row for each name.

async function timingView(run) {
  const asked = Number(state().step) || undefined;
  const { steps, spans } = await get("timing", isReport || !asked ? { name: run.name } : { name: run.name, step: asked });
  if (!steps.length) return [note("No step of this run has ended yet.")];
  const step = steps.includes(asked) ? asked : steps[steps.length - 1];
  const rows = new Map();
  for (const [name, begin, end] of spans[step]) rows.set(name, [...rows.get(name) || [], [begin, end]]);
  const total = Math.max(...spans[step].map(([, , end]) => end), 1e-6);
  const summary = [...rows].map(([name, parts]) => {
    const seconds = parts.map(([begin, end]) => end - begin), sum = seconds.reduce((a, b) => a + b, 0);
    return [name, parts.length, sum, sum / parts.length, Math.max(...seconds)];
  });
  return [state().only ? null : stepBar(steps, step), timeline(rows, total),
    table(["span", "#count", "#total s", "#mean s", "#longest s"], summary.map((row) => row.map((cell) => short(cell))), "timing")];
}

/** Buttons, a field and the arrow keys to change the step of the address. */
function stepBar(steps, step, ...more) {
  return bar(beforeAndNext("step", steps, step, (next) => ({ step: next }),
    control("step", make("input", { type: "number", min: steps[0], max: steps[steps.length - 1], value: step, onchange: (event) => { location.hash = link({ step: event.target.value, member: null, datum: null }); } }))), more);
}
function beforeAndNext(what, all, now, changes, field) {
  const go = (delta) => { const next = all[all.indexOf(now) + delta]; if (next !== undefined) location.hash = link({ member: null, datum: null, ...changes(next) }); };
  keys.ArrowLeft = [() => go(-1), `the ${what} before`];
  keys.ArrowRight = [() => go(1), `the next ${what}`];
  return [make("button", { onclick: () => go(-1), "aria-label": `${what} before` }, "←"), field, make("button", { onclick: () => go(1), "aria-label": `next ${what}` }, "→")];
}

/** Bars of the spans over `total` seconds; spans of one name that overlap take lanes below each other. */
function timeline(rows, total) {
  const W = Math.max(320, Math.min(1100, innerWidth - 60)), L = 12, R = 20;
  const px = (seconds) => L + (W - L - R) * seconds / total;
  const svg = make("svg", { role: "img", "aria-label": `timeline of ${short(total)} seconds` });
  let y = 4, i = 0;
  for (const [name, parts] of rows) {
    const ends = [], H = parts.length > 12 ? 6 : 13;  // end of the last bar of each lane
    svg.append(make("text", { x: L, y: y + 10 }, name));
    const top = y + 14;
    for (const [begin, end] of parts) {
      let lane = ends.findIndex((last) => last <= begin);
      if (lane < 0) lane = ends.length < 40 ? ends.length : 39;
      ends[lane] = end;
      const span = make("rect", { x: px(begin), y: top + lane * H, width: Math.max(px(end) - px(begin), 1), height: H - 2, fill: COLOURS[i % COLOURS.length] });
      span.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, `${name}\n${short(end - begin)} s, from ${short(begin)} to ${short(end)} s`));
      span.addEventListener("pointerleave", () => { tip.hidden = true; });
      svg.append(span);
    }
    y = top + ends.length * H + 4;
    i += 1;
  }
  for (const second of ticks(0, total, W / 150)) {
    svg.prepend(make("line", { class: "grid", x1: px(second), x2: px(second), y1: 0, y2: y }));
    svg.append(make("text", { x: px(second), y: y + 12, "text-anchor": "middle" }, `${short(second)} s`));
  }
  svg.setAttribute("viewBox", `0 0 ${W} ${y + 18}`);
  return make("figure", {}, svg);
}
