"""Reports that grow while code runs: scopes, concurrency, escaping, files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker_cookbook.utils import logtree


class Checker(HTMLParser):
    """Raises unless every element is closed where it must be; keeps tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)


def parsed(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def outline(node: logtree.Node) -> list:
    """Tags and texts, nested."""
    return [
        child if isinstance(child, str) else (child.tag, outline(child))
        for child in node.children
        if not isinstance(child, logtree.Raw)
    ]


def test_scopes_nest_and_headings_go_one_level_down():
    with logtree.init_trace("Step 1") as trace:
        with logtree.scope_header("outer", class_="mine", data__id="7"):
            logtree.log_text("a")
            with logtree.scope_div(class_="box"), logtree.scope_header("inner"):
                logtree.header("below")
        logtree.log_text("after")
    outer = trace.root.children[2]
    assert isinstance(outer, logtree.Node)
    assert outer.attrs == {"class": "lt-section mine", "data-id": "7"}
    assert outline(trace.root)[2:] == [
        ("section", [("h2", ["outer"]), ("p", ["a"]),
                     ("div", [("section", [("h3", ["inner"]), ("h4", ["below"])])])]),
        ("p", ["after"]),
    ]  # fmt: skip
    parsed(trace.html())


def test_concurrent_tasks_write_each_into_their_own_scope():
    async def work(name: str) -> None:
        with logtree.scope_header(name):
            for i in range(5):
                logtree.log_text(f"{name}{i}")
                await asyncio.sleep(0)
            await asyncio.to_thread(logtree.log_text, f"{name} thread")

    async def main() -> None:
        await asyncio.gather(*(work(name) for name in "abc"))

    with logtree.init_trace("tasks") as trace:
        asyncio.run(main())
    sections = [child for child in outline(trace.root) if child[0] == "section"]
    assert len(sections) == 3
    for (_, children), name in zip(sections, "abc", strict=True):
        texts = [text for tag, (text,) in children if tag == "p"]
        assert texts == [*(f"{name}{i}" for i in range(5)), f"{name} thread"]


def test_decorators_keep_the_scope_open_while_a_coroutine_runs():
    @logtree.scope_header("titled")
    async def titled() -> int:
        await asyncio.sleep(0)
        logtree.log_text("inside")
        return 1

    @logtree.scope_header_decorator
    def bare(value: int) -> int:
        logtree.log_text(f"value {value}")
        return value

    with logtree.init_trace("t") as trace:
        assert asyncio.run(titled()) == 1
        assert [bare(2), bare(3)] == [2, 3]
    assert outline(trace.root)[2:] == [
        ("section", [("h2", ["titled"]), ("p", ["inside"])]),
        ("section", [("h2", ["bare"]), ("p", ["value 2"])]),
        ("section", [("h2", ["bare"]), ("p", ["value 3"])]),
    ]
    assert bare.__name__ == "bare"


def test_text_is_escaped_and_whitespace_survives():
    nasty = "\n  <script>alert('x')</script> & \"q\"\x00\x1b[31m\r"
    with logtree.init_trace("<b>&") as trace:
        logtree.log_text(nasty)
        logtree.details(nasty, summary="<i>")
        logtree.scope_div(title='"><script>').__enter__()
    html = trace.html()
    checker = parsed(html)
    assert not any(tag in ("script", "b", "i") for tag, _ in checker.tags)
    shown = nasty.translate({0: "␀", 0x1B: "␛", 0x0D: "␍"})
    assert shown in checker.texts
    # A browser drops the first line break behind <pre>, so there must be one more.
    assert "\n" + shown in checker.texts


def test_raw_html_and_formatters_with_one_style_sheet():
    messages = [
        {"role": "user", "content": "1 < 2?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"},
                                          {"type": "text", "text": "yes"}]},
    ]  # fmt: skip
    with logtree.init_trace("t") as trace:
        logtree.log_html("<em>kept</em>", div_class="mine")
        for _ in range(2):
            logtree.log_formatter(logtree.ConversationFormatter(messages))
    html = trace.html()
    assert '<div class="mine"><em>kept</em></div>' in html
    assert html.count(".lt-message-assistant {") == 1
    # Programs read the messages in the JSON report.
    shown = [child["data"] for child in trace.to_dict()["root"]["children"] if "data" in child]
    assert [data["messages"][0]["content"] for data in shown] == ["1 < 2?"] * 2
    texts = parsed(html).texts
    assert [text for text in texts if text.strip() in ("1 < 2?", "hm", "yes")] == [
        "1 < 2?", "hm", "yes", "1 < 2?", "hm", "yes",
    ]  # fmt: skip


