"""JSON schema and description of a function, from its type hints and its docstring."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tinker_cookbook.exceptions import ConfigurationError, nearest

_ARGS_HEADING = re.compile(r"^(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.*)")
_SPHINX = re.compile(r"^:param (?:[^:]*\s)?(?P<name>\w+):\s*(?P<text>(?:.+(?:\n[ \t]+.+)*))", re.M)


def read_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Returns the description and the parameters' descriptions of a Google or Sphinx docstring."""
    text = inspect.cleandoc(docstring or "")
    parameters = {m["name"]: " ".join(m["text"].split()) for m in _SPHINX.finditer(text)}
    text = _SPHINX.sub("", text)
    heading = _ARGS_HEADING.search(text)
    if heading:
        # The section ends at the next line that is not indented.
        rest = text[heading.end() :]
        end = re.search(r"^\S", rest, re.MULTILINE)
        section, after = (rest, "") if end is None else (rest[: end.start()], rest[end.start() :])
        text = text[: heading.start()].rstrip() + ("\n\n" + after if after else "")
        name, indent = "", None
        for line in filter(str.strip, section.split("\n")):
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            entry = _ENTRY.fullmatch(line.strip()) if depth <= indent else None
            if entry:
                name = entry["name"].lstrip("*")
                parameters[name] = entry["text"].strip()
            elif name:  # a continuation line
                parameters[name] = f"{parameters[name]} {line.strip()}".strip()
    return text.strip(), parameters


def described_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with the hints and the docstring of a callable: that of a partial, or
    the method ``__call__`` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


class ToolSignature:
    """Parameters of a tool's function: their JSON schema, and the check of a call's arguments.

    Hints may be ``Annotated[type, "description"]`` or ``Annotated[type, Field(...)]``; other
    descriptions come from the docstring. A first parameter ``self`` or ``cls`` is skipped, and so
    are the arguments of a partial.

    Raises:
        ConfigurationError: A parameter is not a named one, or its type hint cannot be read.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        source = described_function(function)
        self.description, described = read_docstring(source.__doc__ or function.__doc__)
        given = function.keywords if isinstance(function, functools.partial) else {}
        try:
            hints = get_type_hints(source, include_extras=True)
        except Exception as error:
            raise ConfigurationError(
                f"tool {name!r}: its type hints cannot be read ({error}); expected types that are "
                "defined at the top of the module"
            ) from error
        fields: dict[str, Any] = {}
        for i, (parameter, entry) in enumerate(inspect.signature(function).parameters.items()):
            if (i == 0 and parameter in ("self", "cls")) or parameter in given:
                continue
            if entry.kind not in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY):
                raise ConfigurationError(
                    f"tool {name!r}: parameter {parameter!r} is {entry.kind.description}, expected "
                    "named parameters, because a model gives arguments by name"
                )
            # The alias allows names that pydantic models already use, such as ``copy``.
            details: dict[str, Any] = {"alias": parameter}
            hint = hints.get(parameter, Any)
            if text := _description_of(hint) or described.get(parameter):
                details["description"] = text
            default = PydanticUndefined if entry.default is entry.empty else entry.default
            fields[f"field_{parameter}"] = (Annotated[hint, Field(**details)], default)
        try:
            self.model: type[BaseModel] = create_model(
                f"{name}_params",
                # JSON has no NaN, and a number such as 1e400 would arrive as infinity.
                __config__=ConfigDict(allow_inf_nan=False),
                **fields,
            )
            self.schema = _without_titles(self.model.model_json_schema())
        except Exception as error:
            raise ConfigurationError(
                f"tool {name!r}: its type hints have no JSON schema ({error}); expected types such "
                "as str, int, list[str], Literal, or a pydantic model"
            ) from error

    def validate(self, arguments: Any) -> dict[str, Any]:
        """Returns the function's arguments, converted to their types.

        Raises:
            ValueError: The arguments do not match the schema; the message names each parameter.
        """
        try:
            values = self.model.model_validate(arguments)
        except ValidationError as error:
            problems = [
                f"{'.'.join(str(part) for part in one['loc']) or 'arguments'}: {one['msg']}"
                for one in error.errors(include_url=False, include_input=False)
            ]
            raise ValueError("; ".join(problems)) from error
        found = {
            field.removeprefix("field_"): getattr(values, field)
            for field in self.model.model_fields
        }
        for name in arguments if isinstance(arguments, Mapping) else ():
            if name not in found:
                known = ", ".join(found) or "none"
                raise ValueError(f"{name}: no such parameter{nearest(name, found)}; it has {known}")
        return found


def _description_of(hint: Any) -> str | None:
    """Returns the description in ``Annotated[type, "…"]`` or ``Annotated[type, Field(…)]``."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    # A plain text comes first, as in the official cookbook.
    texts = [extra for extra in extras if isinstance(extra, str)]
    texts += [e.description for e in extras if isinstance(e, FieldInfo) and e.description]
    return texts[0] if texts else None


def _without_titles(schema: Any) -> Any:
    """Returns the schema without pydantic's titles, which repeat the names of the parameters."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    return {
        # Below ``properties`` and ``$defs`` a key is a name, and may be "title".
        key: {name: _without_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in kept.items()
    }
