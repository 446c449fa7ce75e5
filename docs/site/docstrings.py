"""Griffe extension: docstrings of settings, and names of roles, as the site shows them."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

# The functions of this package that make a field of chz, and their first parameters.
FIELDS = {
    "setting": ("default", "doc"),
    "number": ("default", "doc"),
    "peak_rate": ("default", "doc"),
    "weights_field": ("kind", "doc"),
}
ROLE = re.compile(r":(?:class|func|mod|meth|data|attr|exc):`~?([^`]+)`")


def field_of(value: griffe.Expr | str | None) -> tuple[str | None, str] | None:
    """Returns the default and the text of a field of chz."""
    try:
        call = ast.parse(str(value), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call):
        return None
    given = {str(k.arg): k.value for k in call.keywords}
    given.update(zip(FIELDS.get(ast.unparse(call.func), ()), call.args, strict=False))
    text, default = given.get("doc"), given.get("default")
    if not isinstance(text, ast.Constant):
        return None
    return ast.unparse(default) if default else None, str(text.value)


class SettingsAndRoles(griffe.Extension):
    """The text of a setting is its docstring; roles of reStructuredText become code."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Shows a field by its default, with its text as the docstring."""
        if attr.docstring is None and (field := field_of(attr.value)):
            attr.value, text = field
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replaces roles."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
