"""Chat datasets from the Hugging Face Hub or from local copies, and mixtures of them by weight."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import chz

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataValidationError,
)
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.arrow_rows import stream_without_nulls, without_arrow_nulls
from tinker_cookbook.supervised.conversation_file import (
    ConversationRows,
    FromConversationFileBuilder,
    naming,
)
from tinker_cookbook.supervised.json_files import (
    SUFFIXES,
    file_rows,
    load_local_rows,
    local_files,
    local_splits,
)
from tinker_cookbook.supervised.row_datasets import PlacedRows, Rows
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.terminal import print_line

if TYPE_CHECKING:
    import datasets

_PROBE_SECONDS = 5.0
_offline_lock = threading.Lock()
_ADVICE = "Give a copy of it, or conversations of your own, with dataset=FILE or dataset=FOLDER"


def load_hf_dataset(path: str, split: str, name: str | None = None, instead: str = _ADVICE) -> Rows:
    """Returns a split of a Hub dataset or local folder, or a local json, jsonl or parquet file.

    JSON rows are not unified into columns. If the Hub cannot be reached, its cache is used;
    without a cached copy, DataError is raised within seconds, with the advice ``instead`` if any.
    """
    local = Path(path).expanduser()
    if local.exists():
        if name is not None:
            raise DataValidationError(
                f"name: got {name!r}, but {local} is a local path, which has no named "
                "configurations; give the path of one configuration"
            )
        # Local data are never looked up on the Hub.
        return load_local_rows(local, split)
    _check_hub_name(path)
    return _from_hub(path, split, name, instead)


def _check_hub_name(path: str, key: str = "dataset") -> None:
    """Raises DataValidationError for a missing path that is not a Hub name."""
    # A Hub name has at most one slash and no file suffix.
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(SUFFIXES):
        raise DataValidationError(
            f"{key}: there is no file or folder {Path(path).expanduser()} (searched from "
            f"{Path.cwd()}); expected one, or a Hub name such as HuggingFaceH4/no_robots"
        )


def load_hf_splits(path: str, name: str | None = None, instead: str = _ADVICE) -> dict[str, Rows]:
    """Returns all splits of a Hub dataset; errors as ``load_hf_dataset``."""
    return _from_hub(path, None, name, instead)


def _from_hub(path: str, split: str | None, name: str | None, instead: str) -> Any:
    """Returns a split of a Hub dataset, or all of them by name."""
    import datasets

    # Check first, because datasets would retry for half a minute.
    unreachable = why_hub_is_unreachable()
    try:
        with nullcontext() if unreachable is None else offline():
            found: Any = datasets.load_dataset(path, name=name, split=split)
    except Exception as error:  # datasets raises a dozen types for "not found" and "offline"
        if unreachable is None:
            raise DataError(
                f"dataset: {path!r}{f' (split {split!r})' if split else ''} cannot be loaded: "
                f"{str(error).splitlines()[0]}"
            ) from error
        advice = instead and f". {instead}, or connect to the Hub once"
        raise DataError(
            f"dataset: {path!r} is not in the local cache, and the Hub cannot be reached "
            f"({unreachable}){advice}"
        ) from error
    if split is not None:
        return without_arrow_nulls(found)
    return {name: without_arrow_nulls(rows) for name, rows in found.items()}


def stream_hf_dataset(path: str, split: str, name: str | None = None) -> datasets.IterableDataset:
    """Returns a split as a stream: of a Hub dataset, a local folder, or a local file.

    For datasets that are too large to download or to hold in memory. Local JSON lines, CSV and
    parquet files are read row by row and are not unified into columns.
    """
    import datasets

    local = Path(path).expanduser()
    if local.exists():
        files = [str(file) for file in local_files(local, split)]
        return cast(
            "datasets.IterableDataset",
            datasets.IterableDataset.from_generator(_rows_of_files, gen_kwargs={"files": files}),
        )
    _check_hub_name(path)
    # A stream is read from the Hub, so raise immediately if the Hub is unreachable.
    unreachable = why_hub_is_unreachable()
    if unreachable is not None:
        raise DataError(
            f"dataset: {path!r} is streamed from the Hub, which cannot be reached ({unreachable}). "
            f"{_ADVICE}, or connect to the Hub"
        )
    try:
        stream = datasets.load_dataset(path, name=name, split=split, streaming=True)
        return stream_without_nulls(stream)
    except Exception as error:  # datasets raises a dozen types for "not found"
        raise DataError(
            f"dataset: {path!r} (split {split!r}) cannot be streamed: {str(error).splitlines()[0]}"
        ) from error


def _rows_of_files(files: list[str]) -> Iterator[Any]:
    for file in files:
        for _, row in file_rows(Path(file)):
            yield row


def why_hub_is_unreachable() -> str | None:
    """Returns why the Hub cannot be reached, or None; sends one short request.

    ``datasets`` itself retries for half a minute.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:  # the HTTP library in use differs between versions
        return f"{constants.ENDPOINT}: {error}"
    return None


