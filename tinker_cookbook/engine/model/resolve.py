"""Finds the folder of a model: a local folder, the Hub cache, the Hub, or a registered package.

A name is spelled as on the Hub (``Qwen/Qwen3-8B``) or is a local folder in transformers format.
Copies that this package makes itself lie under ``models_dir()``.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinker_cookbook.engine.home import models_dir
from tinker_cookbook.engine.model.packaged import PackagedModel, packaged_model
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    ModelNotFoundError,
    WeightsDownloadError,
    nearest,
)

Need = Literal["model", "tokenizer", "config"]
Source = Literal["local folder", "hub cache", "download", "demo package"]

_HUB_TIMEOUT_SECONDS = 5.0  # an offline machine shall say so in seconds
_WELL_KNOWN = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-Base",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
)

# One of each group makes a part complete; a "+" joins files that are needed together.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json+merges.txt",
    "tiktoken.model",
    "tekken.json",
)
_CACHE_PROBES = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model")
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NEVER_FETCHED = ("*.index.json",)  # comes with the weights that it lists


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model lies and where it came from."""

    name: str
    """The name as it was asked for, without a ``:peft:…`` suffix."""
    folder: Path
    source: Source
    note: str
    """A sentence for the person who starts the run."""


_ELSEWHERE = (
    ". If a server on another machine serves this folder, copy the tokenizer's files to the same "
    "path here"
)


def base_name(name: str) -> str:
    """Drops the ``:peft:…`` suffix with which the hosted API marks a context length."""
    return name.split(":peft:", 1)[0]


def resolve_model(name: str, *, allow_download: bool = True, need: Need = "model") -> ResolvedModel:
    """Finds ``name`` as a local folder, in the Hub cache, on the Hub, or in a registered package.

    Args:
        name: Hub name or path of a folder; a ``:peft:…`` suffix is ignored.
        allow_download: with ``False`` nothing is fetched.
        need: ``"model"`` wants config, weights and tokenizer; ``"tokenizer"`` and ``"config"``
            want (and download) only that much.

    Raises:
        ModelNotFoundError: names each place that was tried, and the next step.
    """
    name = base_name(name).strip()
    local = Path(name).expanduser()
    if name and local.is_dir():
        return ResolvedModel(name, _checked_folder(local, need), "local folder", f"folder {local}")
    if not _is_hub_name(name):
        raise ModelNotFoundError(
            f"model_name: got {name!r}, which is neither an existing folder nor a Hub name of the "
            "form 'organization/model'; give the path of a folder in transformers format, or one "
            f"of: {', '.join(_WELL_KNOWN[:1] + _WELL_KNOWN[3:7])}, …"
            + nearest(name, _WELL_KNOWN)
            + (_ELSEWHERE if need == "tokenizer" and local.is_absolute() else "")
        )
    tried = [f"folder {name}: does not exist"]
    found = _from_hub_cache(name, need, tried) or _from_models_dir(name)
    if found is None and allow_download:
        found = _from_hub(name, need, tried) or _from_package(name, tried)
    if found is None:
        raise ModelNotFoundError(_not_found(name, tried, allow_download))
    return found


# Small ranks are never refused: a run on a tiny model may have the settings of a large one.
_RANK_ALWAYS_ALLOWED = 256


def check_rank(rank: int, largest: int, setting: str = "rank") -> None:
    """Refuses a rank at which an adapter has more parameters than the layer that it changes.

    Args:
        rank: What was asked for.
        largest: The smaller side (inputs or outputs) of the layer where that is largest. The
            product B A of an adapter cannot have a higher rank.
        setting: Name of the setting, for the message.
    """
    limit = max(largest, _RANK_ALWAYS_ALLOWED)
    if rank > limit:
        raise ConfigurationError(
            f"{setting}: got {rank}, expected at most {limit}; the layers of this model have a "
            f"rank of at most {largest}, so a larger adapter cannot learn more. 8 to 128 is usual"
        )


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Width of the model that a ``config.json`` describes: one side of all its linear layers."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(place.get(name), int):
                return place[name]
    return None


def model_config(folder: Path | str) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder.

    Raises:
        DataFormatError: the file is missing or is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataFormatError(
            f"{path}: cannot be read as a model configuration: {error}"
        ) from error
    if not isinstance(config, dict):
        raise DataFormatError(f"{path}: got {type(config).__name__}, expected a JSON object")
    return config


def missing_parts(folder: Path, need: Need = "model") -> list[str]:
    """Names what ``folder`` lacks to be loaded: config, weights (each shard), tokenizer."""
    missing = []
    if need != "tokenizer" and not (folder / "config.json").is_file():
        missing.append("config.json")
    if need == "model":
        missing += _missing_weights(folder)
    if need != "config" and not any(
        all((folder / file).is_file() for file in group.split("+")) for group in _TOKENIZER_FILES
    ):
        missing.append("a tokenizer (" + " or ".join(_TOKENIZER_FILES[:3]) + ")")
    return missing


