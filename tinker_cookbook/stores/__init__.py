"""Stores: evaluations in a folder of files."""

from tinker_cookbook.stores.eval_store import EvalStore, RunMetadata
from tinker_cookbook.stores.storage import LocalStorage, Storage, StorageStat, storage_join

__all__ = ["EvalStore", "LocalStorage", "RunMetadata", "Storage", "StorageStat", "storage_join"]
