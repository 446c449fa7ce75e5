"""Saves runs to the checkpoint store and loads them."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

from tinker_cookbook.engine.checkpoints import format as fmt
from tinker_cookbook.engine.checkpoints.store import (
    CheckpointStore,
    Kind,
    LoadedCheckpoint,
    RunInfo,
)
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.leaves import load_leaf


def run_info(run: TrainingRun, user_metadata: dict[str, str], seed: int | None = None) -> RunInfo:
    """Returns the run's description for the store."""
    spec = asdict(run.adapter.spec)
    rank = spec.pop("rank")
    return RunInfo(run.base.name, rank, **spec, seed=seed, user_metadata=user_metadata)


def save_run(
    store: CheckpointStore,
    run: TrainingRun,
    kind: Kind,
    name: str,
    *,
    ttl_seconds: int | None = None,
    overwrite: bool = False,
    user_metadata: dict[str, str] | None = None,
) -> str:
    """Writes a checkpoint and returns its ``tinker://`` path."""
    state = {
        "base_model": run.base.name,
        **asdict(run.adapter.spec),
        "step": run.step,
        "versions": {package: version(package) for package in ("torch", "transformers", "peft")},
    }
    renderer_name = store.get_run(run.run_id).info.user_metadata.get("renderer_name", "")
    # For exports, which may be made from a copy of the adapter's file alone.
    header = {fmt.BASE_DIGEST: run.base.weights_digest, "renderer_name": renderer_name}
    return store.write_checkpoint(
        run.run_id,
        kind,
        name,
        adapter=run.adapter.parameters(),
        adapter_config=run.adapter.peft_config(run.base.name),
        adapter_metadata={name: text for name, text in header.items() if text},
        # A sampler needs no optimizer state, and the moments are twice as large as the adapter.
        optimizer=run.optimizer.state() if kind == "weights" else None,
        state=state,
        ttl_seconds=ttl_seconds,
        overwrite=overwrite,
        user_metadata=user_metadata,
    )


def load_sampler(
    base: BaseModel, loaded: LoadedCheckpoint, path: str
) -> tuple[BaseModel, Adapter | None]:
    """Returns what samples a checkpoint: ``base`` with its adapter, or a base model of its own."""
    if loaded.state["rank"] == 0:
        full = load_leaf("engine.extensions.full", "lora_rank=0")
        weights = full.FullWeights.load(base, loaded.adapter, path)
        return full.base_with(base, weights.parameters()), None
    return base, load_adapter(base, loaded, path)


def load_adapter(base: BaseModel, loaded: LoadedCheckpoint, path: str) -> Adapter:
    """Returns the adapter of a checkpoint; raises if it belongs to another base model."""
    fields = {name: loaded.state[name] for name in AdapterSpec.__dataclass_fields__}
    # ``targets`` are the layers of this base model; tensors that do not fit are refused.
    return Adapter.load(AdapterSpec(**fields), base.targets, loaded.adapter, base.device, path)


def load_run(
    engine: Engine, run_id: str, base_model: str, loaded: LoadedCheckpoint, path: str
) -> TrainingRun:
    """Returns a run restored from a checkpoint. Runs on the engine's worker."""
    saved = loaded.state["base_model"]
    # Two names may refer to the same model, such as a Hub name and the folder of its copy.
    if saved != base_model and engine.resolve(saved).folder != engine.resolve(base_model).folder:
        raise CheckpointError(
            f"{path}: was trained on {saved!r}, but base_model is {base_model!r}; load it with "
            "the model it was trained on"
        )
    base = engine.trained_base(base_model)
    # Without the optimizer, the checkpoint starts a new run.
    step = 0 if loaded.optimizer is None else loaded.state["step"]
    if loaded.state["rank"] == 0:
        full = load_leaf("engine.extensions.full", "lora_rank=0")
        run = full.open_run(engine, run_id, base, loaded.adapter, step, path)
    else:
        run = engine.new_run(run_id, base, load_adapter(base, loaded, path), step)
    run.optimizer.load(loaded.optimizer or {}, path)
    return run