def cells(trace: logtree.Trace) -> list[list[str]]:
    def rows(node: Any) -> Iterator[list[str]]:
        for child in getattr(node, "children", []):
            if child.tag == "tr":
                yield ["".join(cell.children) for cell in child.children]
            elif child.tag in ("div", "table", "thead", "tbody"):
                yield from rows(child)

    return list(rows(trace.root))


def test_tables_of_every_kind():
    pd = pytest.importorskip("pandas")
    with logtree.init_trace("t") as trace:
        logtree.table([{"a": 1, "b": 0.5}, {"b": "x", "c": np.float32(2)}], caption="dicts")
        logtree.table([[1, True], [None, "<"]])
        logtree.table(pd.DataFrame({"n": [3]}))
        logtree.table([])
        logtree.table_from_dict({"z": 1, "y": 2}, sort_by="key")
        logtree.table_from_dict({"z": 1, "y": 2}, sort_by="value", key_header="k")
        logtree.table_from_dict_of_lists({"p": [1, 2], "q": [3, 4]}, order=["q", "p"])
    assert cells(trace) == [
        ["a", "b", "c"], ["1", "0.5000", ""], ["", "x", "2"],
        ["1", "True"], ["", "<"],
        ["n"], ["3"],
        [],
        ["key", "value"], ["y", "2"], ["z", "1"],
        ["k", "value"], ["z", "1"], ["y", "2"],
        ["q", "p"], ["3", "1"], ["4", "2"],
    ]  # fmt: skip
    parsed(trace.html())


def test_files_are_written_and_valid_json(tmp_path: Path):
    path = tmp_path / "deep" / "train.html"
    with logtree.init_trace("Step 3", path) as trace:
        logtree.log_text("hello \ud800")
        logtree.log_html("<hr>")
        trace.root.add(logtree.Node("p", data={"reward": math.nan, "n": 1}))
        assert not path.exists()
        assert logtree.flush_trace() is True
        assert "hello" in path.read_text()
        logtree.log_text("later")
    assert "later" in path.read_text()
    logtree.write_trace_json(trace, tmp_path / "tree.json")

    def forbid(constant: str) -> None:
        raise AssertionError(constant)

    tree = json.loads((tmp_path / "tree.json").read_text(), parse_constant=forbid)
    assert list(tree)[:4] == ["title", "started_at", "path", "root"]
    assert (tree["title"], tree["path"]) == ("Step 3", str(path))
    assert tree["root"]["tag"] == "body"
    assert tree["root"]["children"][3]["children"][0]["children"] == ["<hr>"]
    assert tree["root"]["children"][4]["data"] == {"reward": None, "n": 1}
    assert [p.name for p in path.parent.iterdir()] == ["train.html"]  # no temporary file is left


def test_an_error_is_in_the_report_and_raised(tmp_path: Path):
    def fail(path: Path, **options) -> None:
        with logtree.init_trace("t", path, **options), logtree.scope_header("s"):
            logtree.log_text("before")
            raise KeyboardInterrupt("ctrl-c")

    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "before" in text
    assert "KeyboardInterrupt: ctrl-c" in text
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "b.html", write_on_error=False)
    assert not (tmp_path / "b.html").exists()
    assert logtree.flush_trace() is False  # the report is closed
