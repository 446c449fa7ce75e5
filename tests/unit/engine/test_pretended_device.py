"""The engine on a device that is not the CPU gives the CPU's numbers.

Each job runs on the CPU and on a pretended CUDA device, or on a real one (``pytest -m gpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import engine_reference as ref
import numpy as np
import pytest
import torch
from device_jobs import IMAGE_JOBS, JOBS
from image_prompts import prompt_of
from pretended_device import DEVICE, PretendedDevice

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler

KINDS = ("llama", "qwen3", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_next")
QUICK = {
    "qwen3": ("ppo, shared rows", "saved and resumed", "sampling, top_k and top_p", "scoring"),
    "gemma3": ("sampling, two adapters",),
}
QUICK_VLMS = ("qwen3_vl", "gemma3_vl")
# On the pretended device the other kinds have the jobs in which models differ; losses are of the
# head, which is one for all.
OF_MODELS = ("ppo, shared rows", "recomputed row", "sampling, two adapters", "scoring")
_REAL = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Machine:
    """Models on a device, each loaded once; entered where they are used."""

    def __init__(self, pretended: bool, folder: Callable[[str], Path]) -> None:
        self.pretended, self._folder = pretended, folder
        self._bases: dict[tuple[str, torch.dtype], BaseModel] = {}

    @contextmanager
    def entered(self) -> Iterator[PretendedDevice | None]:
        with PretendedDevice() if self.pretended else nullcontext() as device:
            yield device

    def base(self, kind: str, dtype: torch.dtype = torch.float32) -> BaseModel:
        if (kind, dtype) not in self._bases:
            folder = ref.make_model(kind, self._folder(kind))
            self._bases[kind, dtype] = ref.load_base(folder, dtype, DEVICE)
        return self._bases[kind, dtype]


@pytest.fixture(scope="module")
def machine(request, tmp_path_factory) -> Machine:
    return Machine(request.param == "pretended", tmp_path_factory.mktemp)


def test_what_cuda_refuses_is_refused():
    with PretendedDevice():
        there = torch.ones(3, device=DEVICE)
        assert there.is_cuda
        assert there.device == DEVICE
        with pytest.raises(RuntimeError, match="add: expected all tensors to be on the same"):
            there + torch.ones(3)
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
        with pytest.raises(RuntimeError, match="address of a device tensor"):
            there.data_ptr()
        assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a number may be on the CPU
    with pytest.raises(RuntimeError, match="outside of the PretendedDevice"):
        there + 1


def test_the_host_waits_twice_in_a_decode_step(tmp_path):
    """For the tokens, which end a sequence or not, and for their log-probabilities. Also after an
    image: sampled tokens are text."""
    with PretendedDevice() as device:
        base = ref.load_base(ref.make_model("qwen3_vl", tmp_path), torch.bfloat16, DEVICE)
        for count in (2, 0):
            scheduler = Scheduler(base, base.kv_shapes or [])
            tokens, images = prompt_of(base, count, length=60)
            settings = SamplingSettings(max_tokens=9, seed=0)
            request = sample_request(Sampler(base, None), tokens, 8, settings, images=images)
            scheduler.add(request)
            for _ in range(3):
                device.syncs.clear()
                scheduler.step()
            assert device.syncs.total() == 2, device.syncs


def _cases() -> Iterator[object]:
    """Machine, model and job; a real device has all jobs of all models."""
    for number, kind in enumerate((*KINDS, *ref.VLMS)):
        jobs = [*(JOBS if kind in KINDS else IMAGE_JOBS)]
        for job in jobs:
            quick = kind in QUICK_VLMS or job in QUICK.get(kind, ())
            # Of the models that see, one trains and the next samples.
            wanted = job in OF_MODELS if kind in KINDS else jobs.index(job) == number % 2
            if wanted or quick or kind == "qwen3":
                yield pytest.param("pretended", kind, job, marks=() if quick else pytest.mark.slow)
            yield pytest.param("cuda", kind, job, marks=[*_REAL, pytest.mark.slow])


@pytest.mark.parametrize(("machine", "kind", "job"), _cases(), indirect=["machine"])
def test_numbers_are_those_of_the_cpu(tiny_base, machine, kind, job):
    run = (JOBS | IMAGE_JOBS)[job]
    expected = run(tiny_base(kind))
    with machine.entered():
        found = run(machine.base(kind))
    assert len(found) == len(expected)
    # Rounding adds up along the recurrence of Qwen3-Next: 1.1e-4 on an H100.
    tolerance = 3e-4 if kind == "qwen3_next" and not machine.pretended else 1e-4
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        scale = max(float(np.nanmax(np.abs(want), initial=0.0)), 1e-6)
        np.testing.assert_allclose(got, want, atol=tolerance * scale, rtol=0)
