"""Extracts the Python code of a response."""

from __future__ import annotations

import ast
import re

from tinker_cookbook.sandbox.program_text import code_blocks, parse_program


def extract_python_code(text: str, entry_point: str | None = None) -> str:
    """Returns the Python code of a response: the block that defines ``entry_point``.

    If there is none: the first block with a definition, else the first block. Blocks that are
    tagged as Python are preferred. A truncated block ends with the text. Without a block,
    the whole text is returned.
    """
    blocks = code_blocks(text)
    if not blocks:
        return text.strip()
    tagged = [block for block in blocks if block.is_python]
    untagged = [block for block in blocks if not block.tag]
    codes = [block.code.strip() for block in tagged or untagged or blocks]
    for code in codes:
        names = _defined(code)
        if entry_point in names or (entry_point is None and names):
            return code
    return next((code for code in codes if _defined(code)), codes[0])


def _defined(code: str) -> set[str]:
    try:
        body = parse_program(code).body
    except (SyntaxError, ValueError):
        return set(re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)", code, re.MULTILINE))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in body if isinstance(node, kinds)}
