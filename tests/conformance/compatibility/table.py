"""The page with the table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from tests.conformance.compatibility.survey import Section

_TOP = """# What works of the Tinker SDK

For people who use the unmodified official SDK with the [server](server.md): which of its methods
and commands work, tried in two processes.
`tinker` {version}. Of {all} probes, {works} work and {refused} are refused.

This command writes the page:

```bash
python -m tests.conformance.compatibility model_name=HuggingFaceTB/SmolLM2-135M-Instruct
```

It calls every public method of the installed SDK and every command of its command line, and checks
the results. For *works*, the details are what was checked. For *refused*, they are the error
message of the client, which raises it immediately, without retries. If a method has no probe, or
neither works nor is refused, the command fails and writes no page. `RUN` is the id of a run, and
`MODEL` the name of the model. The column `_async` is for the older name of the same method.
"""

_FUTURES = """
Two more classes represent a client that is still being created. They have the methods of the client
and of `APIFuture`, which were called before the client existed:

"""


_LIBRARIES_TOP = """
## Libraries that sample from the server

`tests/conformance/test_verifiers.py` tests each library in a separate environment. *Exact* means
that token ids and log-probabilities equal those of scoring the same tokens.

| name | result | details |
|---|---|---|
"""
LIBRARIES = (
    ("verifiers 0.4, `TrainClientConfig`", "several turns and agents, exact, with their masks"),
    ("verifiers 0.4, `EvalClientConfig`", "several turns and agents, by chat"),
    ("verifiers 0.1.9, `run_group`", "exact, with `return_token_ids`"),
)
"""Names of libraries, and what was checked."""


def page(sections: Sequence[Section]) -> str:
    """Markdown."""
    rows = [row for section in sections if section.counts for row in section.rows]
    works = sum(row.outcome == "works" for row in rows)
    head = _TOP.format(
        version=version("tinker"), works=works, all=len(rows), refused=len(rows) - works
    )
    futures = [section for section in sections if section.title.startswith("Backcompat")]
    others = [section for section in sections if section not in futures]
    at = next(i for i, section in enumerate(others) if section.title == "APIFuture") + 1
    before, after = "".join(map(_table, others[:at])), "".join(map(_table, others[at:]))
    return head + before + _FUTURES + "".join(map(_line, futures)) + after + libraries()


def libraries() -> str:
    """The section that no probe of this program writes."""
    rows = (f"| {name} | works | {checked} |\n" for name, checked in LIBRARIES)
    return _LIBRARIES_TOP + "".join(rows)


def _table(section: Section) -> str:
    twins = any(row.twin for row in section.rows)
    lines = [
        f"\n## {section.title}\n",
        "| name | result | `_async` | details |" if twins else "| name | result | details |",
    ]
    lines.append("|---|---|---|---|" if twins else "|---|---|---|")
    for row in section.rows:
        cells = [f"`{row.name}`" if section.counts else row.name, row.outcome]
        cells += [row.twin or ""] if twins else []
        said = row.said.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {' | '.join([*cells, said])} |")
    return "\n".join(lines) + "\n"


def _line(section: Section) -> str:
    """A class whose methods are another's: only what differs would be worth a row."""
    works = sum(row.outcome == "works" for row in section.rows)
    twins = sum(row.twin is not None for row in section.rows)
    spelled = sum(row.twin == "works" for row in section.rows)
    refused = [f"`{row.name}` ({row.said})" for row in section.rows if row.outcome == "refused"]
    more = f"; refused: {', '.join(refused)}" if refused else ""
    return (
        f"- `{section.title}`: {works} of {len(section.rows)} methods work, and {spelled} of "
        f"{twins} `_async` spellings{more}\n"
    )
