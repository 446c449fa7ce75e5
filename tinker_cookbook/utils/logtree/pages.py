"""Pages made from a report, or from HTML of one's own, with another style or template."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.utils.logtree.nodes import escape
from tinker_cookbook.utils.logtree.trace import Trace, head_html, write_file


@dataclass
class Theme:
    """Style of a page.

    Attributes:
        css_text: Style sheet in place of the default one.
        css_urls: Style sheets that the page links to.
        css_vars: CSS custom properties of the page, such as ``{"--accent": "#c00"}``.
    """

    css_text: str | None = None
    css_urls: list[str] = field(default_factory=list)
    css_vars: dict[str, str] = field(default_factory=dict)

    def head(self, title: str) -> str:
        """Returns what stands between ``<head>`` and ``</head>``."""
        links = [f'<link rel="stylesheet" href="{escape(url)}">\n' for url in self.css_urls]
        properties = "".join(f"{name}: {value};" for name, value in self.css_vars.items())
        more = [f":root {{{properties}}}"] if properties else []
        return head_html(title, more, base=self.css_text) + "".join(links)


def write_html_with_default_style(
    body_html: str,
    path: str | os.PathLike[str],
    *,
    title: str = "Trace",
    theme: Theme | None = None,
    lang: str = "en",
    extra_head: str | None = None,
) -> None:
    """Writes a page whose body is given as HTML.

    Args:
        body_html: The body, with or without its ``<body>`` tag; it is not escaped.
        path: The file; its folder is made.
        title: Title of the page.
        theme: Style of the page; by default that of all reports.
        lang: Language of the page.
        extra_head: HTML at the end of its head.

    Raises:
        TrainingError: The file cannot be written.
    """
    head = (theme or Theme()).head(title) + (extra_head or "")
    body = body_html if "<body" in body_html else f"<body>\n{body_html}\n</body>\n"
    page = f'<!doctype html>\n<html lang="{escape(lang)}">\n<head>\n{head}</head>\n{body}</html>\n'
    write_file(Path(path), page.encode("utf-8", "replace"))


def jinja_context(trace: Trace, **extra: Any) -> dict[str, Any]:
    """Variables of a report for a template: ``title``, ``generated_at``, ``started_at``,
    ``body_html``, ``head_html`` and what is given."""
    return {
        "title": trace.title,
        "generated_at": datetime.now().astimezone().isoformat(),
        "started_at": trace.started_at.isoformat(),
        "body_html": trace.body_html(),
        "head_html": trace.head_html(),
        **extra,
    }


def render_with_jinja(
    env: Any,
    template_name: str,
    *,
    context: Mapping[str, Any],
    write_to: str | os.PathLike[str] | None = None,
) -> str:
    """Renders a template of a ``jinja2.Environment``; writes the page where asked to.

    Raises:
        TrainingError: The file cannot be written.
    """
    page: str = env.get_template(template_name).render(**context)
    if write_to is not None:
        write_file(Path(write_to), page.encode("utf-8", "replace"))
    return page
