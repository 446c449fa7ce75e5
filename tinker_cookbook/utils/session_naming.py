"""Names of sessions, as consoles and listings of a backend show them."""

from __future__ import annotations

import re

_PREFIX = "cookbook"


def resolve_session_display_name(*, session_name: str | None, wandb_name: str | None) -> str | None:
    """``session_name`` if it is set, else ``wandb_name``, else ``None``; empty is not set."""
    return session_name or wandb_name or None


def slugify(text: str) -> str:
    """Lower-case letters and digits of ``text``, anything between them as one hyphen."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def default_cookbook_session_name(*parts: str | None, wandb_name: str | None = None) -> str:
    """The session name of a recipe for which the user gave none.

    Args:
        parts: Name of the recipe, then what tells its runs apart (dataset, stage). ``None`` and
            parts without a letter or digit are left out.
        wandb_name: Returned as it is where it is set, so that both names are the same.

    Returns:
        For ``("math-rl", "gsm8k")``: ``"cookbook-math-rl-gsm8k"``.
    """
    if wandb_name:
        return wandb_name
    slugs = [slugify(part) for part in parts if part]
    return "-".join([_PREFIX, *filter(None, slugs)])
