"""The code of a run: commit and uncommitted changes of its git checkouts."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_TIMEOUT_S = 10
_MOST_BYTES = 5_000_000


def code_state(modules: Sequence[str | ModuleType] = ("tinker_cookbook",)) -> str:
    """Returns :func:`code_diff` of the checkouts that hold these modules or module names.

    Raises:
        ImportError: There is no module of that name.
    """
    loaded = [m if isinstance(m, ModuleType) else importlib.import_module(m) for m in modules]
    files = [Path(module.__file__) for module in loaded if module.__file__ is not None]
    return code_diff([file.parent for file in files])


def code_diff(folders: list[Path]) -> str:
    """Returns the commit and ``git diff`` of the checkouts that hold ``folders``, if any.

    The result is a patch: the lines before the first ``diff`` name checkout, commit and untracked
    files, and ``git apply`` skips them. Without git it is empty.
    """
    roots = dict.fromkeys(root for folder in folders if (root := _checkout_root(folder)))
    return "\n".join(_describe(root) for root in roots)


def _checkout_root(folder: Path) -> str | None:
    root = _git(folder, "rev-parse", "--show-toplevel")
    # Installed into a virtual environment inside someone's checkout is not part of that checkout.
    ignored = _git(folder, "check-ignore", "-q", ".") is not None
    return root.strip() if root and not ignored else None


def _describe(root: str) -> str:
    folder = Path(root)
    # A new checkout has no commit yet.
    commit = (_git(folder, "rev-parse", "HEAD") or "none yet").strip()
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").split("\n")
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    # Changed data files in a checkout can make a diff of any size.
    if len(diff) > _MOST_BYTES:
        diff = diff[:_MOST_BYTES] + "\n# cut here: the diff is too long to keep\n"
    names = [f"# untracked: {name}" for name in untracked if name]
    return "\n".join([f"# checkout: {root}", f"# commit: {commit}", *names, diff])


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks git status calls of the user are not disturbed.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")
