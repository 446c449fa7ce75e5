"""Tasks of ``inspect_evals`` without a network: local copies of data sets, and IFEval's checks."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataError, DataValidationError
from tinker_cookbook.supervised.hf_datasets import offline, why_hub_is_unreachable

logger = logging.getLogger(__name__)

_CHECKS = "instruction_following_eval"


@contextmanager
def local_data(data_path: str | None) -> Iterator[None]:
    """Makes tasks inside the block read Hub data sets from copies in ``data_path``, if any.

    If a data set is neither there nor in the Hub's cache, a DataError is raised within seconds when
    the Hub cannot be reached; ``inspect_evals`` itself waits for minutes. Tasks of IFEval get their
    checks from ``if_verifiable`` if ``instruction_following_eval``, which PyPI does not have, is
    not installed.
    """
    import datasets

    folder = None if data_path is None else Path(data_path).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"data_path: got {data_path}, expected a folder")
    original: Any = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        copy = None if folder is None else find_copy(folder, path)
        if copy is not None:
            return _load_copy(original, copy, path, name, options)
        # Local folders and formats such as "json" need no Hub.
        if "/" not in path or Path(path).exists() or (reason := why_hub_is_unreachable()) is None:
            return original(path, name, **options)
        try:
            with offline():
                return original(path, name, **options)
        except Exception as error:  # datasets raises a dozen types for "not found"
            where = f" and not in data_path={data_path}" if data_path is not None else ""
            raise DataError(
                f"dataset: {path!r} is not in the Hub's local cache{where}, and the Hub cannot be "
                f"reached ({reason}). Put a copy into a folder and give data_path=FOLDER, with the "
                f"files {path}/SPLIT.jsonl or {path.rpartition('/')[2]}/SPLIT.jsonl in it (or "
                "parquet), or connect to the Hub once"
            ) from error

    # Both packages look up the function in its module when a task is loaded.
    datasets.load_dataset = load
    try:
        with _ifeval_checks():
            yield
    finally:
        datasets.load_dataset = original


def find_copy(folder: Path, path: str) -> Path | None:
    """Returns the copy of a Hub dataset ``OWNER/NAME``: the subfolder of this name, or ``NAME`` in
    any case of its letters."""
    if (exact := folder / path).is_dir():
        return exact
    name = path.rpartition("/")[2].lower()
    found = sorted(sub for sub in folder.iterdir() if sub.is_dir() and sub.name.lower() == name)
    return found[0] if found else None


def _load_copy(
    load_dataset: Any, copy: Path, path: str, name: str | None, options: Mapping[str, Any]
) -> Any:
    # In most repositories, named configurations are subfolders; other copies have only one.
    parts = [part for part in (options.get("data_dir"), name) if part and (copy / part).is_dir()]
    source = copy.joinpath(*parts)
    kept = {key: options[key] for key in ("split", "data_files", "streaming") if key in options}
    try:
        loaded = load_dataset(str(source), **kept)
    except Exception as error:  # as above
        raise DataValidationError(
            f"data_path: {source} cannot be read as a copy of {path}"
            f"{f' (split {split})' if (split := kept.get('split')) else ''}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    # Inspect would cache it as the Hub's data, and read that the next time.
    loaded.save_to_disk = lambda *args, **kwargs: None
    return loaded


# --- IFEval --------------------------------------------------------------------------------------


@dataclass
class _Prompt:
    key: Any
    instruction_id_list: list[str]
    prompt: str
    kwargs: Any
    """Arguments by the index of the instruction; text if Inspect read it from a log."""


def _follow(example: _Prompt, response: str, strict: bool = True) -> SimpleNamespace:
    from tinker_cookbook.eval.benchmarks.instructions import follow, whole

    names = example.instruction_id_list
    given = {str(number): values for number, values in dict(example.kwargs).items()}
    kwargs = [
        {key: whole(value) for key, value in given.get(str(i), {}).items()}
        for i in range(len(names))
    ]
    results = follow("ifeval", response, names, kwargs, example.prompt)[0 if strict else 1]
    return SimpleNamespace(follow_instruction_list=results, follow_all_instructions=all(results))


@contextmanager
def _ifeval_checks() -> Iterator[None]:
    """Replaces a missing ``instruction_following_eval.evaluation`` by ``if_verifiable``.

    ``inspect_evals`` imports three names from it; the package itself is only on GitHub.
    """
    if find_spec(_CHECKS) is not None or find_spec("if_verifiable") is None:
        yield
        return
    package, module = ModuleType(_CHECKS), ModuleType(f"{_CHECKS}.evaluation")
    for made in (package, module):
        made.__spec__ = ModuleSpec(made.__name__, None)
        sys.modules[made.__name__] = made
    vars(package)["evaluation"] = module
    vars(module).update(
        InputExample=_Prompt,
        ensure_nltk_resource=lambda: None,
        test_instruction_following=_follow,
    )
    logger.info("IFEval's instructions are checked by if_verifiable; %s is missing", _CHECKS)
    try:
        yield
    finally:
        for made in (package, module):
            del sys.modules[made.__name__]
