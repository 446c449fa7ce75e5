"""Opens a checkpoint for export: the adapter's tensors, and the folder of its base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from tinker_cookbook.engine.checkpoints import format as fmt
from tinker_cookbook.engine.checkpoints.store import CheckpointStore, TinkerPath
from tinker_cookbook.engine.model.loading import weights_digest
from tinker_cookbook.engine.model.resolve import base_name, resolve_model
from tinker_cookbook.exceptions import (
    ConfigurationError,
    WeightsAdapterError,
    WeightsError,
)
from tinker_cookbook.run.weights_paths import FORMS, resolve_weights
from tinker_cookbook.weights._modules import HEAD, INNER, by_module

_PREFIX = "base_model.model."
_SIDES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
# Name of the head in the service -> name in transformers.
_HEAD_ALIASES = ("model.unembed_tokens", "unembed_tokens")
RENDERER = "renderer_name"
FULL_WEIGHTS = "FULL_WEIGHTS"
"""``peft_type`` of a checkpoint that has all weights."""


@dataclass(frozen=True)
class LowRankUpdate:
    """Update of one matrix, ``W + scaling * b @ a``, or of the stacked matrices of ``experts``
    E: PEFT stacks their factors in ``a`` [E * r, in] and ``b`` [out, r * E]."""

    a: Tensor
    """[r, in], fp32."""
    b: Tensor
    """[out, r], fp32."""
    scaling: float
    experts: int = 0

    @property
    def rank(self) -> int:
        """Rank of the update of one matrix."""
        return len(self.a) // max(1, self.experts)

    def split(self) -> tuple[Tensor, Tensor]:
        """Returns the factors [E, r, in] and [E, out, r] of stacked matrices."""
        a = self.a.view(self.experts, self.rank, -1)
        return a, self.b.view(len(self.b), self.rank, self.experts).permute(2, 0, 1)

    def delta(self) -> Tensor:
        """Returns the change of the matrix [out, in], or of the matrices [E, out, in], in fp32."""
        a, b = self.split() if self.experts else (self.a, self.b)
        return (b @ a).mul_(self.scaling)


@dataclass(frozen=True)
class Checkpoint:
    """An adapter in memory, and the base model that it changes."""

    name: str
    """tinker:// path, or the folder it was read from."""
    base_model: str
    """Hub name or folder, as stated by the checkpoint."""
    base_folder: Path
    """Folder of the base model on this machine, in transformers format."""
    updates: dict[str, LowRankUpdate]
    """Updates by the module's name in transformers, such as ``model.layers.0.mlp.up_proj``, or in a
    multimodal model ``model.language_model.layers.0.mlp.up_proj``."""
    config: dict[str, Any]
    """``adapter_config.json``."""
    metadata: dict[str, str] = field(default_factory=dict)
    """``user_metadata`` of the run, such as ``renderer_name`` and ``log_path``."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """All weights, if the run trained them (``lora_rank=0``); then ``updates`` is empty."""

    def with_renderer(self, name: str | None) -> Checkpoint:
        """Returns this checkpoint with another chat format than the run's; None keeps the run's."""
        return self if name is None else replace(self, metadata={**self.metadata, RENDERER: name})

    @property
    def rank(self) -> int:
        """The largest rank of an update."""
        return max(update.rank for update in self.updates.values())


def open_checkpoint(
    path: str,
    *,
    base_model: str | None = None,
    backend: str = "auto",
    base_url: str | None = None,
    all_weights: bool = False,
) -> Checkpoint:
    """Opens a checkpoint and finds its base model.

    Args:
        path: ``tinker://`` path, ``LOG_PATH`` or ``LOG_PATH@STEP`` of a run, or the folder of an
            adapter (``adapter_config.json`` and ``adapter_model.safetensors``).
        base_model: Hub name or folder; default: the one stated by the checkpoint. Needed if that
            is a folder on another machine.
        backend: Where a ``tinker://`` path is looked up; see ``connect``.
        base_url: URL of a Tinker server.
        all_weights: Accept a checkpoint of all weights (``lora_rank=0``).

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        ModelNotFoundError: The base model is not on this machine and cannot be downloaded.
        WeightsAdapterError: The tensors are not a LoRA adapter that can be exported.
    """
    path = resolve_weights(path, "sampler_weights", "path") or path
    if path.startswith(fmt.SCHEME):
        config, tensors, stated, metadata = _read_path(path, backend, base_url)
    else:
        config, tensors, metadata = read_adapter(Path(path).expanduser())
        stated = str(config.get("base_model_name_or_path") or "")
    if base_model is None and not stated:
        raise ConfigurationError(
            f"base_model: got none, and {path} does not state it; add base_model=NAME"
        )
    name = base_model or stated
    check_same_base(path, stated, name)
    folder = resolve_model(name).folder
    check_base_digest(path, metadata.get(fmt.BASE_DIGEST, ""), folder)
    if config.get("peft_type") == FULL_WEIGHTS:
        if not all_weights:
            raise WeightsAdapterError(
                f"{path}: has all weights of the model (lora_rank=0), expected an adapter; "
                f"`python -m tinker_cookbook.weights merge {path} out=FOLDER` writes the model"
            )
        return Checkpoint(path, name, folder, {}, config, metadata, tensors)
    updates = by_module(low_rank_updates(tensors, config, path), folder, path)
    return Checkpoint(path, name, folder, updates, config, metadata)


def check_same_base(path: str, stated: str, given: str) -> None:
    """Raises ``ConfigurationError`` if a checkpoint has another base model than ``given``."""
    stated, given = base_name(stated), base_name(given)
    # Folders cannot be compared by name, since a copy may be anywhere. Shapes are checked later.
    hub_names = all(
        "/" in n.strip("/") and not Path(n).expanduser().exists() for n in (stated, given)
    )
    if stated and hub_names and not Path(stated).is_absolute() and stated != given:
        raise ConfigurationError(
            f"base_model: got {given}, but {path} was trained on {stated}; leave base_model out, "
            "or give the path of a copy of that model"
        )


def check_base_digest(path: str, recorded: str, folder: Path) -> None:
    """Raises ``ConfigurationError`` if the weights in ``folder`` are not those of the training."""
    found = weights_digest(folder)
    if recorded and found and recorded != found:
        raise ConfigurationError(
            f"base_model: {folder} has other weights (digest {found}) than the model that {path} "
            f"was trained on ({recorded}); give a copy of that model. A base model and its "
            "instruction-tuned version have the same shapes"
        )


def open_adapter_folder(
    folder: str, base_model: str, error: type[WeightsError] = WeightsAdapterError
) -> Checkpoint:
    """Opens an adapter on this machine like ``open_checkpoint``; unusable tensors raise an
    ``error`` of the caller's type."""
    if folder.startswith(fmt.SCHEME):
        raise error(
            f"adapter_path: got {folder!r}, expected a folder; weights.download fetches a "
            "checkpoint into one"
        )
    try:
        return open_checkpoint(folder, base_model=base_model)
    except WeightsAdapterError as unusable:
        raise error(str(unusable)) from unusable


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """Returns ``adapter_config.json``, the tensors and their header's metadata, from a folder.

    Raises:
        FileNotFoundError: One of the two files is missing.
        WeightsAdapterError: One of the files cannot be read.
    """
    for name in (fmt.ADAPTER_CONFIG, fmt.ADAPTER):
        if not (folder / name).is_file():
            found = f"has no {name}"
            if not folder.is_dir():
                found = "is a file" if folder.exists() else "no such folder"
            elif (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                found = "has a whole model, without an adapter or a record of its run"
            raise FileNotFoundError(
                f"{folder}: {found}; expected the {FORMS}, with an adapter or all weights; or the "
                f"folder of a LoRA adapter with {fmt.ADAPTER_CONFIG} and {fmt.ADAPTER}"
            )
    try:
        config = json.loads((folder / fmt.ADAPTER_CONFIG).read_bytes())
        content = (folder / fmt.ADAPTER).read_bytes()
        tensors, metadata = safetensors.torch.load(content), fmt.header_metadata(content)
    except (ValueError, OSError, safetensors.SafetensorError) as error:
        raise WeightsAdapterError(f"{folder}: the adapter cannot be read: {error}") from error
    return config, tensors, metadata


def low_rank_updates(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str
) -> dict[str, LowRankUpdate]:
    """Returns the updates by module name, with the scaling that PEFT would apply.

    Raises:
        WeightsAdapterError: A tensor has no matching second matrix, or the adapter
            changes weights in another way (DoRA, trained biases).
    """
    _check_kind(config, source)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        suffix = next((suffix for suffix in _SIDES if key.endswith(suffix)), None)
        if suffix is None:
            raise WeightsAdapterError(
                f"{source}: tensor {key!r} is not lora_A or lora_B; expected a plain LoRA adapter"
            )
        if tensor.dim() != 2:
            raise WeightsAdapterError(
                f"{source}: tensor {key!r} has shape {tuple(tensor.shape)}, expected a matrix; "
                "a LoRA adapter in PEFT's format has only matrices"
            )
        module = key.removeprefix(_PREFIX).removesuffix(suffix)
        module = HEAD if module in _HEAD_ALIASES else module
        sides.setdefault(module, {})[_SIDES[suffix]] = tensor.float()
    if not sides:
        raise WeightsAdapterError(f"{source}: the adapter has no tensors")
    updates = {}
    for module, pair in sides.items():
        if len(pair) != 2 or pair["a"].shape[0] != pair["b"].shape[1]:
            shapes = {side: tuple(tensor.shape) for side, tensor in pair.items()}
            raise WeightsAdapterError(
                f"{source}: {module} has {shapes}, expected a [r, in] and b [out, r]"
            )
        experts = _experts_of(config, module, len(pair["a"]), source)
        rank = len(pair["a"]) // max(1, experts)
        updates[module] = LowRankUpdate(
            pair["a"], pair["b"], _scaling(config, module, rank), experts
        )
    return updates


def _experts_of(config: Mapping[str, Any], module: str, stacked: int, source: str) -> int:
    """Returns the number of experts in a stacked update; 0 for a plain matrix."""
    parameters = [p.rpartition(".")[0] for p in config.get("target_parameters") or []]
    name = module.removesuffix(INNER)
    if not any(name.endswith(p) for p in parameters if p.endswith("experts")):
        return 0
    if stacked % int(config["r"]) or config.get("rank_pattern"):
        raise WeightsAdapterError(
            f"{source}: {module} has {stacked} rows of lora_A, expected a multiple of "
            f"r={config['r']} without a rank_pattern: one rank for all experts"
        )
    return stacked // int(config["r"])


def _check_kind(config: Mapping[str, Any], source: str) -> None:
    for key, neutral in {
        "use_dora": (None, False),
        "fan_in_fan_out": (None, False),
        "bias": (None, "none"),
        "modules_to_save": (None, []),
    }.items():
        if config.get(key) not in neutral:
            raise WeightsAdapterError(
                f"{source}: adapter_config.json: {key}={config[key]!r} is not supported; expected "
                "a plain LoRA adapter"
            )


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    # PEFT: alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA (Kalajdzievski 2023). A key of
    # alpha_pattern is the suffix of a module's name, and its value is that module's alpha.
    patterns = config.get("alpha_pattern") or {}
    found = [
        alpha for end, alpha in patterns.items() if module == end or module.endswith(f".{end}")
    ]
    alpha = float(found[0] if found else config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _read_path(
    path: str, backend: str, base_url: str | None
) -> tuple[dict[str, Any], dict[str, Tensor], str, dict[str, str]]:
    # Imported late: it imports the SDK, which a local path does not need.
    from tinker_cookbook.backends.connect import check_backend

    parsed = TinkerPath.parse(path)
    kind, _, _ = check_backend(backend, base_url)
    if kind != "local":
        # Imported late for the same reason.
        from tinker_cookbook.weights._download import read_remote

        return read_remote(path, backend, base_url, read_adapter)
    store = CheckpointStore()
    info, files = store.get_checkpoint(path), store.peft_files(path)
    run = store.get_run(parsed.run_id).info
    metadata = {
        **fmt.header_metadata(files[fmt.ADAPTER]), **run.user_metadata, **info.user_metadata
    }  # fmt: skip
    tensors = safetensors.torch.load(files[fmt.ADAPTER])
    return json.loads(files[fmt.ADAPTER_CONFIG]), tensors, str(info.state["base_model"]), metadata
