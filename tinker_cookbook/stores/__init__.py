"""The stores of the official cookbook, by their names there."""

# Official names are lazy, so a type checker does not see them.
# pyright: reportUnsupportedDunderAll=false
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

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
