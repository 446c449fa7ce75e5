"""Hooks of mkdocs.yml: pages that lie outside of docs/, and llms.txt.

``llms.txt`` (https://llmstxt.org) lists the pages with their first sentences, for language models;
``llms-full.txt`` has the text of the guides and tutorials in the order of the navigation.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

from tinker_cookbook.model_table import LINEUP
from tinker_cookbook.models import COLUMNS, row_of

REPO = Path(__file__).resolve().parents[2]
TUTORIALS = REPO / "build" / "tutorials"
# Pages that a search would find before those that a reader wants, and too long for a model.
LOGS = ("dev-log.md", "changelog.md", "benchmarks/")
# Where docs/choosing.md has the list of hosted models.
MODELS = "<!-- models -->"
log = logging.getLogger("mkdocs.hooks")
_pages: dict[str, list[Page]] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the tutorials that ``make docs`` has executed."""
    if config.nav and TUTORIALS.is_dir():
        pages = [f"tutorials/{path.name}" for path in sorted(TUTORIALS.glob("*.md"))]
        config.nav[0]["Start"].append({"Tutorials": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds tutorials and pages of the top folder, whose links start at the top folder, too."""
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = (REPO / f"{name}.md").read_text().replace("](docs/", "](")
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
    for path in TUTORIALS.glob("*.*"):
        files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keeps the pages of each part in the order of the navigation."""

    def pages_of(items: list[Any]) -> list[Page]:
        nested = [pages_of(i.children) if isinstance(i, Section) else [i] for i in items]
        return [page for pages in nested for page in pages if isinstance(page, Page)]

    _pages.clear()
    _pages.update({part.title: pages_of(part.children) for part in nav.items if part.children})
    return nav


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leaves logs out of the search; a page that does not say for whom it is fails the build."""
    if not re.search(r"^(##|:::) ", markdown, flags=re.MULTILINE):  # a table has the whole width
        page.meta["hide"] = ["toc"]
    if page.file.src_uri.startswith(LOGS):
        page.meta["search"] = {"exclude": True}
    if "For people" not in introduction(markdown):
        log.warning("%s does not begin with a sentence 'For people …'", page.file.src_uri)
    if MODELS in markdown:
        markdown = markdown.replace(MODELS, _models())
    return markdown


def _models() -> str:
    rows = [row_of(name, rank=32) for name in LINEUP]
    header = (*COLUMNS, "adapter, rank 32")
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n\n\\* by the exponent of Llama models: check it by a sweep"


def introduction(markdown: str) -> str:
    """Returns the first sentence below the title, without links and bold words."""
    paragraphs = [p for p in markdown.split("\n\n") if re.match(r"[A-Za-z`\[*]", p)] or [""]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=\.)\s", text)[0]


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt and llms-full.txt beside the pages."""
    index = [f"# {config.site_name}", f"> {config.site_description}"]
    full = list(index)
    for part, pages in _pages.items():
        index.append(f"## {part}")
        lines = []
        for page in pages:
            text = page.markdown or ""
            lines.append(f"- [{page.title}]({page.url}): {introduction(text)}")
            if not page.file.src_uri.startswith((*LOGS, "api/")):
                full.append(text.strip())
        index.append("\n".join(lines))
    for name, parts in (("llms.txt", index), ("llms-full.txt", full)):
        Path(config.site_dir, name).write_text("\n\n".join(parts) + "\n")
