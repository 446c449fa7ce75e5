"""Finds the folder of a model: a local folder, the Hub cache, the Hub, or a registered package.

A name is a Hub name (``Qwen/Qwen3-8B``) or a local folder in transformers format. Copies
created by this package are in ``models_dir()``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tinker_cookbook.engine.home import models_dir
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    ModelNotFoundError,
    WeightsDownloadError,
    nearest,
)

Need = Literal["model", "tokenizer", "config"]
Source = Literal["local folder", "hub cache", "download", "demo package"]

_HUB_TIMEOUT_SECONDS = 5.0  # an offline machine should fail within seconds
_RANK_ALWAYS_ALLOWED = 256
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
# A part is complete with one alternative of its group; "+" joins files needed together.
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_WEIGHT_FILES += ("pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json+merges.txt")
_TOKENIZER_FILES += ("tiktoken.model", "tekken.json")
_CACHE_PROBES = ("config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model")
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")

_packaged: dict[str, str] = {}
_names: list[str] = [*_WELL_KNOWN]


def register_packaged_model(name: str, module: str) -> None:
    """Registers a module that makes a local copy of the model ``name``, for use without the Hub.

    The module is imported at its first use. It has ``NOTE`` (describes the copy),
    ``finished_copy(folder)`` (the copy under ``models_dir()``, or ``None``) and
    ``make_copy(folder)``.
    """
    _packaged[name] = module


def register_model_names(names: Iterable[str]) -> None:
    """Registers names of models that exist, so that no other name is suggested for them."""
    _names.extend(names)


@dataclass(frozen=True)
class ResolvedModel:
    """Folder of a model, and its source."""

    name: str
    """The requested name, without a ``:peft:…`` suffix."""
    folder: Path
    source: Source
    note: str
    """A sentence about the source, for the log."""


def base_name(name: str) -> str:
    """Removes the ``:peft:…`` suffix, by which the hosted API marks a context length."""
    return name.split(":peft:", 1)[0]


def resolve_model(name: str, *, allow_download: bool = True, need: Need = "model") -> ResolvedModel:
    """Finds ``name`` as a local folder, in the Hub cache, on the Hub, or in a registered package.

    Args:
        name: Hub name or path of a folder; a ``:peft:…`` suffix is ignored.
        allow_download: with ``False`` nothing is downloaded.
        need: ``"model"`` requires config, weights and tokenizer; ``"tokenizer"`` and ``"config"``
            require (and download) only these.

    Raises:
        ModelNotFoundError: lists everything that was tried, and the next step.
    """
    name = base_name(name).strip()
    local = Path(name).expanduser()
    if name and local.is_dir():
        return ResolvedModel(name, _checked_folder(local, need), "local folder", f"folder {local}")
    organization, slash, model = name.partition("/")
    is_hub_name = slash and organization and model and "/" not in model
    # Checked before any network access: a mistyped path must not wait for the Hub.
    if not is_hub_name or name.startswith((".", "~", "/")):
        elsewhere = ""
        if need == "tokenizer" and local.is_absolute():
            elsewhere = (
                ". If a server on another machine serves this folder, copy the tokenizer's files "
                "to the same path here"
            )
        raise ModelNotFoundError(
            f"model_name: got {name!r}, which is neither an existing folder nor a Hub name of the "
            "form 'organization/model'; give the path of a folder in transformers format, or one "
            f"of: {', '.join(_WELL_KNOWN[:1] + _WELL_KNOWN[3:7])}, …"
            f"{nearest(name, _names)}{elsewhere}"
        )
    tried = [f"folder {name}: does not exist"]
    # Prefer a copy made earlier, even if the Hub can be reached again: a resumed run must not
    # get other weights than it started with.
    found = _from_hub_cache(name, need, tried) or _from_package(name, tried, make=False)
    if found is None and allow_download:
        found = _from_hub(name, need, tried) or _from_package(name, tried, make=True)
    if found is not None:
        return found
    listed = "".join(f"\n  - {attempt}" for attempt in tried)
    hint = "" if name in _names else nearest(name, _names)
    raise ModelNotFoundError(
        f"model {name!r} was not found{hint}\nTried:{listed}\n"
        f"{'' if allow_download else 'Downloading was not allowed here. '}Next step: give the path "
        "of a folder in transformers format, or run once where the Hub can be reached (HF_TOKEN "
        "for gated models)."
    )


def _checked_folder(folder: Path, need: Need) -> Path:
    missing = missing_parts(folder, need)
    if not missing:
        return folder.resolve()
    # A common mistake: the path of a trained adapter is given as the model.
    if (folder / "adapter_config.json").is_file():
        raise ModelNotFoundError(
            f"model_name: {folder} holds a LoRA adapter, not a model; give the base model as "
            "model_name and load the adapter as a checkpoint"
        )
    raise ModelNotFoundError(
        f"model_name: folder {folder} is not a complete model in transformers format; missing: "
        f"{', '.join(missing)}; save the model and its tokenizer there with save_pretrained()"
    )


def _from_hub_cache(name: str, need: Need, tried: list[str]) -> ResolvedModel | None:
    from huggingface_hub import try_to_load_from_cache

    # Not snapshot_download(local_files_only=True): it treats a copy without the repository's
    # other weight formats as broken.
    cached = (try_to_load_from_cache(name, file) for file in _CACHE_PROBES)
    found = next((path for path in cached if isinstance(path, str)), None)
    if found is None:
        tried.append("Hub cache: no copy")
        return None
    # The path of any file shows the folder of the cached revision.
    folder = Path(found).parent
    if missing := missing_parts(folder, need):
        tried.append(f"Hub cache: incomplete copy in {folder}; missing: {', '.join(missing)}")
        return None
    return ResolvedModel(name, folder, "hub cache", f"Hub cache {folder}")


def _from_hub(name: str, need: Need, tried: list[str]) -> ResolvedModel | None:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        tried.append("Hub: not tried, because HF_HUB_OFFLINE is set")
        return None
    try:
        # List the files first: an offline machine fails here within the timeout, and only one
        # weight format is downloaded.
        info = HfApi().model_info(name, timeout=_HUB_TIMEOUT_SECONDS)
        files = [sibling.rfilename for sibling in info.siblings or []]
        folder = Path(snapshot_download(name, allow_patterns=_wanted(files, need)))
    except GatedRepoError:
        tried.append("Hub: gated; accept its licence on the model's page and set HF_TOKEN")
    except RepositoryNotFoundError:
        tried.append("Hub: no such model, or a private one (set HF_TOKEN)")
    except Exception as error:  # the HTTP client differs between versions of huggingface_hub
        line = (str(error).splitlines() or ["no message"])[0]
        tried.append(f"Hub ({constants.ENDPOINT}): {type(error).__name__}: {line}")
    else:
        if missing := missing_parts(folder, need):
            tried.append(f"Hub: the repository lacks {', '.join(missing)}")
            return None
        return ResolvedModel(name, folder, "download", f"downloaded from the Hub to {folder}")
    return None


def _wanted(files: list[str], need: Need) -> list[str]:
    """Returns the files of a repository that loading needs: one weight format, no subfolders."""
    top = [file for file in files if "/" not in file]
    if need == "config":
        return [file for file in top if file == "config.json"]
    # An index comes with the weights that it lists.
    small = [file for file in top if any(fnmatch(file, pattern) for pattern in _SMALL_FILES)]
    small = [file for file in small if not file.endswith(".index.json")]
    for pattern in ("model*.safetensors", "pytorch_model*.bin") if need == "model" else ():
        weights = [f for f in top if fnmatch(f.removesuffix(".index.json"), pattern)]
        if weights:
            return small + weights
    return small


def _from_package(name: str, tried: list[str], *, make: bool) -> ResolvedModel | None:
    if name not in _packaged:
        return None
    packaged = import_module(_packaged[name])
    try:
        folder = packaged.make_copy(models_dir()) if make else packaged.finished_copy(models_dir())
    except (WeightsDownloadError, ConfigurationError) as error:
        tried.append(f"demo package: {error}")
        return None
    note = f"{packaged.NOTE}; kept in {folder}; delete it to download the original from the Hub"
    return None if folder is None else ResolvedModel(name, folder, "demo package", note)


def missing_parts(folder: Path, need: Need = "model") -> list[str]:
    """Names the parts that ``folder`` lacks: config, weights (each shard), tokenizer."""
    missing = []
    if need != "tokenizer" and not (folder / "config.json").is_file():
        missing.append("config.json")
    if need == "model":
        present = next((file for file in _WEIGHT_FILES if (folder / file).is_file()), None)
        if present is None:
            missing.append(
                "weights (model.safetensors, or shards with model.safetensors.index.json)"
            )
        elif present.endswith(".index.json"):
            try:
                index = json.loads((folder / present).read_text(encoding="utf-8"))
                shards = set(index["weight_map"].values())
                missing += sorted(shard for shard in shards if not (folder / shard).is_file())
            except (ValueError, KeyError, AttributeError):
                missing.append(f"a readable {present}")
    if need != "config" and not any(
        all((folder / file).is_file() for file in group.split("+")) for group in _TOKENIZER_FILES
    ):
        missing.append("a tokenizer (" + " or ".join(_TOKENIZER_FILES[:3]) + ")")
    return missing


def model_config(folder: Path | str) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder; raises ``DataFormatError`` if it cannot be read."""
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


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Returns the width of the model that a ``config.json`` describes."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(part.get(name), int):
                return part[name]
    return None


