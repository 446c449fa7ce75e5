"""Adapter shapes, seeds, files and refusals."""

from __future__ import annotations

import engine_reference as ref
import pytest
import torch

from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec, Target
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError

LAST_NAMES = {
    "attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
    "unembed": {"lm_head"},
}


@pytest.mark.parametrize("kind", ref.ARCHITECTURES)
def test_targets_are_all_linear_layers(tiny_base, kind):
    base = tiny_base(kind)
    found = {group: set() for group in LAST_NAMES}
    for target in base.targets:
        found[target.group].add(target.name.rpartition(".")[2])
    assert found == LAST_NAMES
    assert len(base.targets) == 3 * 7 + 1


def test_flags_choose_groups(stories_base):
    for group, names in LAST_NAMES.items():
        flags = {f"train_{other}": other == group for other in LAST_NAMES}
        adapter = Adapter.create(AdapterSpec(rank=2, **flags), stories_base.targets, 0, ref.CPU)
        assert {name.rpartition(".")[2] for name in adapter.tensors} == names
        assert set(adapter.peft_config("m")["target_modules"]) == names


def test_a_fresh_adapter_changes_nothing_and_follows_its_seed(stories_base):
    spec = AdapterSpec(rank=8)
    one, two, other = (
        Adapter.create(spec, stories_base.targets, seed, ref.CPU).parameters() for seed in (5, 5, 6)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    for name, tensor in one.items():
        assert tensor.dtype == torch.float32
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert tensor.abs().max() <= bound
            assert tensor.std() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_load_gives_the_same_adapter_and_copies(stories_base):
    adapter = ref.random_adapter(stories_base)
    saved = {name: tensor.clone() for name, tensor in adapter.parameters().items()}
    loaded = Adapter.load(adapter.spec, stories_base.targets, saved, ref.CPU, "here")
    for name, tensor in loaded.parameters().items():
        assert torch.equal(tensor, saved[name])
        assert tensor.data_ptr() != saved[name].data_ptr()


def test_files_of_another_model_are_refused(stories_base):
    adapter = ref.random_adapter(stories_base)
    good = adapter.parameters()
    name = next(iter(good))
    missing = {key: value for key, value in good.items() if key != name}
    wrong = {**good, name: torch.zeros(3, 3)}
    surplus = {**good, "base_model.model.other.lora_A.weight": torch.zeros(1)}
    for saved, message in (
        (missing, rf"tinker://x: tensor '{name}' is missing"),
        (wrong, r"has shape \(3, 3\), expected \(4, 64\)"),
        (surplus, r"1 tensors match no layer.*base_model.model.other"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Adapter.load(adapter.spec, stories_base.targets, saved, ref.CPU, "tinker://x")


def test_invalid_specs_are_refused():
    with pytest.raises(ConfigurationError, match="rank: got 0"):
        AdapterSpec(rank=0)
    with pytest.raises(ConfigurationError, match="all are false"):
        AdapterSpec(train_attn=False, train_mlp=False, train_unembed=False)
    targets = [Target("model.layers.0.self_attn.q_proj", "attn", 4, 4)]
    with pytest.raises(ConfigurationError, match="train_mlp=true, but this model has no mlp layer"):
        Adapter.create(AdapterSpec(train_unembed=False), targets, 0, ref.CPU)
