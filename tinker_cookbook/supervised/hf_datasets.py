"""Chat datasets from the Hugging Face Hub or from local copies, and mixtures of them by weight."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import chz
import numpy as np

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.conversation_file import (
    ConversationRows,
    FromConversationFileBuilder,
    chat_dataset,
    held_out_mask,
    naming,
    prompts_of,
    split_rows,
)
from tinker_cookbook.supervised.json_files import (
    SUFFIXES,
    file_rows,
    load_local_rows,
    local_files,
    local_splits,
)
from tinker_cookbook.supervised.row_datasets import Rows
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.terminal import print_line

if TYPE_CHECKING:
    import datasets
    from datasets import Dataset

_MESSAGES = "messages"
_PROBE_SECONDS = 5.0
_offline_lock = threading.Lock()
_ADVICE = "Give your own conversations with dataset_path=FILE.jsonl"


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
            f"{key}: there is no file or folder {Path(path).expanduser()}; expected one, or a Hub "
            "name such as HuggingFaceH4/no_robots"
        )


def load_hf_splits(path: str, name: str | None = None, instead: str = _ADVICE) -> dict[str, Rows]:
    """Returns all splits of a Hub dataset; errors as ``load_hf_dataset``."""
    return dict(_from_hub(path, None, name, instead))


def _from_hub(path: str, split: str | None, name: str | None, instead: str) -> Any:
    """Returns a split of a Hub dataset, or all of them by name."""
    import datasets

    # Check first, because datasets would retry for half a minute.
    unreachable = why_hub_is_unreachable()
    try:
        with nullcontext() if unreachable is None else offline():
            return datasets.load_dataset(path, name=name, split=split)
    except Exception as error:  # datasets raises a dozen types for "not found" and "offline"
        if unreachable is None:
            raise DataError(
                f"dataset: {path!r}{f' (split {split!r})' if split else ''} cannot be loaded: "
                f"{str(error).splitlines()[0]}"
            ) from error
        advice = instead and (
            f". {instead}, put a copy of the dataset into a folder and name the folder, or connect "
            "to the Hub once"
        )
        raise DataError(
            f"dataset: {path!r} is not in the local cache, and the Hub cannot be reached "
            f"({unreachable}){advice}"
        ) from error


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
        return datasets.load_dataset(path, name=name, split=split, streaming=True)
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
        self.common_config.check()
        batch_size = self.common_config.batch_size
        train, test = load_hf_dataset(self.path, "train"), load_hf_dataset(self.path, "test")
        return (
            chat_dataset(self, train, batch_size, message_field=_MESSAGES),
            chat_dataset(self, test, min(batch_size, len(test)), message_field=_MESSAGES),
        )

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the prompts of the first ``n`` conversations of the test split."""
        test = load_hf_dataset(self.path, "test")
        return prompts_of((test[i][_MESSAGES] for i in range(len(test))), n)


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
            raise DataValidationError(
                f"{key}: {self.file_path} has no split train; expected one, or a single file"
            )
        if self.test_file_path is not None:
            # A separate test dataset may have its rows in any split.
            test = self._load(self.test_file_path, test_key, (*_TEST, *_TRAIN))
        elif self.test_size:
            return self._hold_out(train)
        else:
            test = self._load(self.file_path, key, _TEST)
        return train, [] if test is None else test

    def _hold_out(self, train: Rows) -> tuple[Rows, Rows]:
        if not isinstance(train, ConversationRows):
            rows = [train[i] for i in range(len(train))]
            return split_rows(rows, self.test_size, self.shuffle_seed, self.file_path)
        mask = held_out_mask(len(train), self.test_size, self.shuffle_seed, self.file_path)
        return train.take(~mask), train.take(mask)

    def _load(self, path: str, key: str, wanted: tuple[str, ...]) -> Rows | None:
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
                return [row for file in files for row in self._read(str(file), key)]
            table: Rows = load_local_rows(local, chosen)
        else:
            name, _, configuration = path.partition(":")
            _check_hub_name(path, key)
            hub = self._hub_splits.get(path)
            if hub is None:
                hub = load_hf_splits(name, configuration or None)
                self._hub_splits[path] = hub
            chosen = _choose(hub, wanted)
            if chosen is None:
                return None
            table = hub[chosen]
        with naming(key):
            rows = ConversationRows(table, f"{path} ({chosen})", lambda: self.renderer)
        print_line(f"{key}: {rows.columns.line(f'{path} ({chosen})')}")
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


