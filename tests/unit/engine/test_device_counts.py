"""Kernels and waits of a step on a GPU, counted on the pretended device: ceilings, not goals.

Kernels of one layer are the difference between two models that differ by one layer. A GPU is idle
between short kernels, so a decode step takes about as long as its kernels take to start.
"""

from __future__ import annotations

from collections.abc import Sequence

import engine_reference as ref
import numpy as np
import pytest
import torch
from image_prompts import prompt_of
from pretended_device import DEVICE, PretendedDevice

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler

SHAPE = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
MIXED = (20, 1500, 70, 400, 700, 130, 60, 1000)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> tuple[BaseModel, BaseModel]:
    """Qwen3 in bfloat16 with one and with two layers, on the pretended device."""
    import transformers as tf

    made = []
    for layers in (1, 2):
        torch.manual_seed(0)
        config = tf.Qwen3Config(**SHAPE, num_hidden_layers=layers, tie_word_embeddings=True)
        folder = tmp_path_factory.mktemp("qwen3")
        tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        with PretendedDevice():
            made.append(ref.load_base(folder, torch.bfloat16, DEVICE))
            assert made[-1].kv_shapes is not None
    return made[0], made[1]


class Batch:
    """A scheduler with one request of each length; adapters take turns."""

    def __init__(self, base: BaseModel, lengths: Sequence[int], adapters: int = 1, **settings):
        rng = np.random.default_rng(0)
        samplers = [
            Sampler(base, ref.random_adapter(base, AdapterSpec(8), n)) for n in range(adapters)
        ]
        self.scheduler = Scheduler(base, base.kv_shapes or [])
        for number, length in enumerate(lengths):
            options = SamplingSettings(**{"max_tokens": 60, "seed": number, **settings})
            prompt = rng.integers(3, 300, length)
            request = sample_request(samplers[number % adapters], prompt, 1, options)
            self.scheduler.add(request)

    def step(self, device: PretendedDevice) -> int:
        """Kernels of one step."""
        device.reset()
        self.scheduler.step()
        return device.kernels.total()


def kernels_of_layer(
    bases: tuple[BaseModel, BaseModel], lengths: Sequence[int], **options
) -> tuple[int, int]:
    """Kernels of a layer in a decode step and in prefill; the host waits twice in a step."""
    counts = []
    for base in bases:
        with PretendedDevice() as device:
            batch = Batch(base, lengths, **options)
            prefill = batch.step(device)
            batch.step(device)  # makes what later steps use again
            counts.append((batch.step(device), prefill))
            # The tokens, which end a sequence or not, and their log-probabilities.
            assert device.syncs.total() <= 2, dict(device.syncs)
            # torch's kernel for masks, and not its plain operators.
            assert set(device.attention) == {("efficient", "mask")}
    (one, prefill_one), (two, prefill_two) = counts
    return two - one, prefill_two - prefill_one


def test_a_layer_of_a_decode_step_takes_few_kernels(bases):
    decode, prefill = kernels_of_layer(bases, [20] * 8)
    assert decode <= 76
    assert prefill <= 110


def test_kernels_do_not_grow_with_lengths_prompts_or_adapters(bases):
    """Six seconds: a step of four thousand prompt tokens in each of two models, twice."""
    decode, _ = kernels_of_layer(bases, [20] * 8)
    mixed, prefill = kernels_of_layer(bases, MIXED)
    assert mixed == decode
    assert prefill <= 140  # the cache grows for each of the long prompts
    with_four, _ = kernels_of_layer(bases, [20] * 8, adapters=4)
    assert with_four <= decode + 8 <= 110
    assert kernels_of_layer(bases, [20] * 9, top_k=20, top_p=0.9)[0] <= decode + 1


def test_a_decode_step_after_an_image_is_one_of_text(tmp_path):
    with PretendedDevice() as device:
        base = ref.load_base(ref.make_model("qwen3_vl", tmp_path), torch.bfloat16, DEVICE)
        assert base.vision is not None
        counts = []
        for images in (2, 0):
            scheduler = Scheduler(base, base.kv_shapes or [])
            tokens, seen = prompt_of(base, images, length=60)
            settings = SamplingSettings(max_tokens=9, seed=0)
            request = sample_request(Sampler(base, None), tokens, 8, settings, images=seen)
            scheduler.add(request)
            for _ in range(3):
                device.reset()
                scheduler.step()
            counts.append(device.kernels.total())
            assert device.syncs.total() <= 2, dict(device.syncs)
        assert counts[0] == counts[1]


def test_a_group_of_samples_shares_the_blocks_of_its_prompt(bases):
    with PretendedDevice():
        base = bases[0]
        request = sample_request(
            Sampler(base, None), np.arange(3, 195), 16, SamplingSettings(max_tokens=20, seed=0)
        )
        scheduler = Scheduler(base, base.kv_shapes or [])
        scheduler.add(request)
        scheduler.step()
        scheduler.step()
        # The three full blocks of the prompt once, and one block for each sample.
        assert len(scheduler._rows) == 16
        assert scheduler._cache.active_tokens == (3 + 16) * 64
