// Episodes of a step, and a group side by side.

async function episodesView(runs) {
  const [run] = runs, { step: asked, group, problem } = state();
  if (problem) return problemView(runs, problem);
  const all = [...new Set(Object.values(run.record).flat())], { split: askedSplit } = state(), wanted = all.includes(askedSplit);
  const splits = (step) => (run.record[step] || []).filter((name) => (!wanted || name === askedSplit) && runs.every((one) => one.record[step]?.includes(name)));
  const steps = Object.keys(run.record).map(Number).filter((step) => splits(step).length);
  if (!steps.length) return [note(runs.length > 1 ? "These runs have no recorded step in common." : "This run has no record of its episodes. Runs write one with record=full.")];
  // A row without a record, such as one of an evaluation, leads to the step before.
  const step = asked === undefined ? steps.at(-1) : steps.findLast((one) => one <= Number(asked)) ?? steps[0];
  const split = mainSplit(splits(step)), place = { name: run.name, step, split };
  keys.Escape = [() => { location.hash = link({ group: null, member: null }); }, "all groups of the step"];
  const other = [step !== Number(asked ?? step) ? `Step ${asked} ${wanted ? `of ${split}` : ""} is not recorded; this is step ${step}.` : "", askedSplit && !wanted ? `${askedSplit} is not recorded; this is ${split}.` : ""].filter(Boolean);
  const top = [stepBar(steps, step,
    all.length > 1 ? control("of", select(all, split, (event) => { location.hash = link({ split: event.target.value, group: null, member: null }); })) : quiet(split),
    run.left_out ? quiet(run.left_out) : null), other.length ? note(other.join(" ")) : null];
  if (runs.length > 1) return [top, await commonProblems(runs, step, split)];
  if (group !== undefined) return [top, ...await groupView(run, place, Number(group))];
  const found = await get("episodes", place);
  if (found.examples) return [top, ...examplesView(found)];
  if (!found.episodes.length) return [top, note(found.problem || "The record of this step has no episodes, or its file was deleted.")];
  return [top, ...await groupsView(run, place, found.episodes)];
}

/** Keys of the episodes whose whole text has the query; null if nothing is asked for. */
async function textMatches(place, query) {
  if (!query) return null;
  if (!isReport) return new Set((await get("search", { ...place, text: query })).found.map((one) => one.join()));
  const found = new Set(), wanted = query.toLowerCase();
  for (const [number, { members, tokens }] of Object.entries(await get("group", place)))
    for (const one of members) {
      const texts = one.turns.flatMap((turn) => [textOf(turn.prompt, tokens), textOf(turn.answer, tokens), JSON.stringify(turn.logs)]);
      if ([...texts, JSON.stringify(one.logs), JSON.stringify(one.messages), JSON.stringify(one.calls)].join("\n").toLowerCase().includes(wanted)) found.add(`${number},${one.member}`);
    }
  return found;
}

async function groupsView(run, place, episodes) {
  const texts = await textMatches(place, settings.text), low = parseFloat(settings.low), high = parseFloat(settings.high);
  const wanted = episodes.filter((one) => (!texts || texts.has(`${one.group},${one.member}`)) && (!settings.stop || one.stop === settings.stop) && (!settings.tag || one.tags.includes(settings.tag))
    && !(one.reward < low) && !(one.reward > high));
  const groups = new Map();
  for (const one of wanted) groups.set(one.group, [...groups.get(one.group) || [], one]);
  const rows = [...groups].map(([number, members]) => { const rewards = members.map((one) => one.reward).filter(isNumber); return { number, members, mean: mean(rewards), spread: Math.max(...rewards) - Math.min(...rewards) }; });
  rows.sort({ group: (a, b) => a.number - b.number, "lowest reward": (a, b) => a.mean - b.mean, "highest reward": (a, b) => b.mean - a.mean, "largest spread": (a, b) => b.spread - a.spread }[settings.order]);
  const most = Math.max(...episodes.map((one) => Math.abs(one.reward) || 0), 1e-9);
  const different = (read) => ["", ...new Set(episodes.flatMap(read))].map((value) => [value, value || "all"]);
  const prompts = new Map(episodes.filter((one) => one.prompt).map((one) => [one.group, one.prompt]));
  const cells = rows.slice(0, 200).map(({ number, members }) => [
    [anchor(`${number}`, { group: number, ...place, name: null }), make("div", { class: "quiet" }, members[0].tags.join(" "))],
    make("span", { class: "dots" }, members.map((one) => chip(one.reward, most, { href: link({ group: number, step: place.step, split: place.split, member: one.member }), title: `member ${one.member}: ${one.stop}` }))),
    [...new Set(members.map((one) => one.stop))].join(", "), short(Math.round(mean(members.map((one) => one.tokens)))),
    make("div", { class: "preview end" }, (prompts.get(number) || "").slice(-90).trim()), [make("div", { class: "preview" }, members[0].text), members[0].turns > 1 ? quiet(`turn 1 of ${members[0].turns}`) : null],
    anchor("over steps", { problem: members[0].problem, group: null, step: place.step, split: place.split })]);
  const limit = (label, name) => control(label, make("input", { type: "number", step: "any", value: settings[name], oninput: keep(name) }));
  return [bar(search("text", "search whole texts"), choice("stop", "stop", different((one) => one.stop)), different((one) => one.tags).length > 2 ? choice("tag", "tag", different((one) => one.tags)) : null,
    limit("reward ≥", "low"), limit("reward ≤", "high"), choice("order", "order", ["group", "lowest reward", "highest reward", "largest spread"]),
    quiet(`${wanted.length} of ${episodes.length} episodes`)),
  table(["group", "rewards", "stop", "#tokens", "end of the prompt", "first answer", ""], cells, "stack"), first(200, rows.length)];
}

