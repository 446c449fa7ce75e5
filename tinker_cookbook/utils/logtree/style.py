"""How reports look; self-contained, for light and dark screens, and on paper."""

CSS = """
:root {
  color-scheme: light dark;
  --bg: #fbfbfa; --card: #ffffff; --text: #1f2328; --dim: #636a73; --line: #dcdfe3;
  --soft: #f2f3f5; --accent: #2257c4; --good: #12733a; --good-bg: #dff3e4;
  --bad: #a3271c; --bad-bg: #fbe4e1; --special: #8a4b00; --special-bg: #fdeccc;
  --answer-bg: #eef3fc;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14161a; --card: #1b1e23; --text: #dfe3e8; --dim: #99a1ab; --line: #343a42;
    --soft: #23272e; --accent: #86aef7; --good: #7fd59b; --good-bg: #173723;
    --bad: #f29a90; --bad-bg: #452019; --special: #f0c077; --special-bg: #3d2e12;
    --answer-bg: #1d2738;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 72rem; padding: 1.5rem 1.25rem 4rem;
  background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
h1, h2, h3, h4, h5, h6 { line-height: 1.25; margin: 1.5em 0 0.5em; }
h1 { font-size: 1.6rem; margin-top: 0; }
h2 { font-size: 1.2rem; }
h3, h4, h5, h6 { font-size: 1rem; }
a { color: var(--accent); }
p { margin: 0.4em 0; }
.lt-meta { color: var(--dim); font-size: 0.875rem; }
.lt-text { white-space: pre-wrap; overflow-wrap: anywhere; }
.lt-section { border-left: 2px solid var(--line); margin: 0.75rem 0; padding-left: 0.9rem; }
.lt-section > :first-child { margin-top: 0; }
pre {
  margin: 0.4em 0; padding: 0.6rem 0.75rem; border-radius: 6px; background: var(--soft);
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
}
details { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0; }
details > summary { cursor: pointer; padding: 0.35rem 0.75rem; }
details > .lt-body { padding: 0.25rem 0.75rem 0.6rem; }
details > summary:focus-visible { outline: 2px solid var(--accent); }
.lt-table-box { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; }
caption { text-align: left; font-weight: 600; padding: 0.2rem 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { color: var(--dim); font-weight: 600; white-space: nowrap; }
td { overflow-wrap: break-word; white-space: pre-wrap; }
td.lt-num, th.lt-num { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.lt-error { border: 1px solid var(--bad); border-radius: 6px; padding: 0.5rem 0.75rem;
  margin: 0.75rem 0; background: var(--bad-bg); }
@media print { details { break-inside: avoid; } body { max-width: none; } }
"""
