"""The student and teacher of these tests, loaded once for each file."""

from __future__ import annotations

import pytest
import soft_samples as ref
import torch
from chat_model import make_chat_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def place(stories_model):
    made = ref.Place.of(stories_model)
    yield made
    made.service.close()


@pytest.fixture(scope="session")
def plain_stories(stories_model):
    return AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float64).eval()
