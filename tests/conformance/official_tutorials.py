"""What the recipes, tutorials, skills and READMEs of the official cookbook import."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "tinker_cookbook"
_CODE_BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def imported_names(source: Path) -> dict[str, list[str]]:
    """Names by module that a program or guide imports; an empty name is the module itself."""
    files = [*source.glob("tutorials/*.py"), *source.glob("**/*.md")]
    files += (source / PACKAGE / "recipes").rglob("*.py")
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(files):
        if file.stem.endswith("_test"):
            continue
        text = file.read_text("utf-8")
        blocks = [text]
        if file.suffix == ".md":
            blocks = [textwrap.dedent(match.group(2)) for match in _CODE_BLOCK.finditer(text)]
        for block in blocks:
            for module, name in _imports(block):
                found[module].add(name)
    return {module: sorted(names) for module, names in sorted(found.items())}


def _imports(code: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a fragment that shows the shape of a call
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            pairs = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in pairs if pair[0].split(".")[0] == PACKAGE)