@contextmanager
def offline() -> Iterator[None]:
    """Restricts ``datasets`` to its cache. The libraries have no argument for this."""
    from datasets import config
    from huggingface_hub import constants

    # The switches are global, so two threads must not change them at the same time.
    with _offline_lock:
        before = (constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE)
        # datasets and huggingface_hub each read a switch of their own module.
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


@chz.chz
class NoRobotsBuilder(ChatDatasetBuilder):
    """HuggingFaceH4/no_robots: 9,500 instructions and answers, written by humans."""

    path: str = chz.field(
        default="HuggingFaceH4/no_robots", doc="Hub name, or folder of a copy with both splits"
    )

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Returns both splits."""
        return self._data()

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the prompts of the first ``n`` conversations of the test split."""
        return self._data.held_out_prompts(n)

    @cached_property
    def _data(self) -> ChatDataBuilder:
        return ChatDataBuilder(common_config=self.common_config, file_path=self.path)


@chz.chz
class ChatDataBuilder(FromConversationFileBuilder):
    """Training and test data from the Hub, a folder or a file, in any layout (``layouts``).

    ``file_path`` and ``test_file_path`` are Hub names (``NAME`` or ``NAME:CONFIGURATION``), folders
    with a file or files for each split, or files. Without ``test_file_path`` and ``test_size``, the
    test data are the split ``test``, else ``validation``, of the dataset. Tables of the Hub and
    parquet files are read row by row while training; other files are read and checked first.
    """

    @property
    def setting_names(self) -> tuple[str, str]:
        """Names of the two settings in error messages, as on the recipes' command lines."""
        return "dataset", "test_path"

    @cached_property
    def _split(self) -> tuple[Rows, Rows]:
        key, test_key = self.setting_names
        if self.test_file_path is not None and self.test_size:
            raise ConfigurationError(
                f"test_size={self.test_size} and {test_key}={self.test_file_path} both name the "
                "held-out part; leave one out"
            )
        train = self._load(self.file_path, key, _TRAIN)
        if train is None:
            local = Path(self.file_path).expanduser()
            names = ", ".join(local_splits(local) if local.exists() else self._hub_splits)
            raise DataValidationError(
                f"{key}: {self.file_path} has only the splits {names}; expected a split train: "
                "name its file train.jsonl, or give one file"
            )
        if self.test_file_path is not None:
            # A separate test dataset may have its rows in any split.
            test = self._load(self.test_file_path, test_key, (*_TEST, *_TRAIN))
        elif self.test_size:
            return self._hold_out(train)
        else:
            test = self._load(self.file_path, key, _TEST)
        return train, [] if test is None else test

    def _load(
        self, path: str, key: str, wanted: tuple[str, ...]
    ) -> PlacedRows | ConversationRows | None:
        """Returns the first split of ``wanted`` that a dataset has, and prints its columns."""
        local = Path(path).expanduser()
        if local.exists():
            splits = {_TRAIN[0]: [local]} if local.is_file() else local_splits(local)
            if not splits:
                raise DataValidationError(f"{key}: {local} has no file that ends in {_ENDINGS}")
            chosen = _choose(splits, wanted)
            if chosen is None:
                return None
            files = splits[chosen]
            if any(file.suffix != ".parquet" for file in files):
                return PlacedRows.joined([self._read(str(file), key) for file in files])
            table: Rows = load_local_rows(local, chosen)
        else:
            repository, _, configuration = path.partition(":")
            _check_hub_name(path, key)
            hub = self._hub_splits.get(path)
            if hub is None:
                hub = load_hf_splits(repository, configuration or None)
                self._hub_splits[path] = hub
            chosen = _choose(hub, wanted)
            if chosen is None:
                return None
            table = hub[chosen]
        name = path if local.is_file() else f"{path} ({chosen})"
        with naming(key):
            rows = ConversationRows(table, name, lambda: self.renderer)
        print_line(f"{key}: {rows.columns.line(name)}")
        return rows

    @cached_property
    def _hub_splits(self) -> dict[str, dict[str, Rows]]:
        """Splits of the Hub datasets that were loaded, by name."""
        return {}


_TRAIN = ("train",)
_TEST = ("test", "validation", "valid", "dev")
_ENDINGS = ", ".join(SUFFIXES)


def _choose(splits: Mapping[str, Any], wanted: tuple[str, ...]) -> str | None:
    """Returns the first wanted split; ``train_sft`` counts as ``train``."""
    for name in wanted:
        begins = [split for split in splits if split.startswith(f"{name}_")]
        for found in (name, f"{name}_sft", *(begins if len(begins) == 1 else ())):
            if found in splits:
                return found
    # If there is only one split, use it, whatever its name.
    return next(iter(splits)) if len(splits) == 1 and _TRAIN[0] in wanted else None
