"""Standard input, output and error of a program, as the interpreter makes and ends them."""

from __future__ import annotations

import _io
import atexit
import builtins
import contextlib
import gc
import io
import os
import sys
import threading
from typing import Any

# Paths that lead through /proc, which a graded program does not have.
_DEVICES = {
    f"/dev/{name}": number
    for number, names in enumerate((("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")))
    for name in names
}


_open = open


def connect(text: str, stdout: int, stderr: int) -> None:
    """Makes ``text`` the standard input of this process, and the descriptors its outputs."""
    stdin = os.memfd_create("stdin")
    data = memoryview(text.encode(errors="surrogatepass"))
    while data:
        data = data[os.write(stdin, data) :]
    os.lseek(stdin, 0, os.SEEK_SET)
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)


def open_outputs() -> None:
    """Replaces ``sys.stdout`` and ``sys.stderr``, and lets paths such as /dev/stdin be opened.

    The interpreter made them for another file, so ``seekable`` and the like are wrong.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        new: Any = _open(
            number,
            "w",
            encoding="utf-8",
            errors=getattr(sys, name).errors,
            newline="\n",
            closefd=False,
        )
        if number == 2:
            new.reconfigure(line_buffering=True)
        new.buffer.raw.name = f"<{name}>"
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    io.open = builtins.open = _open_device


def _open_device(file: Any, *args: Any, **kwargs: Any) -> Any:
    number = _DEVICES.get(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else None
    return _open(file if number is None else os.dup(number), *args, **kwargs)


def finish() -> None:
    """Does what the interpreter does at its end and what a program can notice.

    The other steps take longer than most programs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush(sys.stdout, sys.stderr, *_open_files())
    # Destructors may print.
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush(*_open_files())


def _open_files() -> list[Any]:
    """Returns the files that the program has opened and not closed, also under other names."""
    items = gc.get_objects()
    # The C class: for the abstract ``io.IOBase``, a test of a class takes 20 times as long.
    kinds = {kind for kind in set(map(type, items)) if issubclass(kind, _io._IOBase)}
    return [item for item in items if type(item) in kinds]


def _flush(*files: Any) -> None:
    for file in files:
        # It may be closed or detached, or something else that the program put there.
        with contextlib.suppress(Exception):
            file.flush()
