"""Helpers of benchmarks for user code (``eval.benchmarks._common``)."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from tinker_cookbook.eval.benchmarks.data import build_messages, load_hub_rows, make_example_id
from tinker_cookbook.eval.benchmarks.instructions import parse_kwargs
from tinker_cookbook.eval.run.types import BenchmarkConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.grading.letters import extract_mcq_answer
from tinker_cookbook.grading.numbers import check_gsm8k, extract_gsm8k_answer, extract_number
from tinker_cookbook.grading.texts import extract_boxed, extract_final_answer, split_thinking
from tinker_cookbook.renderers import Renderer, get_text_content
from tinker_cookbook.sandbox.program_text import code_blocks, parse_program

if TYPE_CHECKING:
    from datasets import Dataset


__all__ = [
    "SandboxMixin",
    "build_messages",
    "check_gsm8k",
    "decode_response",
    "extract_boxed",
    "extract_command",
    "extract_final_answer",
    "extract_gsm8k_answer",
    "extract_mcq_answer",
    "extract_number",
    "extract_python_code",
    "format_mcq_choices",
    "get_sandbox_factory",
    "is_task_complete",
    "limit_dataset",
    "load_benchmark_dataset",
    "make_example_id",
    "parse_kwargs",
]


def format_mcq_choices(choices: list[str]) -> str:
    """Returns one line for each choice: ``(A) first``, ``(B) second``, …"""
    return "\n".join(f"({chr(ord('A') + i)}) {choice}" for i, choice in enumerate(choices))


def decode_response(action: list[int], renderer: Renderer) -> str:
    """Returns the text of sampled tokens, without thinking."""
    return split_thinking(get_text_content(renderer.parse_response(action)[0]))[0]


def limit_dataset(
    ds: Dataset, max_examples: int | None, shuffle_seed: int | None = None
) -> Dataset:
    """Returns the first ``max_examples`` rows, after a shuffle if there is a seed; None is all."""
    if max_examples is None:
        return ds
    if shuffle_seed is not None:
        ds = ds.shuffle(seed=shuffle_seed)
    return ds.select(range(min(max_examples, len(ds))))


def load_benchmark_dataset(
    path: str,
    name: str | None = None,
    split: str = "test",
    trust_remote_code: bool | None = None,
) -> Dataset:
    """Loads a split of a Hub dataset, or its cached copy if the Hub cannot be reached.

    ``trust_remote_code`` is accepted and ignored: current versions of ``datasets`` never run code
    of a data set.

    Raises:
        DataError: the dataset cannot be loaded; the message explains how to use a local copy, and
            how to get access to a gated dataset.
    """
    rows = load_hub_rows(path, split, name)
    from datasets import Dataset  # takes seconds

    return Dataset.from_list(rows)


def extract_command(text: str) -> str | None:
    """Returns the shell command of a response, or None.

    It is the content of the first block with a shell tag, else of the first block without a
    tag that begins neither like Python nor like JSON or XML.
    """
    blocks = re.findall(r"^```[ \t]*(\w*)[^\n]*\n(.*?)\n?^```", text, re.DOTALL | re.MULTILINE)
    for tag, code in blocks:
        if tag.lower() in ("bash", "sh", "shell"):
            return code.strip()
    foreign = re.compile(r"[{\[<]|(?:def|class|import|from)\s")
    plain = (code.strip() for tag, code in blocks if not tag)
    return next((code for code in plain if code and not foreign.match(code)), None)


def is_task_complete(text: str) -> bool:
    """Returns whether a response contains TASK_COMPLETE or "task complete", in any case."""
    return re.search(r"task[_ ]complete", text, re.IGNORECASE) is not None


def get_sandbox_factory(config: BenchmarkConfig, *, packages: list[str] | None = None) -> object:
    """Returns ``config.sandbox_factory``; default: ``LocalSandbox.create``.

    Raises:
        ConfigurationError: it is not set, but ``packages`` must be installed in the sandbox.
    """
    if config.sandbox_factory is not None:
        return config.sandbox_factory
    if packages:
        raise ConfigurationError(
            "sandbox_factory: got None, expected a function that makes a sandbox with the packages "
            f"{', '.join(packages)}; the local sandbox installs none"
        )
    from tinker_cookbook.sandbox import LocalSandbox

    return LocalSandbox.create


class SandboxMixin:
    """Cleans up the sandbox of an environment, once."""

    sandbox: Any = None
    _cleaned_up: bool = False

    async def cleanup(self) -> None:
        """Cleans up the sandbox; later calls do nothing."""
        if self.sandbox is None or self._cleaned_up:
            return
        self._cleaned_up = True
        await self.sandbox.cleanup()


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
