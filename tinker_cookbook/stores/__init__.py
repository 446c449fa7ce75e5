"""Stores: files of training runs and evaluations, on this machine or in cloud storage."""

# Official names are lazy, so a type checker does not see them.
# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.stores.storage import LocalStorage, Storage, StorageStat, storage_join
from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.stores.eval_store import EvalStore, RunMetadata

__all__ = [
    "AsyncStorage",
    "EvalStore",
    "FsspecStorage",
    "IncrementalReader",
    "LocalStorage",
    "RunInfo",
    "RunMetadata",
    "RunRegistry",
    "Storage",
    "StorageStat",
    "TrainingRunStore",
    "storage_from_uri",
    "storage_join",
]

_EVAL_STORE = "tinker_cookbook.stores.eval_store"  # imports all benchmarks

__getattr__ = lazy_exports(__name__, {"EvalStore": _EVAL_STORE, "RunMetadata": _EVAL_STORE})
