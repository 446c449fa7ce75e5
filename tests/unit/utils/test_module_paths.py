"""Module paths of the official cookbook that are aliases here."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("code_state", "code_state"),
        ("file_utils", "read_jsonl"),
        ("format_colorized", "format_colorized"),
        ("git_rev", "recipe_user_metadata"),
        ("lr_scheduling", "compute_schedule_lr_multiplier"),
        ("session_naming", "slugify"),
    ],
)
def test_official_module_path(module, name):
    alias = importlib.import_module(f"tinker_cookbook.utils.{module}")
    assert callable(getattr(alias, name))


def test_logtree_formatters():
    alias = importlib.import_module("tinker_cookbook.utils.logtree_formatters")
    assert alias is importlib.import_module("tinker_cookbook.utils.logtree.formatters")
