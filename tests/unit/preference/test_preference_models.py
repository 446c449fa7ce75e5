"""A reward model's probabilities against plain transformers, and its held-out metrics."""

from __future__ import annotations

import asyncio
import math
import pickle

import chz
import pytest
import tinker
import torch
from comparisons import comparison, labeled
from transformers import AutoModelForCausalLM

from tinker_cookbook.backends import connect
from tinker_cookbook.preference.comparison import label_of_text
from tinker_cookbook.preference.preference_model import PreferenceModelEvaluator
from tinker_cookbook.preference.types import (
    LABELS,
    ComparisonRendererFromChatRenderer,
    PreferenceModelBuilderFromChatRenderer,
    PreferenceModelFromChatRenderer,
)
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

COMPARISONS = [
    comparison("A dog ran.", "The cat sat on the mat.", "Tell me a story."),
    comparison("Lily had a red ball.", "No.", "Who had a ball?"),
    comparison("Once upon a time there was a boy.", "Once.", "Begin."),
]
JUDGED = [
    labeled("B", "The dog ran.", "Lily was happy.", f"Question number {i}, please?")
    for i in range(4)
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    with connect("local", device="cpu", dtype="float32", root=root).service as service:
        yield service


@pytest.fixture(scope="module")
def chat(stories_model):
    return get_renderer("role_colon", get_tokenizer(stories_model))


@pytest.fixture(scope="module")
def untrained(service, stories_model):
    return service.create_sampling_client(base_model=stories_model).result()


@pytest.fixture(scope="module")
def trained(service, stories_model, chat):
    """A sampling client and path of a model that learned to say B, whatever it reads."""
    renderer = ComparisonRendererFromChatRenderer(chat)
    client = service.create_lora_training_client(stories_model, rank=8, seed=0).result()
    data = [datum_from_model_input_weights(*renderer.to_model_input_weights(one)) for one in JUDGED]
    for _ in range(8):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    path = client.save_weights_for_sampler("rm").result().path
    return service.create_sampling_client(model_path=path).result(), path


@pytest.fixture(scope="module")
def expected(stories_model, chat):
    """P(A), P(B), P(Tie) of each comparison by a plain forward, normalised over the three."""
    renderer = ComparisonRendererFromChatRenderer(chat)
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32).eval()
    tokens = [renderer.label_tokens[label] for label in LABELS]
    found = []
    for one in COMPARISONS:
        prompt = renderer.build_generation_prompt(one).to_ints()
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        found.append(logits[tokens].softmax(-1).tolist())
    return found


async def test_probabilities_equal_plain_transformers(untrained, chat, expected):
    model = PreferenceModelFromChatRenderer(chat, untrained)
    for one, probabilities in zip(COMPARISONS, expected, strict=True):
        logprobs = await model.label_logprobs(one)
        assert [math.exp(logprobs[label]) for label in LABELS] == pytest.approx(
            probabilities, abs=1e-5
        )
        assert await model(one) == pytest.approx(probabilities[1] - probabilities[0], abs=1e-5)


async def test_scoring_all_at_once_changes_nothing(untrained, chat):
    model = PreferenceModelFromChatRenderer(chat, untrained)
    one_by_one = [await model(one) for one in COMPARISONS]
    at_once = await asyncio.gather(*map(model, COMPARISONS))
    assert at_once == one_by_one  # to the bit, so that a resumed run earns the same rewards


async def test_position_bias_cancels_in_both_orders(trained, chat):
    """Against plain arithmetic on the judge's own log-probabilities in either order."""
    plain = PreferenceModelFromChatRenderer(chat, trained[0])
    fair = PreferenceModelFromChatRenderer(chat, trained[0], both_orders=True)
    for one in COMPARISONS:
        first, second = await plain.label_logprobs(one), await plain.label_logprobs(one.swap())
        assert min(await plain(one), await plain(one.swap())) > 0.9  # it says B, B
        mean = [first["A"] + second["B"], first["B"] + second["A"], first["Tie"] + second["Tie"]]
        a, b, _ = torch.softmax(torch.tensor(mean, dtype=torch.float64) / 2, 0).tolist()
        assert await fair(one) == pytest.approx(b - a, abs=1e-9)
        assert await fair(one) == pytest.approx(-await fair(one.swap()), abs=1e-9)
        assert abs(await fair(one)) > 0.01


@pytest.mark.parametrize(
    ("text", "label"),
    [("A", "A"), (" B", "B"), ("Tie", "Tie"), ("T", "Tie"), ("", None), ("a", None), ("AB", None)],
)
def test_labels_of_sampled_text(text, label):
    assert label_of_text(text) == label


async def test_held_out_metrics_of_a_model_that_always_says_b(trained, chat):
    one_way = await PreferenceModelEvaluator(JUDGED, chat, "held", both_ways=False)(trained[0])
    assert one_way["held/accuracy"] == 1.0
    assert one_way["held/num_judgements"] == 4
    metrics = await PreferenceModelEvaluator(JUDGED, chat, "held")(trained[0])
    assert metrics["held/accuracy"] == 0.5
    assert metrics["held/position_bias"] > 0.9
    assert metrics["held/num_judgements"] == 8
    model = PreferenceModelFromChatRenderer(chat, trained[0])
    nll = [-(await model.label_logprobs(one.comparison))["B"] for one in JUDGED]
    nll += [-(await model.label_logprobs(one.swap().comparison))["A"] for one in JUDGED]
    assert metrics["held/nll"] == pytest.approx(sum(nll) / 8, abs=1e-3)
    assert metrics["held/nll"] > 1 > one_way["held/nll"]


def test_a_builder_loads_saved_weights_on_a_service(service, trained, stories_model, chat):
    builder = builder_of(stories_model, trained[1])
    model, same = builder.build(service), PreferenceModelFromChatRenderer(chat, trained[0])
    for one in COMPARISONS:
        assert asyncio.run(model(one)) == pytest.approx(asyncio.run(same(one)), abs=1e-6)
    assert pickle.loads(pickle.dumps(builder)) == builder


def test_without_weights_the_base_model_judges(service, stories_model, chat):
    client = service.create_sampling_client(base_model=stories_model).result()
    model = builder_of(stories_model, None).build(service)
    expected = asyncio.run(PreferenceModelFromChatRenderer(chat, client)(COMPARISONS[0]))
    assert asyncio.run(model(COMPARISONS[0])) == pytest.approx(expected, abs=1e-6)


def builder_of(stories_model, path, **settings):
    return PreferenceModelBuilderFromChatRenderer(
        renderer_name="role_colon",
        model_name=stories_model,
        rm_weights_path=path,
        backend="local",
        **settings,
    )


def test_equal_builders_share_one_model_on_the_open_connection(monkeypatch, stories_model):
    made = []
    monkeypatch.setattr(
        PreferenceModelBuilderFromChatRenderer,
        "build",
        lambda self, service: made.append(service) or object(),
    )
    one = builder_of(stories_model, "tinker://run/sampler_weights/shared")
    with_none_open = one()
    assert chz.replace(one)() is with_none_open
    connection = connect("local")
    first = one()
    assert chz.replace(one)() is first is not with_none_open
    assert chz.replace(one, greedy=True)() is not first
    assert chz.replace(one, dtype="bfloat16")() is not first
    assert [service is connection.service for service in made] == [False, True, True, False]
    connection.close()
    assert one() is with_none_open