async function groupView(run, place, number) {
  const found = await get("group", { ...place, group: number }), { members, tokens, pictures } = found;
  const go = (next) => () => { if (isNumber(next)) location.hash = link({ group: next, member: null }); };
  keys.ArrowUp = [go(found.before), "the group before"];
  keys.ArrowDown = [go(found.after), "the next group"];
  if (!members || !members.length) return [note("This step has no such group. ", anchor("All groups of the step", { group: null }))];
  const turns = members.flatMap((one) => one.turns);
  const overlays = Object.keys(OVERLAYS).filter((name) => name === "none" || name === "mask" || turns.some((turn) => isNumber(OVERLAYS[name].of(turn, 0))));
  const name = overlays.includes(settings.overlay) ? settings.overlay : overlays[0], overlay = OVERLAYS[name];
  keys.o = [() => set({ overlay: overlays[(overlays.indexOf(name) + 1) % overlays.length] }), "the next colouring"];
  // One outlier leaves the others their colour.
  const sizes = turns.flatMap((turn) => (turn.advantage || []).filter(Boolean).map(Math.abs)).sort((x, y) => x - y), limit = overlay.limit ?? sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 1;
  const end = (sign) => name === "mask" ? "" : short(sign * limit), logged = run.config.num_groups_to_log ?? Infinity;
  const ramp = make("i"); ramp.style.background = `linear-gradient(90deg, ${overlay.low ? tint(-1) : "transparent"}, transparent, ${overlay.high ? tint(1) : "transparent"})`;
  const hasMessages = members.some((one) => one.messages);
  const top = bar(make("b", {}, `group ${number}`), anchor("all groups", { group: null, member: null }), anchor("over steps", { group: null, member: null, problem: members[0].problem }),
    !run.has.includes("tree") ? null : number < logged ? anchor("logs", { tab: "tree", file: treeFile(place) }, { run: run.name }) : quiet(`not in the logs: num_groups_to_log=${logged}`),
    hasMessages ? choice("show", "show", ["tokens", "messages"]) : null,
    choice("colour", "overlay", overlays.map((one) => [one, OVERLAYS[one].label])),
    name === "none" ? null : make("span", { class: "legend" }, make("span", { class: overlay.high && overlay.low ? "negative" : null }, overlay.low ? `${overlay.low} ${end(-1)}` : ""), ramp, overlay.high ? `${end(1)} ${overlay.high}` : "0", overlay.text ? `, ${overlay.text}` : null));
  const prompt = members[0].turns[0]?.prompt;
  const same = prompt?.length && members.every((one) => one.turns[0]?.prompt.join() === prompt.join());
  const untrained = place.split === "train" && turns.length && turns.every((turn) => turn.datum === null), rewards = new Set(members.map((one) => one.reward));
  const why = untrained ? note(rewards.size === 1 ? `No update: all members have the reward ${short(members[0].reward)}, so none is better than the others.` : "No update: the answers are empty or masked, or the group was left out.") : null;
  const shared = same && !(settings.show === "messages" && hasMessages) ? [make("div", { class: "facts" }, "prompt of all members"), pieces(prompt, tokens, "tokens prompt", null, members[0].turns[0].images, 0, pictures)] : null;
  return [top, why, shared, make("div", { class: "members" }, members.map((one) => episode(one, found, overlay, limit, same, String(one.member) === state().member)))];
}
