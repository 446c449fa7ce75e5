"""What benchmarks share: prompts, ids, loading of data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import DataError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import datasets
    from datasets import Dataset
else:
    datasets = lazy_module("datasets")


def build_messages(user_content: str, system_prompt: str | None = None) -> list[Message]:
    """Returns a user message, after a system message if there is a prompt."""
    system = [Message(role="system", content=system_prompt)] if system_prompt else []
    return [*system, Message(role="user", content=user_content)]


def decode_response(action: list[int], renderer: Renderer) -> str:
    """Returns the text of sampled tokens, without thinking."""
    return get_text_content(renderer.parse_response(action)[0])


def make_example_id(prefix: str, seed_text: str) -> str:
    """Returns ``PREFIX_`` and 12 hexadecimal digits of the MD5 hash of ``seed_text``."""
    return f"{prefix}_{hashlib.md5(seed_text.encode(), usedforsecurity=False).hexdigest()[:12]}"


def limit_dataset(
    ds: Dataset, max_examples: int | None, shuffle_seed: int | None = None
) -> Dataset:
    """Returns the first ``max_examples`` rows, after a shuffle if there is a seed."""
    if shuffle_seed is not None:
        ds = ds.shuffle(seed=shuffle_seed)
    return ds if max_examples is None else ds.select(range(min(max_examples, len(ds))))


def load_benchmark_dataset(
    path: str,
    name: str | None = None,
    split: str = "test",
    trust_remote_code: bool | None = None,
) -> Dataset:
    """Loads a split of a Hub dataset; a ``path`` on this machine is loaded without the network.

    Raises:
        DataError: the dataset cannot be loaded; the message says how to use a local copy.
    """
    options: dict[str, Any] = (
        {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}
    )
    try:
        return datasets.load_dataset(path, name, split=split, **options)  # type: ignore[no-any-return]
    except Exception as error:
        hint = "" if Path(path).exists() else "; data_path= reads a local copy"
        raise DataError(f"{path} ({split}): cannot be loaded: {error}{hint}") from error
