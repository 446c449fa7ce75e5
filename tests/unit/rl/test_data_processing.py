"""Trajectories merged into datums."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types
from trajectory_samples import action, episode, fields, group, group_of_rewards, prompt, turn

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import data_processing
from tinker_cookbook.rl.data_processing import (
    assemble_training_data,
    check_provenance,
    data_for_loss,
    divide_by_action_tokens,
    trajectory_to_data,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

CAT = types.ImageChunk(data=b"cat", format="png", expected_tokens=3)
DOG = types.ImageChunk(data=b"dog", format="png", expected_tokens=2)


# --- one datum, field by field ------------------------------------------------------------------


def test_a_single_turn_becomes_one_shifted_datum():
    traj = episode(turn([1, 2, 3], action([4, 5], [-0.5, -0.25])))
    (datum,) = trajectory_to_data(traj, 1.5)
    assert fields(datum) == {
        "input": [1, 2, 3, 4],
        "target_tokens": [2, 3, 4, 5],
        "mask": [0, 0, 1, 1],
        "advantages": [0, 0, 1.5, 1.5],
        "logprobs": [0, 0, -0.5, -0.25],
    }
    dtypes = {name: v.to_numpy().dtype.name for name, v in datum.loss_fn_inputs.items()}
    assert dtypes == {
        "target_tokens": "int64",
        "mask": "float32",
        "advantages": "float32",
        "logprobs": "float32",
    }


def test_turns_that_extend_merge_and_others_begin_anew():
    traj = episode(
        turn([1], action([2, 3], [-1, -2])),
        turn([1, 2, 3, 9], action([4], [-3])),
        turn([1, 9], action([5], [-4])),
        turn([1, 9, 5], action([6], [-5])),
    )
    first, second = map(fields, trajectory_to_data(traj, -1.0))
    assert first == {
        "input": [1, 2, 3, 9],
        "target_tokens": [2, 3, 9, 4],
        "mask": [1, 1, 0, 1],
        "advantages": [-1, -1, 0, -1],
        "logprobs": [-1, -2, 0, -3],
    }
    assert second == {
        "input": [1, 9, 5],
        "target_tokens": [9, 5, 6],
        "mask": [0, 1, 1],
        "advantages": [0, -1, -1],
        "logprobs": [0, -4, -5],
    }


def test_masked_turns_stay_as_context_without_mask_advantage_or_logprobs():
    traj = episode(
        turn([1], TokensWithLogprobs([2], None), masked=True), turn([1, 2, 7], action([3], [-0.5]))
    )
    (datum,) = trajectory_to_data(traj, 2.0)
    assert fields(datum) == {
        "input": [1, 2, 7],
        "target_tokens": [2, 7, 3],
        "mask": [0, 0, 1],
        "advantages": [0, 0, 2],
        "logprobs": [0, 0, -0.5],
    }
    (all_masked,) = trajectory_to_data(episode(turn([1], [2], masked=True)), 2.0)
    assert not any(any(fields(all_masked)[k]) for k in ("mask", "advantages", "logprobs"))


def test_types_of_the_official_cookbook_are_found():
    assert isinstance(
        tinker.SampledProvenanceSpan(sequence_id="a", length=1), data_processing.ProvenanceSpan
    )
    assert data_processing.FlatOb == list[data_processing.FlatObElem]


def test_images_survive_merging_and_part_where_they_differ():
    traj = episode(
        turn(prompt([1], CAT, CAT, [2]), [3]),
        turn(prompt([1], CAT, CAT, [2, 3], DOG, [4]), [5]),
        turn(prompt([1], CAT, DOG, [2]), [6]),
    )
    first, second = trajectory_to_data(traj, 1.0)
    assert fields(first)["input"] == [1, CAT, CAT, 2, 3, DOG, 4]
    assert first.model_input.length == 1 + 3 + 3 + 2 + 2 + 1
    assert fields(first)["target_tokens"] == [0] * 6 + [2, 3, 0, 0, 4, 5]
    assert fields(first)["mask"] == [0] * 7 + [1, 0, 0, 0, 1]
    assert fields(second)["input"] == [1, CAT, DOG, 2]
    # Text on both sides of a chunk boundary is one text: only positions count.
    split = episode(turn(prompt([1], [2]), [3]), turn(prompt([1, 2, 3], [4]), [5]))
    assert len(trajectory_to_data(split, 1.0)) == 1


def test_untrainable_data_is_refused():
    for traj, message in [
        (episode(turn([1], [2]), turn([], [3])), "turn 1: its observation is empty"),
        (episode(turn([1], action([2, 3], [-1.0]))), r"turn 0: .* 2 tokens, but .* shape \(1,\)"),
        (episode(turn([1], action([2, 3], [-1.0, float("nan")]))), "action token 1 is nan"),
        (episode(turn(prompt([1], types.ImageChunk(data=b"", format="png")), [2])), "set its exp"),
    ]:
        with pytest.raises(DataValidationError, match=message):
            trajectory_to_data(traj, 1.0)
    without = TokensWithLogprobs([2], None)
    with pytest.raises(DataValidationError, match="turn 0: this completion has no log-prob"):
        trajectory_to_data(episode(turn([1], without)), 1.0)


# --- against a plain loop -----------------------------------------------------------------------


def plain_merge(traj, advantage):
    """The rules, position by position; an image is (chunk, part of it)."""
    runs, run = [], []
    for t in traj.transitions:
        seen = []
        for chunk in t.ob.chunks:
            if chunk.type == "encoded_text":
                seen += list(chunk.tokens)
            else:
                seen += [(chunk, part) for part in range(chunk.length)]
        known = [position for position, _, _ in run]
        if seen[: len(known)] != known:
            runs.append(run)
            run, known = [], []
        run = run + [(position, 0.0, 0.0) for position in seen[len(known) :]]
        trained = 0.0 if t.masked else 1.0
        run += [(k, trained, q * trained) for k, q in zip(t.ac.tokens, t.ac.logprobs, strict=True)]
    out = []
    for whole in [*runs, run]:
        inputs = [p for p, _, _ in whole[:-1] if not isinstance(p, tuple) or p[1] == 0]
        out.append(
            {
                "input": [p[0] if isinstance(p, tuple) else p for p in inputs],
                "target_tokens": [0 if isinstance(p, tuple) else p for p, _, _ in whole[1:]],
                "mask": [m for _, m, _ in whole[1:]],
                "advantages": [m * advantage for _, m, _ in whole[1:]],
                "logprobs": [np.float32(q) for _, _, q in whole[1:]],
            }
        )
    return out


def random_trajectory(rng):
    """Each turn goes on from the last, or from a part of it, or from something else."""
    turns, parts = [], [[1], CAT]
    for _ in range(rng.integers(1, 9)):
        way = rng.integers(5)
        if way == 0:
            parts = parts[: rng.integers(1, len(parts) + 1)]
        elif way == 1:
            parts = [[int(rng.integers(3))]]
        for _ in range(rng.integers(3)):
            new = [int(k) for k in rng.integers(0, 3, size=rng.integers(1, 4))]
            parts = [*parts, [CAT, DOG, new, new][rng.integers(4)]]
        ac = [int(k) for k in rng.integers(0, 3, size=rng.integers(1, 4))]
        turns.append(turn(prompt(*parts), ac, masked=bool(rng.integers(4) == 0)))
        parts = [*parts, ac]
    return episode(*turns)


def test_random_trajectories_equal_the_plain_loop():
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(300):
        traj = random_trajectory(rng)
        data = trajectory_to_data(traj, 0.5)
        sizes.append(len(traj.transitions) - len(data))
        assert [fields(datum) for datum in data] == plain_merge(traj, 0.5)
    assert min(sizes) == 0  # nothing merged
    assert max(sizes) >= 5


# --- sequence extension, as the document tells --------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tokenizer_folder):
    """(tokenizer, renderer that keeps thinking, renderer that strips it)."""
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    keep = get_renderer("qwen3?strip_thinking_from_history=false", tokenizer)
    return tokenizer, keep, get_renderer("qwen3", tokenizer)


def play(tokenizer, renderer, exchanges):
    """Each exchange is (question, thinking, answer)."""
    messages, turns = [], []
    for question, thinking, answer in exchanges:
        messages = [*messages, {"role": "user", "content": question}]
        text = f"<think>\n{thinking}\n</think>\n\n{answer}<|im_end|>"
        sampled = tokenizer.encode(text, add_special_tokens=False)
        turns.append(turn(renderer.build_generation_prompt(messages), sampled))
        message, how = renderer.parse_response(sampled)
        assert how.is_clean
        messages.append(message)
    return episode(*turns)


def text_of(datum, tokenizer):
    """The datum's whole text, and the pieces of it that are trained."""
    ids = fields(datum)["input"][:1] + fields(datum)["target_tokens"]
    mask = np.array([0, *fields(datum)["mask"]])
    pieces = np.split(np.array(ids), np.flatnonzero(np.diff(mask)) + 1)
    return tokenizer.decode(ids), [tokenizer.decode(piece) for piece in pieces[1::2]]


