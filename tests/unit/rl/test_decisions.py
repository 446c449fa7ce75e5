"""Decisions: probabilities of choices, against the model's own, and losses (under 3 s)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tinker
import torch

from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.decisions import (
    Decision,
    DecisionRenderer,
    PrefixedChoiceRenderer,
    decision_choice_datums,
    decision_dist_datums,
    probability_loss,
    sample_decision,
)
from tinker_cookbook.recipes.decisions.forecasting import brier_score_loss
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

DECISION = Decision("Which one?", [("red", "like blood"), ("green", ""), ("blue", "like the sea")])


@pytest.fixture(scope="module")
def renderer(stories_model):
    return DecisionRenderer(get_renderer("role_colon", get_tokenizer(stories_model)))


@pytest.fixture(scope="module")
def service():
    with connect("local", device="cpu", dtype="float32") as connection:
        yield connection.service


def test_probabilities_are_those_of_the_whole_model(renderer, service, stories_model):
    from transformers import AutoModelForCausalLM

    rendering = renderer.render(DECISION)
    client = service.create_sampling_client(base_model=stories_model).result()
    found = asyncio.run(sample_decision(client, rendering))
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32)
    prompt = torch.tensor([rendering.tokens[: rendering.choice_pos]])
    tokens = [rendering.label_tokens[label] for label in DECISION.labels]
    expected = model(prompt).logits[0, -1, tokens].softmax(0).tolist()
    assert list(found) == ["red", "green", "blue"]
    assert list(found.values()) == pytest.approx(expected, abs=1e-5)


def test_the_reply_is_written_up_to_the_choice(renderer):
    rendering = renderer.render(DECISION)
    text = renderer.tokenizer.decode(rendering.tokens)
    assert text.endswith("choice#?")
    assert 'choice#A = "red": like blood\nchoice#B = "green"\n' in text
    for label, letter in zip(DECISION.labels, "ABC", strict=True):
        tokens = rendering.with_label(label)
        assert renderer.tokenizer.decode(tokens).endswith(f"choice#{letter}")
        # The same tokens as in a conversation with this reply.
        assert tokens[:-1] == rendering.tokens[:-1]


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "qwen3"), ("llama3", "llama3"), ("smollm2", "smollm2")]
)
def test_every_chat_format_writes_the_choice_as_its_supervised_examples(
    tokenizer_folder, family, name
):
    chat = get_renderer(name, get_tokenizer(tokenizer_folder(family)))
    rendering = DecisionRenderer(chat).render(DECISION)
    convo, replies = DecisionRenderer(chat)._messages(
        DECISION, PrefixedChoiceRenderer(chat).render_choices(DECISION.labels)
    )
    for label, reply in zip(DECISION.labels, replies, strict=True):
        answer = {"role": "assistant", "content": reply}
        whole, _ = chat.build_supervised_example([*convo, answer])
        tokens = rendering.with_label(label)
        assert whole.to_ints()[: len(tokens)] == tokens


def test_cross_entropy_trains_the_choice_alone(renderer):
    (datum,) = decision_choice_datums(renderer, [(DECISION, "blue")])
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    assert (weights.sum(), weights[-1]) == (1, 1)
    tokens = renderer.render(DECISION).with_label("blue")
    assert datum.loss_fn_inputs["target_tokens"].to_numpy()[-1] == tokens[-1]


def test_the_brier_loss_is_that_of_the_model_and_leads_to_the_targets(
    renderer, service, stories_model
):
    """A proper scoring rule is lowest at the true probabilities."""
    targets = {"red": 0.7, "blue": 0.3}
    data = decision_dist_datums(renderer, [(DECISION, targets)])
    client = service.create_lora_training_client(stories_model, rank=4, seed=0).result()
    loss = probability_loss(brier_score_loss)

    def probabilities():
        sampler = client.save_weights_and_get_sampling_client().result()
        found = asyncio.run(sample_decision(sampler, renderer.render(DECISION)))
        return np.array(list(found.values()))

    values = probabilities()
    metrics = client.forward_backward_custom(data, loss).result().metrics
    assert metrics["loss"] == pytest.approx(((values - [0.7, 0, 0.3]) ** 2).sum(), abs=1e-5)
    assert metrics["target_prob:mean"] == pytest.approx(0.7 * values[0] + 0.3 * values[2])
    for _ in range(60):
        client.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result()
        client.forward_backward_custom(data, loss).result()
    assert probabilities() == pytest.approx([0.7, 0, 0.3], abs=0.05)


def test_wrong_decisions_are_named(renderer):
    with pytest.raises(DataValidationError, match="at least two different"):
        Decision("?", [("a", ""), ("a", "")])
    with pytest.raises(DataValidationError, match=r"got 'gren'.*did you mean 'green'"):
        decision_choice_datums(renderer, [(DECISION, "gren")])
    many = Decision("?", [(str(i), "") for i in range(27)])
    with pytest.raises(ConfigurationError, match=r"got 27, and no id for \['26'\]"):
        renderer.render(many)
    with pytest.raises(ConfigurationError, match="ends where a token ends"):
        PrefixedChoiceRenderer(renderer.renderer, placeholder="two tokens")
