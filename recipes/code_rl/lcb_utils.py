"""Prompts of programming problems, in the style of LiveCodeBench."""

from __future__ import annotations

LCB_SYSTEM_MESSAGE_GENERIC = (
    "Solve the programming problem below in Python. The program is run on tests that you do not "
    "see, so it must follow the specification in every detail."
)
LCB_FORMATTING_MESSAGE_WITH_STARTER_CODE = (
    "Complete this code. Put the whole solution into one fenced code block."
)
LCB_FORMATTING_WITHOUT_STARTER_CODE = (
    "The program reads its input from standard input and prints the answer. Do not test it on the "
    "examples. Put the whole program into one fenced code block."
)

_STAR_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
# What LiveCodeBench runs before each program: starter code, in the style of LeetCode, presupposes
# it. The built-in functions come last, since modules have others of their names, such as pow.
LCB_PREAMBLE = "\n".join(
    [
        *(f"from {name} import *" for name in (*_STAR_MODULES, "builtins", "typing")),
        f"import {', '.join(_STAR_MODULES)}",
        "sys.setrecursionlimit(600_000)",
    ]
)


def fetch_live_code_bench_system_prompt(prompt: str, starter_code: str | None = None) -> str:
    """Returns the text of a problem with the form of the answer: a fenced block of Python code."""
    if starter_code:
        form = f"{LCB_FORMATTING_MESSAGE_WITH_STARTER_CODE}\n```python\n{starter_code}\n```"
    else:
        form = f"{LCB_FORMATTING_WITHOUT_STARTER_CODE}\n```python\n# your code\n```"
    return f"{LCB_SYSTEM_MESSAGE_GENERIC}\n\n{prompt}\n\n{form}\n"