MATH = [
    ("What is 2+2?", "Let me calculate...", "4"),
    ("What is 3+3?", "Let me calculate...", "6"),
]
THOUGHT = "<think>\nLet me calculate...\n</think>\n\n"


def test_qwen3_with_thinking_hidden_is_a_datum_for_each_turn(qwen):
    tokenizer, _, strip = qwen
    data = trajectory_to_data(play(tokenizer, strip, MATH), 1.0)
    (first, trained_first), (second, trained_second) = (text_of(d, tokenizer) for d in data)
    assert first == (
        f"<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n{THOUGHT}4<|im_end|>"
    )
    assert second == (
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        f"<|im_start|>user\nWhat is 3+3?<|im_end|>\n<|im_start|>assistant\n{THOUGHT}6<|im_end|>"
    )
    assert trained_first == [f"{THOUGHT}4<|im_end|>"]
    assert trained_second == [f"{THOUGHT}6<|im_end|>"]


@pytest.mark.parametrize(("num_turns", "expected"), [(3, [3]), (6, [3, 3]), (8, [3, 3, 2])])
def test_compaction_every_three_turns_is_a_datum_for_three_turns(qwen, num_turns, expected):
    tokenizer, _, strip = qwen
    compact = get_renderer("qwen3?compact_thinking_every=3", tokenizer)
    turns = [(f"Q{i}", f"about {i}", f"A{i}") for i in range(1, num_turns + 1)]
    data = trajectory_to_data(play(tokenizer, compact, turns), 1.0)
    texts = [text_of(datum, tokenizer) for datum in data]
    assert [len(trained) for _, trained in texts] == expected
    done = 0
    for (whole, trained), count in zip(texts, expected, strict=True):
        now = range(done + 1, done + count + 1)
        assert trained == [f"<think>\nabout {i}\n</think>\n\nA{i}<|im_end|>" for i in now]
        assert [i for i in range(1, num_turns + 1) if f"about {i}" in whole] == list(now)
        assert [i for i in range(1, num_turns + 1) if f"A{i}" in whole] == list(range(1, now.stop))
        # History that lost its thinking has the tokens that it has without the option.
        stripped = [m for i in range(1, done + 1) for m in _exchange(i, "")]
        prompt = strip.build_generation_prompt([*stripped, _exchange(done + 1, "")[0]])
        assert whole.startswith(tokenizer.decode(prompt.to_ints()))
        done += count
    # Supervised examples have the same tokens as the episode.
    messages = [m for i in range(1, num_turns + 1) for m in _exchange(i, f"about {i}")]
    examples = compact.build_merged_examples(messages, "all_assistant_messages")
    assert [tokenizer.decode(tokens.to_ints()) for tokens, _ in examples] == [t for t, _ in texts]


