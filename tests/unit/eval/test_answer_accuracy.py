"""The accuracy of answers, against the answers of ``generate``."""

from __future__ import annotations

import asyncio

import pytest

from tinker_cookbook.backends import connect
from tinker_cookbook.eval.answer_accuracy import AnswerAccuracyEvaluator
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

TEXTS = ["Once there was a dog.", "Lily went out.", "The sun is"]
QUESTIONS = [[{"role": "user", "content": text}] for text in TEXTS]
MAX_TOKENS = 5


@pytest.fixture(scope="module")
def renderer(stories_model):
    return get_renderer("role_colon", get_tokenizer(stories_model))


@pytest.fixture(scope="module")
def greedy(stories_model, renderer):
    """What transformers answers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories_model)
    answers = []
    for question in QUESTIONS:
        prompt = torch.tensor([renderer.build_generation_prompt(question).to_ints()])
        out = model.generate(prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = out[0, prompt.shape[1] :].tolist()
        answers.append(renderer.tokenizer.decode(new).strip())
    return answers


@pytest.fixture(scope="module")
def client(stories_model):
    service = connect("local", device="cpu", dtype="float32").service
    yield service.create_sampling_client(base_model=stories_model).result()
    service.close()


def evaluate(client, renderer, references, **more):
    evaluator = AnswerAccuracyEvaluator(QUESTIONS, references, renderer, MAX_TOKENS, **more)
    return asyncio.run(evaluator(client)), evaluator


def test_shares_of_equal_answers(client, renderer, greedy):
    references = {
        "agreement": [greedy[0], "wrong", greedy[2]],
        "accuracy": [None, greedy[1], "wrong"],
        "nothing": [None] * 3,
    }
    metrics, evaluator = evaluate(client, renderer, references, constants={"teacher_accuracy": 0.5})
    assert evaluator.last_answers == greedy
    assert metrics == {
        "test/cut_off": 1.0,
        "test/agreement": pytest.approx(2 / 3),
        "test/num_agreement": 3,
        "test/accuracy": 0.5,
        "test/num_accuracy": 2,
        "test/num_nothing": 0,
        "test/teacher_accuracy": 0.5,
    }


def test_what_is_compared_can_be_chosen(client, renderer, greedy):
    firsts = {"accuracy": [answer[:1] for answer in greedy]}
    metrics, _ = evaluate(client, renderer, firsts, read=lambda text: text.strip()[:1], name="x")
    assert metrics["x/accuracy"] == 1.0
    with pytest.raises(DataValidationError, match="test/accuracy: got 1 answers to 3 questions"):
        evaluate(client, renderer, {"accuracy": ["a"]})
