"""Comparisons as prompts for a label, in real chat formats, and as a reward model's data."""

from __future__ import annotations

import pytest
from comparisons import FOOD, comparison, labeled, pair_row, said, write_rows

from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonBuilderFromJsonl,
)
from tinker_cookbook.preference.types import (
    LABELS,
    Comparison,
    ComparisonRendererFromChatRenderer,
)
from tinker_cookbook.supervised.nll_evaluator import all_data
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, EmptyBatchError

FORMATS = [
    ("smollm2", "smollm2"),
    ("qwen3_instruct", "qwen3"),
    ("qwen3_disable_thinking", "qwen3"),
    ("qwen3", "qwen3"),
    ("gemma3", "gemma3"),
    ("role_colon", "smollm2"),
]
FORMAT_IDS = [name for name, _ in FORMATS]


def tokens_weights(renderer, example):
    model_input, weights = renderer.to_model_input_weights(example)
    return model_input.to_ints(), weights.tolist()


@pytest.mark.parametrize(("name", "family"), FORMATS, ids=FORMAT_IDS)
def test_examples_are_the_prompt_and_the_label(make_renderer, name, family):
    renderer = ComparisonRendererFromChatRenderer(make_renderer(name, family))
    prompt = renderer.build_generation_prompt(comparison()).to_ints()
    before = renderer.build_label_prompt(comparison()).to_ints()
    assert before[: len(prompt)] == prompt
    for label in LABELS:
        tokens, weights = tokens_weights(renderer, labeled(label))
        assert tokens == [*before, renderer.label_tokens[label]]
        assert len(weights) == len(tokens)
        assert not any(weights[: len(prompt)])
        assert all(weights[len(prompt) :])
    said_labels = [renderer.tokenizer.decode([t]).strip() for t in renderer.label_tokens.values()]
    assert said_labels[:2] == ["A", "B"]
    assert "Tie".startswith(said_labels[2])
    assert len(set(renderer.label_tokens.values())) == 3


def test_an_empty_thinking_block_belongs_to_the_prompt(make_renderer):
    renderer = ComparisonRendererFromChatRenderer(make_renderer("qwen3", "qwen3"))
    prompt = renderer.build_generation_prompt(comparison()).to_ints()
    between = renderer.build_label_prompt(comparison()).to_ints()[len(prompt) :]
    assert renderer.tokenizer.decode(between) == "<think>\n\n</think>\n\n"


def test_the_marks_stand_between_the_parts(make_renderer):
    renderer = ComparisonRendererFromChatRenderer(make_renderer("smollm2", "smollm2"))
    roles = [message["role"] for message in renderer.comparison_to_convo(comparison())]
    assert roles == ["user", "system", "assistant", "system", "assistant", "system"]
    text = renderer.tokenizer.decode(renderer.build_generation_prompt(comparison()).to_ints())
    places = [
        text.index(part)
        for part in (FOOD, "Completion A", "Pizza", "Completion B", "Hard", "Preference")
    ]
    assert places == sorted(places)


def test_formats_without_later_system_messages_read_one_message(make_renderer):
    renderer = ComparisonRendererFromChatRenderer(make_renderer("gemma3", "gemma3"))
    prompt = [said("system", "Judge."), said("user", "Hi"), said("assistant", "Yes?")]
    asked = Comparison([*prompt, said("user", FOOD)], [said("assistant", "Pie")], [BEANS])
    system, user = renderer.comparison_to_convo(asked)
    assert system == prompt[0]
    assert user["content"] == (
        "User: Hi\n\nAssistant: Yes?\n\nUser: What is your favourite food?\n\n"
        "==== Completion A ====\n\nAssistant: Pie\n\n"
        "==== Completion B ====\n\nAssistant: Beans\n\n==== Preference ===="
    )
    renderer.build_generation_prompt(asked)


BEANS = said("assistant", "Beans")


@pytest.fixture
def builder(tmp_path, tokenizer_folder):
    """Makes a builder of reward-model data from rows; ``max_length`` and others as asked."""

    def make(*rows, batch_size=4, max_length=None, test=(), **settings):
        path = write_rows(tmp_path / "train.jsonl", *rows)
        test_path = write_rows(tmp_path / "test.jsonl", *test) if test else None
        config = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=tokenizer_folder("smollm2"),
            renderer_name="smollm2",
            max_length=max_length,
            batch_size=batch_size,
        )
        return ChatDatasetBuilderFromComparisons(
            common_config=config,
            comparison_builder=ComparisonBuilderFromJsonl(train_path=path, test_path=test_path),
            **settings,
        )

    return make


def labels_of(builder, data):
    decode = builder.tokenizer.decode
    return [decode(datum.loss_fn_inputs["target_tokens"].tolist()[-1:]) for datum in data]


def first_answers(builder, data):
    texts = [builder.tokenizer.decode(datum.model_input.to_ints()) for datum in data]
    return ["Yes" if "Yes" in text.split("Completion B")[0] else "No" for text in texts]


def test_a_label_is_trained_by_one_token_of_weight_one(builder):
    data = all_data(builder(*(pair_row(i) for i in range(8)))()[0])
    for datum in data:
        weights = datum.loss_fn_inputs["weights"].tolist()
        assert weights == [0.0] * (len(weights) - 1) + [1.0]


def test_orders_are_drawn_once_and_keep_the_label_right(builder):
    rows = [pair_row(i) for i in range(40)]
    made = builder(*rows)
    data = all_data(made()[0])
    labels = labels_of(made, data)
    assert [{"A": "Yes", "B": "No"}[label] for label in labels] == first_answers(made, data)
    assert 10 < labels.count("A") < 30
    assert labels == labels_of(made, all_data(builder(*rows)()[0]))
    assert labels != labels_of(made, all_data(builder(*rows, swap_seed=1)()[0]))


def test_swap_trains_both_orders(builder):
    made = builder(*(pair_row(i) for i in range(4)), swap=True)
    batch = made()[0].get_batch(0)
    assert len(batch) == 8
    labels = labels_of(made, batch)
    assert all({labels[i], labels[i + 1]} == {"A", "B"} for i in range(0, 8, 2))


def test_ties_are_trained_as_such(builder):
    tie = {
        "comparison": {"prompt_conversation": "Q", "completion_A": "Yes", "completion_B": "No"},
        "label": "Tie",
    }
    made = builder(tie, batch_size=1)
    assert labels_of(made, made()[0].get_batch(0)) == ["T"]


def test_comparisons_beyond_max_length_are_left_out_and_counted(builder):
    long = pair_row(1, chosen="Yes " * 200)
    made = builder(pair_row(0), long, pair_row(2), pair_row(3), max_length=100, test=[pair_row(4)])
    train, test = made()
    assert len(train.get_batch(0)) == 3
    train.get_batch(0)
    assert train.num_dropped == 1
    assert train.report() == [
        "1 comparisons skipped: 1 with more than max_length tokens, which would truncate the label"
    ]
    assert (len(all_data(test)), test.num_dropped, test.report()) == (1, 0, [])
    with pytest.raises(EmptyBatchError):
        builder(long, batch_size=1, max_length=100)()[0].get_batch(0)
