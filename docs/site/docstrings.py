"""Griffe extension: docstrings of settings, and names of roles, as the site shows them."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

# The functions of this package that make a field, and the place of the text among their arguments.
FIELDS = {"setting": 1, "number": 1, "peak_rate": 1, "weights_field": 1}
ROLE = re.compile(r":(?:class|func|mod|meth|data|attr|exc):`~?([^`]+)`")


def text_of_field(call: griffe.Expr | str | None) -> str | None:
    """Returns the ``doc`` of a field of chz."""
    try:
        tree = ast.parse(str(call), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(tree, ast.Call):
        return None
    texts = [k.value for k in tree.keywords if k.arg == "doc"]
    at = FIELDS.get(ast.unparse(tree.func))
    if at is not None:
        texts += tree.args[at : at + 1]
    if texts and isinstance(texts[0], ast.Constant):
        return str(texts[0].value)
    return None


class SettingsAndRoles(griffe.Extension):
    """The text of a setting is its docstring; roles of reStructuredText become code."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Uses the text of a field that has no docstring."""
        if attr.docstring is None and (text := text_of_field(attr.value)):
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replaces roles."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
