// Draws the view that the address names, and handles keys.

// The tabs of a run: label, function from runs to elements, and whether it shows several runs, and
// whether only some runs have it.
const TABS = {
  curves: ["Curves", curvesView, true],
  episodes: ["Episodes", episodesView, true],
  timing: ["Timing", ([run]) => timingView(run), false, true],
  tree: ["Logs", ([run]) => treeView(run), false, true],
  settings: ["Settings", settingsView, true],
};

let keys = {}, drawn = 0, address;  // a key of the view: what it does, and how the list of keys describes it
async function view() {
  readSettings();
  const { run: asked, tab, list, eval: evaluation, sweep } = state();
  if (evaluation) return evaluationView();
  if (sweep) return sweepView();
  let name = asked;
  if (!name && !list) {
    // The folder of a single run shows this run.
    const { runs, evaluations, sweeps } = await get("runs");
    if (runs.length === 1 && !evaluations.length && !sweeps.length) name = runs[0].name;
  }
  if (!name) return listView();
  const runs = await Promise.all(name.split("|").map((one) => get("run", { name: one })));
  const shown = await (TABS[tab] || TABS.curves)[1](runs);
  const failed = runs.filter((run) => run.error || run.problem).map((run) => note(`${run.title}: ${run.problem || `ended by ${run.error}`}`));
  document.title = runs.map((run) => run.title).join(", ");
  return [head(runs.map((run) => run.title).join(", "), TABS[tab] ? tab : "curves", runs), make("main", {}, failed, shown)];
}

async function redraw() {
  const number = ++drawn, page = document.getElementById("page");
  let content;
  keys = {};
  try {
    content = await view();
  } catch (error) {
    keys = {};
    content = [make("header", {}, make("h1", {}, "Runs"), make("nav", {}, anchor("All runs", { list: "runs" }, {}))), make("main", {}, note(String(error.message || error)))];
  }
  if (number !== drawn) return;  // a later call has begun
  const active = document.activeElement, focus = active?.getAttribute("aria-label"), at = active?.selectionStart;
  const same = location.hash === address, scrolled = same ? [...page.querySelectorAll(".scroll, .prompt")].map((one) => [one.scrollLeft, one.scrollTop]) : [];
  address = location.hash;
  tip.hidden = true;
  page.replaceChildren(...content, tip);
  // The question is at the end of a long prompt.
  page.querySelectorAll(".scroll, .prompt").forEach((one, i) => { [one.scrollLeft, one.scrollTop] = scrolled[i] || [0, one.classList.contains("prompt") ? one.scrollHeight : 0]; });
  if (!same) page.querySelector(".episode.chosen")?.scrollIntoView({ block: "center" });
  if (!focus) return;
  const again = page.querySelector(`[aria-label="${CSS.escape(focus)}"]`);
  again?.focus({ preventScroll: true });
  if (at !== undefined && at !== null) try { again?.setSelectionRange(at, at); } catch { /* not a text field */ }
}

const help = make("dialog", { "aria-label": "keys" });
document.body.append(help);  // outside of the page, which is drawn again
const GLOBAL = {
  "/": [() => document.querySelector("input[type=search]")?.focus(), "filter or search"],
  "?": [() => {
    const names = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };
    const rows = Object.entries({ ...GLOBAL, ...keys }).map(([key, [, what]]) => [make("kbd", {}, names[key] || key), what]);
    help.replaceChildren(table(["key", "leads to"], rows), make("p", { class: "quiet" }, "In a chart, ← and → move along the curve, Enter opens the episodes of the point."), make("button", { onclick: () => help.close() }, "close"));
    help.showModal();
  }, "this list"],
};
addEventListener("hashchange", () => { scrollTo(0, 0); redraw(); });
addEventListener("keydown", (event) => {
  const field = ["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox";
  if (field && event.key === "Escape") { event.target.blur(); return; }
  const handler = { ...GLOBAL, ...keys }[event.key];
  if (field || help.open || event.ctrlKey || event.metaKey || event.altKey || !handler) return;
  event.preventDefault();
  handler[0]();
});
redraw();
// New rows appear by themselves; a page in the background asks for nothing.
let asking = false;
if (!isReport) setInterval(async () => {
  if (asking || document.hidden || help.open || ["INPUT", "SELECT"].includes(document.activeElement?.tagName) && document.activeElement.type !== "checkbox") return;
  asking = true;
  try { if (await changed()) { answers.clear(); redraw(); } } finally { asking = false; }
}, 5000);
