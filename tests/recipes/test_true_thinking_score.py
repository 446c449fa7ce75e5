"""Scores of the steps of a chain of thought (4 s)."""

from __future__ import annotations

import asyncio
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch

from recipes.true_thinking_score import analyze, run_small_experiment, tts
from tinker_cookbook.exceptions import DataError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


def test_steps():
    thought = (
        "First, 2 + 3 = 5 in all.\nThe rest of it.\nWait, is that right?\n\nOK.\nSo 5 it is, x1."
    )
    steps = [
        "First, 2 + 3 = 5 in all.\nThe rest of it.",
        "Wait, is that right?\n\nOK.",
        "So 5 it is, x1.",
    ]
    assert tts.segment_cot_steps(thought, 10) == steps
    assert tts.segment_cot_steps(" \n") == []
    assert [tts.is_self_verification_step(step) for step in steps] == [False, True, False]
    assert [tts.has_numbers(step) for step in steps] == [True, False, True]
    changed = tts.perturb_numbers("-5, 0.25, 100 and x1", random.Random(0))
    numbers = [float(n) for n in changed.removesuffix(" and x1").split(", ")]
    assert {abs(a - b) for a, b in zip(numbers, (-5, 0.25, 100), strict=True)} <= {1.0, 2.0, 3.0}
    assert len(changed.split(", ")[1].partition(".")[2]) == 2


class Client:
    """The answer is likely while a prompt has the second step unchanged."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def compute_logprobs(self, prompt):
        tokens = prompt.to_ints()
        answer = len(self.tokenizer.encode("7}", add_special_tokens=False))
        likely = "adds 3 to 4" in self.tokenizer.decode(tokens)
        value = math.log(0.9 if likely else 0.2) / answer
        return [None] + [-99.0] * (len(tokens) - 1 - answer) + [value] * answer


def test_only_the_step_that_matters_scores(stories_model):
    tokenizer = get_tokenizer(stories_model)
    renderer = get_renderer("role_colon", tokenizer)
    steps = [
        "First there is a long story.",
        "Then Tom adds 3 to 4 to get it.",
        "Finally it is clear to him.",
    ]
    found = asyncio.run(
        tts.compute_tts_for_cot(Client(tokenizer), renderer, "3 + 4?", "7", "\n".join(steps))
    )
    # A later step cannot change the answer: its context has, or lacks, the second one.
    assert [round(step.tts, 6) for step in found.step_scores] == [0.0, 0.7, 0.0]
    assert found.model_correct
    assert found.summary()["per_step_tts"] == [0.0, 0.7, 0.0]
    assert (found.summary()["frac_high_tts"], found.summary()["frac_decorative"]) == (
        0.3333,
        0.6667,
    )


def test_the_probability_of_an_answer_is_that_of_transformers(stories_model, tmp_path):
    from transformers import AutoModelForCausalLM

    from tinker_cookbook.backends import connect

    tokenizer = get_tokenizer(stories_model)
    renderer = get_renderer("role_colon", tokenizer)
    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_sampling_client(base_model=stories_model).result()
        found = asyncio.run(
            tts.compute_early_exit_confidence(client, renderer, "Who?", "Tom.", "a")
        )
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Who?"}]).to_ints()
    before = tokenizer.encode(f"<think>\nTom.{tts.EARLY_EXIT_CUE}", add_special_tokens=False)
    answer = tokenizer.encode("a}", add_special_tokens=False)
    tokens = torch.tensor([[*prompt, *before, *answer]])
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32)
    logprobs = model(tokens).logits[0].log_softmax(-1).detach()
    at = range(len(prompt) + len(before), tokens.shape[1])
    expected = sum(float(logprobs[i - 1, tokens[0, i]]) for i in at)
    assert math.log(found) == pytest.approx(max(expected, -50), abs=1e-3)


def test_the_programs(stories_model, tmp_path, monkeypatch):
    given = [f"model_name={stories_model}", "renderer_name=role_colon", "max_tokens=8"]
    given += ["backend=local", "device=cpu", f"log_path={tmp_path / 'run'}"]
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 3)
    cli = parse_arguments(analyze.CLIConfig, [*given, f"dataset_path={tmp_path}", "n_problems=2"])
    problems = [*analyze.load_problems(cli), SimpleNamespace(question="a " * 900, answer="b")]
    total = asyncio.run(analyze.run(cli, problems, tmp_path / "run"))
    assert (total["n_problems_succeeded"], total["n_problems_failed"]) == (2, 1)
    rows = (tmp_path / "run" / "tts_per_problem.jsonl").read_text().splitlines()
    assert ["error" in json.loads(row) for row in rows] == [False, False, True]
    asyncio.run(run_small_experiment.main(parse_arguments(run_small_experiment.CLIConfig, given)))
    assert json.loads((tmp_path / "run" / "tts_summary.json").read_text())["n_problems"] == 3
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"MATH-500.*dataset_path=FILE"):
        analyze.load_problems(parse_arguments(analyze.CLIConfig, given))
