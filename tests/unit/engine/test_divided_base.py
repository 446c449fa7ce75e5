"""A base model that FSDP divides, in a group of one process, against the whole one.

Two processes are in ``test_data_parallel``. Costs 3 s, mostly for making the models.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import engine_reference as ref
import pytest
import torch
from torch.distributed.tensor import DTensor

from tinker_cookbook.backends.engine_options import EngineSettings
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.extensions.parallel.sharding import FSDPMatrix, GatheredWeight, Sharding
from tinker_cookbook.engine.kernels.cpu import linear
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.loading import weights_bytes
from tinker_cookbook.engine.model.lora import AdapterLinear
from tinker_cookbook.exceptions import ConfigurationError

group = pytest.fixture(scope="module")(ref.group_of_one)


def sharded(folder: str | Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    return BaseModel(str(folder), Path(folder), ref.CPU, dtype, sharding=Sharding())


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2_bias", "gemma3", "qwen3_next", "qwen3_vl", *ref.ROUTED]
)
def test_a_divided_base_trains_as_the_whole_one(group, tmp_path, kind, monkeypatch):
    # The same products in both: the layers of Qwen3-Next turn a last bit into 3e-5.
    monkeypatch.setattr(linear, "SMALLEST", 1 << 16)
    whole = ref.load_base(ref.make_model(kind, tmp_path))
    base = sharded(whole.folder)
    # Of a hybrid model too: the trials of attention end in the middle of its layers.
    assert base.kv_shapes == whole.kv_shapes
    assert base.shares_prefixes == whole.shares_prefixes
    ref.assert_trains_equally(base, whole)


def test_a_layer_is_freed_when_the_next_one_is_divided(group, tiny_base, monkeypatch):
    from torch.distributed import fsdp

    fully_shard, living = fsdp.fully_shard, []

    def look_and_shard(module, **kwargs):
        living.append([one for one in sizes if one() is not None])
        matrices = [m for m in module.modules() if isinstance(m, FSDPMatrix)]
        parts = [part for one in matrices for part in one.parts]
        sizes.extend(map(weakref.ref, parts) if len(living) <= 3 else ())
        del matrices, parts
        return fully_shard(module, **kwargs)

    sizes: list[weakref.ref] = []
    monkeypatch.setattr(fsdp, "fully_shard", look_and_shard)
    sharded(tiny_base("llama").folder)
    assert len(sizes) == 3 * 7
    assert living == [[], [], [], []]


def test_the_weights_are_used_where_they_are_gathered(group, tiny_base):
    base = sharded(tiny_base("qwen3").folder)
    layers = [m for m in base._decoder.modules() if isinstance(m, AdapterLinear)]
    assert len(layers) == 3 * 7
    assert all(isinstance(layer.frozen, GatheredWeight) for layer in layers)
    assert all(isinstance(part, DTensor) for layer in layers for part in layer.sharded.parts)


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigurationError, match=r"shard_base=True: the remote backend decides"):
        EngineSettings(shard_base=True).check(local=False)
    with pytest.raises(ConfigurationError, match=r"shard_base=true.*torchrun --nproc-per-node"):
        Engine("cpu", shard_base=True)


def test_the_estimate_of_memory_divides_the_matrices_of_layers(tiny_base):
    folder = tiny_base("llama").folder
    whole, half = (weights_bytes(folder, torch.float32, shards=shards) for shards in (1, 2))
    layers = 3 * (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 96) * 4
    assert whole - half == layers // 2
