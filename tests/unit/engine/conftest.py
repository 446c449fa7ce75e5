"""Small random models of several architectures, made once."""

from __future__ import annotations

from collections.abc import Callable

import engine_reference as ref
import pytest
import torch

from tinker_cookbook.engine.model.base_model import BaseModel


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
