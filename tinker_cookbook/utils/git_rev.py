"""Metadata that a recipe attaches to its session at the backend."""

from __future__ import annotations

from tinker_cookbook import __version__


def recipe_user_metadata(recipe_name: str) -> dict[str, str]:
    """The ``user_metadata`` of a recipe's ``ServiceClient``.

    Args:
        recipe_name: Name of the recipe, as listings of runs show it.

    Returns:
        ``recipe_name``, and as ``git_rev`` the version of the package.
    """
    return {"recipe_name": recipe_name, "git_rev": __version__}