def _exchange(number, thinking):
    answer = [{"type": "text", "text": f"A{number}"}]
    if thinking:
        answer.insert(0, {"type": "thinking", "thinking": thinking})
    question = {"role": "user", "content": f"Q{number}"}
    return question, {"role": "assistant", "content": answer}


# --- batches ------------------------------------------------------------------------------------


def test_errors_say_where():
    groups = [group_of_rewards(1, 0), group(episode(turn([], [1])))]
    with pytest.raises(DataValidationError, match="group 1, member 0: turn 0: its observation is"):
        assemble_training_data(groups, [np.zeros(2), np.zeros(1)])


def test_provenance_names_the_sample_and_place_of_every_position():
    traj = episode(
        turn(prompt([1], CAT, [2]), action([3, 4], sequence_id="a")),
        turn(prompt([1], CAT, [2, 3, 4]), action([5], sequence_id="b")),
        turn(prompt([1], CAT, [2, 3, 4, 5, 6]), action([7], sequence_id="c")),
    )
    (plain,) = trajectory_to_data(traj, 1.0, include_provenance=False)
    assert plain.model_input_spans is None
    (datum,) = trajectory_to_data(traj, 1.0)
    assert [
        (type(s).__name__[:6], s.sequence_id, s.offset, s.length) for s in datum.model_input_spans
    ] == [
        ("Prompt", "a", 0, 5),
        ("Sample", "a", 0, 2),
        ("Sample", "b", 0, 1),
        ("Prompt", "c", 8, 1),
    ]
    assert [
        (type(s).__name__[:6], s.sequence_id, s.offset, s.length) for s in datum.loss_fn_input_spans
    ] == [
        ("Prompt", "a", 1, 4),
        ("Sample", "a", 0, 2),
        ("Sample", "b", 0, 1),
        ("Prompt", "c", 8, 1),
        ("Sample", "c", 0, 1),
    ]
    (kept,) = data_for_loss([datum], "stable_reinforce")
    assert kept.model_input_spans == datum.model_input_spans


def test_advantages_are_divided_by_the_action_tokens_of_all_data():
    first = episode(turn(prompt([1, 2]), action([3, 4, 5], sequence_id="a")))
    second = episode(turn(prompt([1, 2]), action([6], sequence_id="b")))
    data = trajectory_to_data(first, 2.0) + trajectory_to_data(second, -1.0)
    divided = divide_by_action_tokens(data)
    found = [datum.loss_fn_inputs["advantages"].tolist() for datum in divided]
    assert found == [[0.0, 0.5, 0.5, 0.5], [0.0, -0.25]]
    assert [datum.loss_fn_input_spans for datum in divided] == [
        datum.loss_fn_input_spans for datum in data
    ]
    assert data[0].loss_fn_inputs["advantages"].tolist() == [0.0, 2.0, 2.0, 2.0]


def test_a_datum_with_an_unnamed_sequence_has_no_provenance_and_cannot_train_with_the_loss():
    data, _ = assemble_training_data([group_of_rewards(1)], [np.zeros(1)])
    assert [datum.loss_fn_input_spans for datum in data] == [None]
    check_provenance(data, "importance_sampling")
    with pytest.raises(DataValidationError, match=r"datum 0: it has no provenance.*sequence_id"):
        check_provenance(data, "stable_reinforce")
