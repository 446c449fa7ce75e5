"""A small store and what the tests of it save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinker_cookbook.engine.checkpoints.store import CheckpointStore, RunInfo, TinkerPath

INFO = RunInfo(
    base_model="org/model", lora_rank=4, train_mlp=False, seed=3, user_metadata={"a": "b"}
)


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def clock_fixture() -> Clock:
    return Clock()


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path, clock: Clock) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "root", clock)
    store.create_run("run-1", INFO)
    return store


def adapter(value: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "base_model.model.q_proj.lora_B.weight": torch.randn(6, 4, generator=generator) * value,
        "base_model.model.q_proj.lora_A.weight": torch.randn(4, 5, generator=generator) * value,
    }


def optimizer() -> dict[str, torch.Tensor]:
    return {"m.x": torch.arange(12.0).view(3, 4), "v.x": torch.rand(3, 4), "step": torch.tensor(5)}


def save(store: CheckpointStore, name: str = "step-1", kind="weights", **kwargs) -> str:
    arguments = {
        "adapter": adapter(),
        "adapter_config": {"r": 4, "target_modules": ["q_proj"]},
        "optimizer": optimizer() if kind == "weights" else None,
        "state": {"step": 5, "rng": [1, 2, 3], "nested": {"x": 0.1}},
    }
    return store.write_checkpoint("run-1", kind, name, **{**arguments, **kwargs})


def folder_of(store: CheckpointStore, path: str) -> Path:
    parsed = TinkerPath.parse(path)
    return store.root / "runs" / parsed.run_id / parsed.kind / parsed.name
