"""Small random models of several architectures, made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_reference as ref
import pytest
import torch
from fake_vllm import FakeVLLM, Transformers

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.requests import Sample, SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BaseModel]:
    """``tiny_base("qwen3")`` gives a random model of that shape (fp32 unless told)."""
    made: dict[object, BaseModel] = {}

    def get(kind: str, dtype: torch.dtype = torch.float32) -> BaseModel:
        if (kind, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"model-{kind}")
            made[kind, dtype] = ref.load_base(ref.make_model(kind, folder), dtype)
        return made[kind, dtype]

    return get


@pytest.fixture(scope="session")
def stories_base(stories_model: str) -> BaseModel:
    """The trained 260k-parameter Llama, in fp32."""
    return ref.load_base(stories_model)


@pytest.fixture(scope="session")
def vllm_draw(tmp_path_factory: pytest.TempPathFactory):
    """As ``ref.draw``, through a server with vLLM's API and the same model."""
    from tinker_cookbook.engine.extensions.vllm.sampler import VLLMSampler
    from tinker_cookbook.engine.sampler_settings import SamplerSettings

    made: dict[BaseModel, tuple[FakeVLLM, VLLMSampler]] = {}

    def draw(
        sampler: Sampler, prompt: Any, count: int, settings: SamplingSettings, **kwargs: Any
    ) -> list[Sample]:
        base = sampler.base
        if base not in made:
            fake = FakeVLLM(Transformers(str(base.folder)), root=str(base.folder))
            chosen = SamplerSettings(sampler=fake.url, vllm_timeout=300.0)
            made[base] = fake, VLLMSampler(chosen, base.device, base.dtype, ref.run_now)
        request = sample_request(sampler, prompt, count, settings, **kwargs)
        assert made[base][1].takes(request)
        return made[base][1].sample(request).result(timeout=300)

    yield draw
    for fake, vllm in made.values():
        vllm.close()
        fake.close()


@pytest.fixture(params=["builtin", "vllm"])
def draw(request: pytest.FixtureRequest):
    """The contract of sampling, as each sampler fulfils it."""
    return ref.draw if request.param == "builtin" else request.getfixturevalue("vllm_draw")