def check_rank(rank: int, largest: int, setting: str = "rank") -> None:
    """Raises ``ConfigurationError`` if ``rank`` exceeds ``largest``, the highest rank of a layer
    of the model (the smaller of inputs and outputs): the product B A cannot exceed it."""
    # Small ranks are always allowed, so that a tiny model can run with the settings of a large one.
    limit = max(largest, _RANK_ALWAYS_ALLOWED)
    if rank > limit:
        raise ConfigurationError(
            f"{setting}: got {rank}, expected at most {limit}; the layers of this model have a "
            f"rank of at most {largest}, so a larger adapter cannot learn more. 8 to 128 is usual"
        )


def merge_note(base_model: str, train_unembed: bool) -> str | None:
    """Returns a warning if PEFT would merge the adapter inexactly, otherwise ``None``."""
    # With tied embeddings the input embeddings and the output head are one tensor. An adapter on
    # the head changes only the head; merging it would change the embeddings as well.
    if not train_unembed:
        return None
    from transformers import AutoConfig

    try:
        folder = resolve_model(base_model, allow_download=False, need="config").folder
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ModelNotFoundError, OSError, ValueError):
        return None  # its configuration is unknown, as the model is not on this machine
    if not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return None
    return (
        "merging this adapter with PEFT is inexact: the model ties its head to its input "
        "embeddings, but the adapter changes only the head. `python -m tinker_cookbook.weights "
        "merge` saves the head as a separate matrix"
    )
