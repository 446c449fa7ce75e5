// One problem over the steps of a run or of several runs, and a diff of two answers.

/** The problems that all runs have at a step, with the reward of each run. */
async function commonProblems(runs, step, split) {
  const found = await Promise.all(runs.map((run) => get("episodes", { name: run.name, step, split })));
  if (found.some((one) => one.examples)) return note("Examples of supervised runs have no answers to compare.");
  const maps = found.map(({ episodes }) => { const map = new Map(); for (const one of episodes) map.set(one.problem, [...map.get(one.problem) || [], one]); return map; });
  const rows = [...maps[0].keys()].filter((key) => maps.every((map) => map.has(key))).map((key) => {
    const rewards = maps.map((map) => mean(map.get(key).map((one) => one.reward).filter(isNumber)));
    return { key, rewards, prompt: maps[0].get(key).find((one) => one.prompt)?.prompt || "", spread: Math.max(...rewards) - Math.min(...rewards) };
  }).sort((a, b) => b.spread - a.spread);
  if (!rows.length) return note("At this step these runs have no problem in common. Evaluations on one test set have.");
  const most = Math.max(1e-9, ...rows.flatMap((row) => row.rewards.map(Math.abs)));
  return [quiet(`${rows.length} problems that these runs have in common, the largest difference first`), table(["end of the prompt", ...runs.map((run) => `#${run.title}`), ""],
    rows.slice(0, 500).map((row) => [make("div", { class: "preview end wide" }, row.prompt.trim()), ...row.rewards.map((reward) => make("span", { class: "dots" }, chip(reward, most, {}))), anchor("answers", { problem: row.key, step, split })]))];
}

async function problemView(runs, problem) {
  const found = await Promise.all(runs.map((run) => get("problem", { name: run.name, problem })));
  const rows = found.flatMap((one, i) => (one.rows || []).map((row) => ({ ...row, i, tokens: one.tokens })));
  keys = { Escape: [() => { location.hash = link({ problem: null, a: null, b: null }); }, "all problems"] };
  if (!rows.length) return [note("No step of this run has this problem. ", anchor("back", { problem: null }))];
  const most = Math.max(1e-9, ...rows.flatMap((row) => row.rewards.map((reward) => Math.abs(reward) || 0)));
  const key = (row, member) => [row.i, row.step, row.split, row.group, member].join("~");
  // By default the first answers of two runs at the step one comes from, or at their last step in
  // common; of one run the first and the last of a split.
  const { step = Infinity, split } = state(), train = rows.filter((row) => row.split === (split ?? "train")), own = train.length ? train : rows;
  const pairs = rows.flatMap((x) => x.i ? [] : rows.filter((y) => y.i === 1 && y.step === x.step && y.split === x.split).map((y) => [x, y]));
  const pair = pairs.findLast(([row]) => row.step <= step && row.split === (split ?? row.split)) ?? pairs.at(-1) ?? [own[0], own.at(-1)];
  const { a = key(pair[0], 0), b = key(pair[1], 0) } = state();
  // A line for each run and split; a step may have several groups of a problem.
  const lines = new Map();
  for (const row of rows) {
    row.label = [runs.length > 1 ? runs[row.i].title : null, row.split].filter(Boolean).join(", ");
    if (!lines.has(row.label)) lines.set(row.label, new Map());
    const line = lines.get(row.label);
    line.set(row.step, [...line.get(row.step) || [], row]);
  }
  const labels = [...lines.keys()];
  const series = [...lines.values()].map((steps, i) => { const own = [...steps.values()]; return { label: labels[i], i, xs: [...steps.keys()], values: own.map((same) => mean(same.flatMap((row) => row.rewards).filter(isNumber))), at: (k) => { location.hash = link({ a: b, b: key(own[k][0], 0) }); } }; });
  const cells = rows.map((row) => [labels.length > 1 ? legend(labels.indexOf(row.label), runs.length > 1 ? runs[row.i].title : "") : null, anchor(`${row.step}`, { run: runs[row.i].name, tab: "episodes", step: row.step, split: row.split, group: row.group }, {}), row.split,
    make("span", { class: "dots" }, row.rewards.map((reward, member) => { const here = key(row, member), mark = here === a ? "A " : here === b ? "B " : null; return chip(reward, most, { href: link({ a: b, b: here }), class: mark ? "picked" : null, "aria-label": `compare member ${member} of step ${row.step}` }, mark); })),
    make("div", { class: "preview wide" }, textOf(row.answer, row.tokens))]);
  const listed = table([runs.length > 1 ? "run" : "", "step", "split", "rewards", "first answer"], cells, "stack");
  return [bar(make("b", {}, "One problem over the steps"), anchor("back", { problem: null, a: null, b: null }), found.map((one) => one.of > one.searched ? quiet(`Only the last ${one.searched} files of the record were searched.`) : null), quiet("A click on a reward compares this answer with the one that was clicked before.")),
    pieces(found.find((one) => one.prompt).prompt, found.find((one) => one.prompt).tokens, "tokens prompt"), await twoAnswers(runs, a, b),
    make("div", { class: "charts" }, make("figure", {}, make("figcaption", {}, make("span", {}, "mean reward of this problem")), chart(series, "mean reward of this problem", { x: "step", dots: true }), labels.length > 1 ? make("div", { class: "legends" }, labels.map((label, i) => legend(i, label))) : null)), listed];
}

