"""Reinforcement learning with tools: questions about a shop's database."""

from tinker_cookbook.utils.imports import alias_modules

# The place of the search recipe in the documentation of Tinker.
_SEARCH = "tinker_cookbook.recipes.search_tool"
alias_modules({f"{__name__}.search": _SEARCH, f"{__name__}.search.": f"{_SEARCH}."})
