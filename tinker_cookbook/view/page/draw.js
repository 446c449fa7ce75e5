// Draws the view that the address names.

// The tabs of a run: label, function from runs to elements, whether it shows several runs, and
// whether only some runs have it.
const TABS = {
  curves: ["Curves", curvesView, true],
  episodes: ["Episodes", ([run]) => episodesView(run), false],
  timing: ["Timing", ([run]) => timingView(run), false, true],
  tree: ["Logs", ([run]) => treeView(run), false, true],
  settings: ["Settings", settingsView, true],
};

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
      const shown = await (TABS[tab] || TABS.curves)[1](runs);
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