async function twoAnswers(runs, a, b) {
  const sides = await Promise.all([a, b].map(async (key) => {
    const [i, step, split, group, member] = key.split("~"), run = runs[i];
    const found = run ? await get("group", { name: run.name, step, split, group }) : {}, one = found.members?.[member];
    return one && { title: `${runs.length > 1 ? `${run.title}, ` : ""}step ${step}, ${split}, group ${group}, member ${member}`, reward: one.reward, stop: one.stop, text: one.turns.map((turn) => textOf(turn.answer, found.tokens)).join("\n⏎\n") };
  }));
  return sides.every(Boolean) ? diffView(sides) : note("One of these answers is not in the record.");
}

/** Two texts side by side [{title, reward, stop, text}], with the words marked that only one has. */
function diffView(sides) {
  const [left, right, share] = wordDiff(sides[0].text, sides[1].text);
  return make("div", { class: "members two" }, [left, right].map((words, i) => make("section", { class: "episode" }, make("h3", {}, `${"AB"[i]}: ${sides[i].title}`, make("span", {}, `reward ${short(sides[i].reward)}`), quiet(sides[i].stop ?? "")),
    make("div", { class: "tokens", dir: "auto" }, words.map(([word, own]) => own ? make(i ? "ins" : "del", {}, word) : word)), i ? make("div", { class: "facts" }, share === null ? "These texts are too long for a diff." : `${percent(share)} of the words are the same.`) : null)));
}

/** Returns the words of both texts, each with whether only this text has it, and the share of common words. */
function wordDiff(a, b) {
  const x = a.match(/\s+|[^\s]+/g) || [], y = b.match(/\s+|[^\s]+/g) || [];
  if (x.length * y.length > 4e6) return [x.map((word) => [word, false]), y.map((word) => [word, false]), null];
  // The longest common subsequence.
  const width = y.length + 1, best = new Uint16Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--) for (let j = y.length - 1; j >= 0; j--)
    best[i * width + j] = x[i] === y[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  const left = [], right = [];
  let i = 0, j = 0, same = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) { if (x[i].trim()) same++; left.push([x[i++], false]); right.push([y[j++], false]); }
    else if (j >= y.length || (i < x.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) left.push([x[i++], true]);
    else right.push([y[j++], true]);
  }
  const count = (words) => words.filter((word) => word.trim()).length;
  return [left, right, 2 * same / Math.max(1, count(x) + count(y))];
}
