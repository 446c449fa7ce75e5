"""Tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.utils.logtree.nodes import Child, Node
from tinker_cookbook.utils.logtree.trace import append, open_place
from tinker_cookbook.utils.ml_log.pretty_print import format_value


def table(obj: Any, *, caption: str | None = None) -> None:
    """A table.

    Args:
        obj: A pandas ``DataFrame``, a list of dicts (columns are all keys that occur, in the order
            in which they first do), or a list of rows.
        caption: Stands above.

    Raises:
        DataFormatError: ``obj`` is something else.
    """
    if open_place() is None:
        return
    if hasattr(obj, "columns") and hasattr(obj, "itertuples"):
        rows = [list(row) for row in obj.itertuples(index=False, name=None)]
        append(table_node(rows, [str(name) for name in obj.columns], caption))
    elif not _is_list(obj):
        hint = "; use table_from_dict or table_from_dict_of_lists" if _is_dict(obj) else ""
        raise DataFormatError(
            f"table: got {type(obj).__name__}, expected a DataFrame, a list of dicts, or a list of "
            f"lists{hint}"
        )
    elif all(_is_dict(row) for row in obj):
        columns = list(dict.fromkeys(key for row in obj for key in row))
        rows = [[row.get(key, "") for key in columns] for row in obj]
        append(table_node(rows, [str(key) for key in columns], caption))
    elif all(_is_list(row) for row in obj):
        append(table_node(obj, None, caption))
    else:
        kinds = sorted({type(row).__name__ for row in obj})
        raise DataFormatError(f"table: got rows of {kinds}, expected all dicts or all lists")


def table_from_dict(
    data: Mapping[Any, Any],
    *,
    caption: str | None = None,
    key_header: str = "key",
    value_header: str = "value",
    sort_by: str | None = None,
) -> None:
    """A table of two columns.

    Args:
        data: One row an entry.
        caption: Stands above.
        key_header: Heading of the first column.
        value_header: Heading of the second.
        sort_by: ``"key"``, ``"value"``, or ``None`` for the order of ``data``.

    Raises:
        DataFormatError: ``sort_by`` is something else.
    """
    if sort_by not in ("key", "value", None):
        raise DataFormatError(f"sort_by={sort_by!r}; expected 'key', 'value' or None")
    if open_place() is None:
        return
    items = list(data.items())
    if sort_by is not None:
        items.sort(key=lambda item: item[sort_by == "value"])
    append(table_node(items, [key_header, value_header], caption))


def table_from_dict_of_lists(
    columns: Mapping[str, Sequence[Any]],
    *,
    caption: str | None = None,
    order: Sequence[str] | None = None,
) -> None:
    """A table given by its columns.

    Args:
        columns: Of one length.
        caption: Stands above.
        order: Names of the columns to show; by default all.

    Raises:
        DataFormatError: The lengths differ, or ``order`` names a column that is not there.
    """
    if open_place() is None:
        return
    names = list(columns) if order is None else list(order)
    missing = [name for name in names if name not in columns]
    lengths = {name: len(values) for name, values in columns.items()}
    if missing or len(set(lengths.values())) > 1:
        problem = f"no column {missing[0]!r}" if missing else "expected columns of one length"
        raise DataFormatError(f"table_from_dict_of_lists: {problem}; got {lengths}")
    rows = zip(*(columns[name] for name in names), strict=True)
    append(table_node([list(row) for row in rows], names, caption))


def table_node(
    rows: Sequence[Sequence[Any]], columns: Sequence[str] | None, caption: str | None = None
) -> Node:
    """Returns a table as an element. Cells are nodes or values; numbers stand to the right."""
    node = Node("table")
    if caption:
        node.add(Node("caption", {}, [caption]))
    if columns is not None:
        numeric = [bool(rows) and all(_is_number(row[i]) for row in rows if i < len(row))
                   for i in range(len(columns))]  # fmt: skip
        cells: list[Child] = [
            Node("th", {"class": "lt-num"} if right else {}, [name])
            for name, right in zip(columns, numeric, strict=True)
        ]
        node.add(Node("thead", {}, [Node("tr", {}, cells)]))
    body: list[Child] = [Node("tr", {}, [_cell(value) for value in row]) for row in rows]
    node.add(Node("tbody", {}, body))
    return Node("div", {"class": "lt-table-box"}, [node])


def _cell(value: Any) -> Node:
    if isinstance(value, Node):
        return Node("td", {}, [value])
    if _is_number(value):
        return Node("td", {"class": "lt-num"}, [format_value(value)])
    return Node("td", {}, ["" if value is None else str(value)])


def _is_number(value: Any) -> bool:
    scalar_array = hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0  # numpy, torch
    return scalar_array or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
