"""Text of programs: in the answers of a model, and in the tests of data sets."""

from __future__ import annotations

import ast
import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.exceptions import DataValidationError

_PARSING = threading.Lock()
# At the start of a line with any words behind it, or behind a text with one word at most.
_FENCE = re.compile(
    r"(?:[ \t]*|[^`~]+(?=(?:`{3,}|~{3,})[ \t]*[\w+#.-]*$))"
    r"(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)"
)
_PYTHON = re.compile(r"i?py(?:thon|py)?[\d.]*|.*\.py")


def parse_program(code: str) -> ast.Module:
    """Returns ``ast.parse(code)``, for calls from several threads.

    In CPython 3.11 all threads share the depth counter of the parser: if one thread is interrupted
    while it parses, another can fail with ``SystemError``.
    """
    with _PARSING:
        return ast.parse(code)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of Markdown."""

    tag: str
    """First word after the opening fence, in lower case; empty if there is none."""
    code: str
    closed: bool
    """Whether it has a closing fence. The last block may be cut off at the maximum of tokens."""

    @property
    def is_python(self) -> bool:
        """Whether the tag names Python."""
        return _PYTHON.fullmatch(self.tag) is not None


def code_blocks(text: str) -> list[CodeBlock]:
    """Returns the fenced blocks of a text: with backticks or tildes, also indented or unclosed.

    As in CommonMark, a fence ends with one of the same characters, at least as many. Fences may
    also follow text on their line, as models write them.
    """
    blocks: list[CodeBlock] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in io.StringIO(text):
        if opening is None:
            opening, lines = _FENCE.fullmatch(line.rstrip()), []
            continue
        mark = opening["mark"]
        before = line.rstrip().rstrip(mark[0])
        closes = line.rstrip()[len(before) :].startswith(mark) and mark not in before
        if closes and not _in_docstring(opening, lines):
            if before.strip():
                lines.append(before + "\n")
            blocks.append(_block(opening, lines, closed=True))
            opening = None
        else:
            lines.append(line)
    if opening is not None:
        blocks.append(_block(opening, lines, closed=False))
    return blocks


def _block(opening: re.Match[str], lines: list[str], closed: bool) -> CodeBlock:
    # The first line of a program has no indentation; in a list it has that of the item.
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    code = "".join(line.removeprefix(indent) for line in lines)
    word = re.search(r"[\w+#.-]+", opening["info"])
    return CodeBlock(word[0].lower().lstrip(".") if word else "", code, closed)


def _in_docstring(opening: re.Match[str], lines: list[str]) -> bool:
    """Whether a fence is part of a string of the program."""
    code = "".join(lines)
    odd = code.count('"""') % 2 or code.count("'''") % 2
    return bool(odd) and _block(opening, lines, closed=False).is_python


def extract_program(answer: str, names: Sequence[str] = ()) -> str | None:
    """Returns the Python program in an answer; None if it has no fenced block.

    Args:
        answer: Text with fenced blocks.
        names: Functions or classes that the program must define, if known.

    It is the last block that defines one of the names; else the last one that is tagged as Python,
    or has no tag and is a program. Other blocks are examples of input and output, or commands.
    A block that is cut off counts only if there is no complete one.
    """
    blocks = code_blocks(answer)
    blocks = [block for block in blocks if block.code.strip()] or blocks
    python = [b for b in blocks if b.is_python or (not b.tag and _is_program(b.code))]
    found = python or [block for block in blocks if not block.tag] or blocks
    found = [b for b in found if b.closed or _is_program(b.code)] or found
    if names:
        words = f"(?:{'|'.join(map(re.escape, names))})"
        pattern = re.compile(
            rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{words}\b"
            rf"|^{words}[ \t]*(?::[^=\n]*)?=[^=]",
            re.MULTILINE,
        )
        found = [block for block in found if pattern.search(block.code)] or found
    return found[-1].code if found else None


def _is_program(code: str) -> bool:
    """Whether the text is Python that does something: not ``6`` or ``[1, 2]``, as in an output."""
    try:
        body = parse_program(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(node, ast.Expr) or any(isinstance(n, ast.Call) for n in ast.walk(node))
        for node in body
    )


def binds(program: str, name: str) -> bool:
    """Returns whether a program may give ``name`` a value; true if it cannot be parsed."""
    try:
        tree = parse_program(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True

    def may_bind(node: ast.AST) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return node.name == name
            case ast.Name(ctx=ast.Store()):
                return node.id == name
            case ast.Attribute(ctx=ast.Store()):
                return node.attr == name
            case ast.alias():
                return node.name == "*" or (node.asname or node.name.partition(".")[0]) == name
            case ast.Constant():  # setattr(Solution, "name", …)
                return node.value == name
            case _:
                return False

    return any(map(may_bind, ast.walk(tree)))


def with_preamble(preamble: str, program: str) -> str:
    """Returns a program that runs ``preamble`` first, such as the imports in a prompt.

    Imports from ``__future__`` in ``program`` stay at the top, where Python requires them.
    """
    if not preamble:
        return program
    program = program.removeprefix("\ufeff")
    try:
        body = parse_program(program).body
    except (SyntaxError, ValueError, RecursionError):
        body = []  # the program cannot run anyway
    ends = [
        node.end_lineno or 0
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    lines = list(io.StringIO(program, newline=""))  # the lines that the parser counts
    top = max(ends, default=0)
    return "".join([*lines[:top], f"\n{preamble}\n", *lines[top:]])


def split_check(code: str, entry_point: str) -> list[str]:
    """Splits the ``def check(candidate)`` of HumanEval into one test for each assertion.

    Args:
        code: Text of the column ``test``.
        entry_point: Name of the function that ``candidate`` stands for.

    Returns:
        Tests for ``PythonGrader.grade``. A loop of assertions is one test. Statements without an
        assertion are part of each.

    Raises:
        DataValidationError: There is no function ``check``, or it asserts nothing.
    """
    module = parse_program(code)
    check = next(
        (n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "check"), None
    )
    if check is None:
        raise DataValidationError("test: no function check(candidate)")
    before = [node for node in module.body if node is not check]
    parameter = check.args.args[0].arg
    before += parse_program(f"{parameter} = {entry_point}").body
    tests: list[str] = []
    for node in check.body:
        if any(isinstance(part, ast.Assert) for part in ast.walk(node)):
            tests.append(ast.unparse(ast.Module([*before, node], [])))
        else:
            before.append(node)
    if not tests:
        raise DataValidationError("test: its function check asserts nothing")
    return tests


def names_in_tests(solution: str, tests: Sequence[str]) -> list[str]:
    """Returns the functions and classes of a correct solution that its tests use by name.

    Use them as ``entry_points`` for data sets that do not list any, such as MBPP.
    """
    top = parse_program(solution).body
    defined = {n.name for n in top if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    trees = [ast.walk(parse_program(test)) for test in tests]
    used = {n.id for tree in trees for n in tree if isinstance(n, ast.Name)}
    return sorted(defined & used)
