"""Chat datasets from the Hugging Face Hub, or from a local copy of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.exceptions import DataError, DataValidationError
from tinker_cookbook.renderers import Message, normalize_messages
from tinker_cookbook.supervised.chat_dataset import chat_dataset
from tinker_cookbook.supervised.conversation_file import prompts_of
from tinker_cookbook.supervised.data import Rows
from tinker_cookbook.supervised.local_rows import SUFFIXES, load_local_rows
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

if TYPE_CHECKING:
    import datasets

_PROBE_SECONDS = 5.0
_offline_lock = threading.Lock()
_INSTEAD = "Give conversations of your own with dataset_path=FILE.jsonl"


def load_hf_dataset(
    path: str, split: str, name: str | None = None, instead: str = _INSTEAD
) -> Rows:
    """A split of a Hub dataset, of a local folder, or a local file (json, jsonl, parquet).

    JSON rows are taken as they are, not unified into columns. Where the Hub cannot be reached, the
    copy in its cache is used; without one DataError says so in seconds, and what to do ``instead``.
    """
    local = Path(path).expanduser()
    if local.exists():
        if name is not None:
            raise DataValidationError(
                f"name: got {name!r}, but {local} is a local path, which has no named "
                "configurations; give the path of the one that you mean"
            )
        return load_local_rows(local, split)
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(SUFFIXES):
        raise DataValidationError(
            f"dataset: there is no file or folder {local}; expected one, or a Hub name such as "
            "HuggingFaceH4/no_robots"
        )
    return _from_hub(path, split, name, instead)


def stream_hf_dataset(path: str, split: str) -> datasets.IterableDataset:
    """A split of a Hub dataset that is read forwards as it arrives, for those too large to fetch.

    Where the Hub cannot be reached DataError says so in seconds.
    """
    import datasets

    unreachable = _why_hub_is_unreachable()
    if unreachable is not None:
        raise DataError(
            f"dataset: {path!r} is streamed from the Hub, which cannot be reached ({unreachable}). "
            "Give conversations of your own with dataset_path=FILE.jsonl, or be online"
        )
    try:
        return datasets.load_dataset(path, split=split, streaming=True)
    except Exception as error:  # datasets raises a dozen types for "not found"
        raise DataError(
            f"dataset: {path!r} (split {split!r}) cannot be streamed: {str(error).splitlines()[0]}"
        ) from error


def _from_hub(path: str, split: str, name: str | None, instead: str) -> Rows:
    import datasets

    unreachable = _why_hub_is_unreachable()
    try:
        if unreachable is None:
            return datasets.load_dataset(path, name=name, split=split)
        with _offline():
            return datasets.load_dataset(path, name=name, split=split)
    except Exception as error:  # datasets raises a dozen types for "not found" and "offline"
        if unreachable is None:
            raise DataError(
                f"dataset: {path!r} (split {split!r}) cannot be loaded: "
                f"{str(error).splitlines()[0]}"
            ) from error
        raise DataError(
            f"dataset: {path!r} is not in the local cache, and the Hub cannot be reached "
            f"({unreachable}). {instead}, put a copy of the dataset into a folder and name the "
            "folder, or be online once"
        ) from error


def _why_hub_is_unreachable() -> str | None:
    """One short try, as ``datasets`` itself goes on retrying for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:  # the HTTP library in use differs between versions
        return f"{constants.ENDPOINT}: {error}"
    return None


@contextmanager
def _offline() -> Iterator[None]:
    """Makes ``datasets`` look into its cache only. The libraries have no argument for this."""
    from datasets import config
    from huggingface_hub import constants

    with _offline_lock:
        before = (constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


@chz.chz
class NoRobotsBuilder(ChatDatasetBuilder):
    """HuggingFaceH4/no_robots: 9,500 instructions and answers written by people."""

    path: str = chz.field(
        default="HuggingFaceH4/no_robots", doc="Hub name, or folder of a copy with both splits"
    )

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Loads both splits."""
        self.common_config.check()
        batch_size = self.common_config.batch_size
        train, test = load_hf_dataset(self.path, "train"), load_hf_dataset(self.path, "test")
        return (
            chat_dataset(self, train, batch_size, message_field="messages"),
            chat_dataset(self, test, min(batch_size, len(test)), message_field="messages"),
        )

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """The first ``n`` conversations of the test split, each up to its last answer."""
        test = load_hf_dataset(self.path, "test")
        rows = (test[i]["messages"] for i in range(len(test)))
        return prompts_of(map(normalize_messages, rows), n)
