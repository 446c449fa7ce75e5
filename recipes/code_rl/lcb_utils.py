"""Prompts of programming problems: LiveCodeBench's texts, which published DeepCoder runs have."""

from __future__ import annotations

LCB_SYSTEM_MESSAGE_GENERIC = (
    "You are an expert Python programmer. You will be given a question (problem "
    "specification) and will generate a correct Python program that matches the "
    "specification and passes all tests."
)
LCB_FORMATTING_MESSAGE_WITH_STARTER_CODE = (
    "You will use the following starter code to write the solution to the problem and "
    "enclose your code within delimiters."
)
LCB_FORMATTING_WITHOUT_STARTER_CODE = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not "
    "directly test on the sample inputs). Enclose your code within delimiters as follows. "
    "Ensure that when the python program runs, it reads the inputs, runs the algorithm and "
    "writes output to STDOUT."
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
    code = starter_code or "# YOUR CODE HERE"
    how = (
        LCB_FORMATTING_MESSAGE_WITH_STARTER_CODE
        if starter_code
        else LCB_FORMATTING_WITHOUT_STARTER_CODE
    )
    # Nothing separates the problem from the heading: the format of the official cookbook.
    return (
        f"{LCB_SYSTEM_MESSAGE_GENERIC}\n\n{prompt}### Format: {how}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