def _missing_weights(folder: Path) -> list[str]:
    present = next((file for file in _WEIGHT_FILES if (folder / file).is_file()), None)
    if present is None:
        return ["weights (model.safetensors, or shards with model.safetensors.index.json)"]
    if not present.endswith(".index.json"):
        return []
    try:
        shards = set(
            json.loads((folder / present).read_text(encoding="utf-8"))["weight_map"].values()
        )
    except (ValueError, KeyError, AttributeError):
        return [f"a readable {present}"]
    return sorted(shard for shard in shards if not (folder / shard).is_file())


def _checked_folder(folder: Path, need: Need) -> Path:
    missing = missing_parts(folder, need)
    if not missing:
        return folder.resolve()
    if (folder / "adapter_config.json").is_file():
        raise ModelNotFoundError(
            f"model_name: {folder} holds a LoRA adapter, not a model; give the base model as "
            "model_name and load the adapter as a checkpoint"
        )
    raise ModelNotFoundError(
        f"model_name: folder {folder} is not a complete model in transformers format; missing: "
        f"{', '.join(missing)}; save the model with save_pretrained() and its tokenizer beside it"
    )


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/"))


def _from_hub_cache(name: str, need: Need, tried: list[str]) -> ResolvedModel | None:
    from huggingface_hub import try_to_load_from_cache

    # Not snapshot_download(local_files_only=True): that takes a copy for broken which was fetched
    # without the repository's other weight formats.
    cached = (try_to_load_from_cache(name, file) for file in _CACHE_PROBES)
    found = next((path for path in cached if isinstance(path, str)), None)
    if found is None:
        tried.append("Hub cache: no copy")
        return None
    folder = Path(found).parent
    if missing := missing_parts(folder, need):
        tried.append(f"Hub cache: incomplete copy in {folder}; missing: {', '.join(missing)}")
        return None
    return ResolvedModel(name, folder, "hub cache", f"Hub cache {folder}")


def _from_models_dir(name: str) -> ResolvedModel | None:
    # A copy once made goes on being used when the Hub comes back: a resumed run must not find
    # other weights than it started with.
    packaged = packaged_model(name)
    folder = packaged.finished_copy(models_dir()) if packaged else None
    return _copy(name, packaged, folder) if packaged and folder else None


def _from_package(name: str, tried: list[str]) -> ResolvedModel | None:
    packaged = packaged_model(name)
    if packaged is None:
        return None
    try:
        return _copy(name, packaged, packaged.make_copy(models_dir()))
    except (WeightsDownloadError, ConfigurationError) as error:
        tried.append(f"demo package: {error}")
        return None


def _copy(name: str, packaged: PackagedModel, folder: Path) -> ResolvedModel:
    note = f"{packaged.NOTE}; kept in {folder}; delete it to download the original from the Hub"
    return ResolvedModel(name, folder, "demo package", note)


def _from_hub(name: str, need: Need, tried: list[str]) -> ResolvedModel | None:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        tried.append("Hub: not asked, because HF_HUB_OFFLINE is set")
        return None
    try:
        info = HfApi().model_info(name, timeout=_HUB_TIMEOUT_SECONDS)
        files = [sibling.rfilename for sibling in info.siblings or []]
        folder = Path(snapshot_download(name, allow_patterns=_wanted(files, need)))
    except GatedRepoError:
        tried.append("Hub: gated; accept its licence on the model's page and set HF_TOKEN")
        return None
    except RepositoryNotFoundError:
        tried.append("Hub: no such model, or a private one (set HF_TOKEN)")
        return None
    except Exception as error:  # the HTTP client differs between versions of huggingface_hub
        tried.append(f"Hub ({constants.ENDPOINT}): {type(error).__name__}: {_first_line(error)}")
        return None
    if missing := missing_parts(folder, need):
        tried.append(f"Hub: the repository lacks {', '.join(missing)}")
        return None
    return ResolvedModel(name, folder, "download", f"downloaded from the Hub to {folder}")


def _wanted(files: list[str], need: Need) -> list[str]:
    """Of a repository's files those that loading needs: one weight format, no subfolders."""
    top = [file for file in files if "/" not in file]
    if need == "config":
        return [file for file in top if file == "config.json"]
    small = [file for file in top if _matches(file, _SMALL_FILES)]
    small = [file for file in small if not _matches(file, _NEVER_FETCHED)]
    if need == "tokenizer":
        return small
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        weights = [file for file in top if _matches(file, (pattern, f"{pattern}.index.json"))]
        if weights:
            return small + weights
    return small


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no further word"])[0]


def _not_found(name: str, tried: list[str], allow_download: bool) -> str:
    steps = (
        "Next step: give the path of a folder in transformers format, or run once where the Hub "
        "can be reached (HF_TOKEN for gated models)"
    )
    if not allow_download:
        steps = "Downloading was not allowed here. " + steps
    listed = "".join(f"\n  - {attempt}" for attempt in tried)
    hint = "" if name in _WELL_KNOWN else nearest(name, _WELL_KNOWN)
    return f"model {name!r} was not found{hint}\nTried:{listed}\n{steps}."
