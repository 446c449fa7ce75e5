"""The table of ``docs/from-tinker-cookbook.md``, written from the figures of the last runs.

``official_results.json`` holds, for each part of ``official_cookbook.py``, its figures and the day
on which it ran. ``official_cookbook.py … --write-page`` records the parts that it ran and writes
the table between the two markers of the page.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "official_results.json"
PAGE = HERE.parents[1] / "docs" / "from-tinker-cookbook.md"
BEGIN, END = "<!-- table of official_page.py -->", "<!-- end of the table -->"

Figures = dict[str, Any]
# Part, what was checked, and its result from the part's figures; {name} is "a of b".
_ROWS = (
    ("downstream", "stability tests (`tests/downstream_compat`)", "{all}"),
    ("unit", "unit tests with public names only, of packages that are here too", "{present}"),
    ("unit", "unit tests with public names only, of all its packages", "{public}"),
    ("unit", "all unit tests, with those of private names", "{all}"),
    (
        "names",
        "public names of its package ({modules} modules)",
        "{package} are here, {package_same} with the same parameters, defaults and values",
    ),
    (
        "names",
        "public names of its recipes ({recipe_modules} modules)",
        "{recipes} are here, {recipes_same} with the same parameters, defaults and values",
    ),
    ("names", "imports in its recipes, tutorials, skills and READMEs", "{imports}"),
    ("recipes", "programs of its recipes that exist here", "{exist}"),
    ("recipes", "... and run two steps (or to their end), unchanged", "{run}"),
    ("tutorials", "tutorials that run to their end against our server", "{run}"),
    (
        "renderings",
        "{conversations} renderings ({renderers} renderers)",
        "{equal} equal, {refused} refused by both, {differ} differ",
    ),
)


def share(passed: int, total: int) -> str:
    """``a of b``, as the table writes it."""
    return f"{passed:,} of {total:,}"


def read_results() -> dict[str, Figures]:
    """Figures of the last run by part; ``date`` is its day."""
    return json.loads(RESULTS.read_text("utf-8"))


def record(part: str, figures: Figures) -> None:
    """Keeps the figures of a part that ran today."""
    results = read_results() if RESULTS.is_file() else {}
    results[part] = {"date": date.today().isoformat(), **figures}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")


def table() -> str:
    """The table in Markdown."""
    results = read_results()
    lines = ["| checked with the source of the official cookbook 0.6.1 | result | run on |"]
    lines.append("|---|---|---|")
    for part, title, result in _ROWS:
        figures = results[part]
        cells = title.format(**figures), result.format(**figures), figures["date"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """The page with today's table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def write_page() -> None:
    """Writes the table into the page."""
    PAGE.write_text(page_with_table(PAGE.read_text("utf-8")), "utf-8")
