"""Self-distillation on questions that user code provides."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import tinker

from tinker_cookbook.distillation.sdft_data import (
    ProvidedEnvironments,
    ProvidedTexts,
    SDFTBatchProvider,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "rl"))
from rollout_samples import Group, Policy, Steps


class Questions:
    def __init__(self, answers=2):
        self.answers = answers

    def __len__(self):
        return 3

    def get_batch(self, index):
        return [Group(Steps), Group(Steps)], ["a", "b"], ["x"] * self.answers


def prompt(question, golden):
    return tinker.ModelInput.from_ints([ord(question), ord(golden)])


def texts(provider, number):
    provided = ProvidedTexts(provider, prompt)
    return asyncio.run(provided.texts(0, provided.get_batch(number), Policy))


def test_answers_come_with_the_teachers_prompt_of_their_question():
    assert isinstance(Questions(), SDFTBatchProvider)
    answers, prompts, metrics = texts(Questions(), 1)
    assert len(ProvidedTexts(Questions(), prompt)) == 3
    assert [p.to_ints() for p in prompts] == [[97, 120], [98, 120]]
    assert all(datum.loss_fn_inputs["mask"].to_numpy().any() for datum in answers)
    assert metrics["env/all/total_episodes"] == 2
    assert len(ProvidedEnvironments(Questions()).get_batch(0)) == 2