StoppingStrategy = Literal["all_exhausted", "first_exhausted", "all_exhausted_without_replacement"]
"""When an epoch ends: when every source is exhausted (small ones repeat), when the first one is, or
when every row was used exactly once."""


@chz.chz
class HFDatasetSource:
    """Source dataset of a mixture."""

    path: str = chz.field(doc="Hub name, or local folder or file (json, jsonl, parquet)")
    name: str | None = chz.field(default=None, doc="Named configuration of the Hub dataset")
    split: str = chz.field(default="train", doc="Split to read")
    weight: float | None = chz.field(
        default=None, doc="Sampling weight relative to the others; None for all: by their sizes"
    )
    message_field: str = chz.field(default=_MESSAGES, doc="Field with the conversation")


class _MixedRows:
    """Conversations of several sources, in the order given by a dataset of (source, row) numbers.

    Rows of JSON files may have different columns, which Arrow cannot represent, so their numbers
    are mixed instead.
    """

    def __init__(self, rows_K: list[Rows], fields_K: list[str], numbers: Dataset) -> None:
        self._rows_K, self._fields_K, self._numbers = rows_K, fields_K, numbers

    def data_sources(self) -> dict[str, Any]:
        return {f"sources[{k}]": rows for k, rows in enumerate(self._rows_K)}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        number = self._numbers[index]
        source = number["source"]
        row, field = self._rows_K[source][number["row"]], self._fields_K[source]
        if field not in row:
            raise DataFormatError(
                f"sources[{source}].message_field: got {field!r}, expected one of the row's "
                f"fields: {', '.join(row)}"
            )
        return {_MESSAGES: row[field]}


@chz.chz
class InterleavedChatDatasetBuilder(ChatDatasetBuilder):
    """A mixture of sources.

    Each row of the mixture comes from source k with probability ``weight[k] / sum(weights)``, and
    is the next row of that source. Without weights, all rows of all sources are equally probable.
    ``test_size`` rows are held out before mixing, so that none of them is trained on if a small
    source repeats; every source with a positive weight keeps a row to train on.
    """

    sources: list[HFDatasetSource] = chz.field(doc="Datasets to mix")
    test_size: int = chz.field(default=0, doc="Conversations to hold out")
    shuffle_seed: int = chz.field(default=0, doc="Seed of the mixture and of the held-out part")
    stopping_strategy: StoppingStrategy = chz.field(
        default="all_exhausted",
        doc="all_exhausted (small sources repeat), first_exhausted, or "
        "all_exhausted_without_replacement",
    )

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Returns the mixture and the test set; the held-out rows are one batch."""
        self.common_config.check()
        train, test = self._mixtures
        train_set = chat_dataset(self, train, self.common_config.batch_size, _MESSAGES)
        test_set = None if test is None else chat_dataset(self, test, len(test), _MESSAGES)
        return train_set, test_set

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the prompts of the first ``n`` held-out conversations."""
        test = self._mixtures[1]
        return prompts_of((test[i][_MESSAGES] for i in range(len(test))), n) if test else []

    @cached_property
    def _mixtures(self) -> tuple[Rows, Rows | None]:
        """Training rows and held-out rows."""
        import datasets

        # Check the weights before any source is loaded.
        weights_K = self._given_weights()
        rows_K = [load_hf_dataset(s.path, s.split, s.name) for s in self.sources]
        fields_K = [source.message_field for source in self.sources]
        # Do not read the other columns of a table.
        rows_K = [
            rows.select_columns([field])
            if isinstance(rows, datasets.Dataset) and field in rows.column_names
            else rows
            for rows, field in zip(rows_K, fields_K, strict=True)
        ]
        # Mix numbers instead of rows, because rows may have different columns (see _MixedRows).
        numbers_K = [
            datasets.Dataset.from_dict(
                {"source": np.full(len(rows), k), "row": np.arange(len(rows))}
            )
            for k, rows in enumerate(rows_K)
        ]
        effective_K = _weights_or_sizes(numbers_K, weights_K)
        if not any(effective_K):
            raise ConfigurationError(
                "sources: the total weight must be positive; got "
                f"{', '.join(map(str, effective_K))}. Give a source with rows a positive weight"
            )
        test = None
        # Hold out before mixing, because a row of a small source may occur twice in the mixture.
        if self.test_size > 0:
            numbers_K, weights_K, held_out = hold_out(
                numbers_K, weights_K, self.test_size, self.shuffle_seed
            )
            test = _MixedRows(rows_K, fields_K, held_out)
            # Sources with weight 0 are removed, and the others are smaller now.
            effective_K = _weights_or_sizes(numbers_K, weights_K)
        train = datasets.interleave_datasets(
            numbers_K,
            probabilities=[weight / math.fsum(effective_K) for weight in effective_K],
            seed=self.shuffle_seed,
            stopping_strategy=self.stopping_strategy,
        )
        return _MixedRows(rows_K, fields_K, train), test

    def _given_weights(self) -> list[float] | None:
        """Returns the weights of all sources; None if they are mixed by size."""
        if not self.sources:
            raise ConfigurationError(
                "sources: got none. At least one dataset source must be provided"
            )
        given = [source.weight for source in self.sources if source.weight is not None]
        if not given:
            return None
        if len(given) < len(self.sources):
            raise ConfigurationError(
                "sources: got a weight for some of them. Either all sources must have explicit "
                "weights or none of them"
            )
        for k, weight in enumerate(given):
            if not (weight >= 0 and math.isfinite(weight)):
                raise ConfigurationError(
                    f"sources[{k}].weight: got {weight}, expected a finite and non-negative number"
                )
        return given


def hold_out(
    sources_K: Sequence[Dataset], weights_K: list[float] | None, test_size: int, seed: int
) -> tuple[list[Dataset], list[float] | None, Dataset]:
    """Holds out ``test_size`` rows of the sources, without replacement.

    A row comes from source k with a probability proportional to ``weights_K[k]``, or, without
    weights, to the rows that source k still has. A source keeps at least one row, so that training
    sees each source. Sources with weight 0 are in neither part. Returns the sources without these
    rows (shuffled), their weights, and the held-out rows.
    """
    import datasets

    effective_K = _weights_or_sizes(sources_K, weights_K)
    sizes_K = np.array([len(source) for source in sources_K])
    for k, (size, weight) in enumerate(zip(sizes_K, effective_K, strict=True)):
        if weight > 0 and size == 0:
            raise ConfigurationError(
                f"sources[{k}]: got an empty positively weighted source; leave it out"
            )
    # Every source with a positive weight keeps a row to train on.
    capacity_K = np.where(np.array(effective_K) > 0, sizes_K - 1, 0)
    most = int(capacity_K.sum())
    if test_size > most:
        raise ConfigurationError(
            f"test_size: got {test_size}, expected at most {most}, the maximum unique holdout size "
            f"({most}); test_size beyond it is impossible while retaining one training row of each "
            "source"
        )
    rng = np.random.default_rng(seed)
    left_K = sizes_K.copy()
    for _ in range(test_size):
        # Sources without spare rows have probability 0.
        share_K = np.where(capacity_K > 0, left_K if weights_K is None else weights_K, 0.0)
        chosen = rng.choice(len(sources_K), p=share_K / share_K.sum())
        capacity_K[chosen] -= 1
        left_K[chosen] -= 1
    kept, test = [], []
    for source, left, size, weight in zip(sources_K, left_K, sizes_K, effective_K, strict=True):
        if weight > 0:
            # Shuffle each source, so that its first rows are a random choice.
            shuffled = source.shuffle(seed=int(rng.integers(2**32)))
            test.append(shuffled.take(int(size - left)))
            kept.append(shuffled.skip(int(size - left)))
    remaining = None if weights_K is None else [weight for weight in weights_K if weight > 0]
    held_out = datasets.concatenate_datasets([part for part in test if len(part)])
    # The parts are concatenated source by source, so shuffle the rows again.
    return kept, remaining, held_out.shuffle(seed=seed)


def _weights_or_sizes(
    sources_K: Sequence[Dataset], weights_K: Sequence[float] | None
) -> list[float]:
    return [float(len(s)) for s in sources_K] if weights_K is None else list(weights_K)
