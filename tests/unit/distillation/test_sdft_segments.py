"""Self-distillation on answers of several actions, and on teachers that answer in part."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import tinker

from tinker_cookbook.distillation import sdft

PROMPT = tinker.ModelInput.from_ints([90, 91])
BUILDERS = [sdft.build_topk_distillation_datums, sdft.build_reverse_kl_datums]


def rollout() -> tinker.Datum:
    """Two actions with an observation between them: 10 11 | 20 21 | 30 31, behind 1 2."""
    tokens, mask = [1, 2, 10, 11, 20, 21, 30, 31], [0, 1, 1, 0, 0, 1, 1]
    fields = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "mask": np.array(mask, np.float32),
        "logprobs": -np.array(mask, np.float32),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={n: tinker.TensorData.from_numpy(a) for n, a in fields.items()},
    )


class Teacher:
    """Gives token t the log-probability -t / 10, and t + 100 and t + 200 as the most probable.

    ``rows`` cuts its answers; ``without`` is a row that it leaves out.
    """

    def __init__(self, rows: int | None = None, without: int | None = None) -> None:
        self._rows, self._without = rows, without
        self.read: list[list[int]] = []

    def _of_each(self, prompt, value):
        tokens = prompt.to_ints()
        self.read.append(tokens)
        found = [None, *map(value, tokens[1:])]
        if self._without is not None:
            found[self._without] = None
        return found[: self._rows]

    async def compute_logprobs(self, prompt):
        return self._of_each(prompt, lambda token: -token / 10)

    async def sample(self, prompt, **_):
        rows = self._of_each(prompt, lambda t: [(t + 100, np.log(0.6)), (t + 200, np.log(0.2))])
        return SimpleNamespace(topk_prompt_logprobs=rows)


def build(builder, teacher, datum=None, **settings):
    given = {"topk": 3, "skip_first_n_tokens": 0, **settings}
    data = [datum or rollout()]
    (made,), metrics = asyncio.run(builder(data, [{"group_idx": 0}], teacher, [PROMPT], **given))
    fields = made.loss_fn_inputs
    return fields["target_tokens"].to_numpy(), fields["weights"].to_numpy(), metrics


def score(teacher, datum, **settings):
    found = sdft.compute_sdft_advantages([datum], [{"group_idx": 0}], teacher, [PROMPT], **settings)
    metrics = asyncio.run(found)
    return datum.loss_fn_inputs["advantages"].to_numpy(), metrics


@pytest.mark.parametrize("builder", BUILDERS)
def test_targets_of_each_action_are_those_of_its_own_tokens(builder):
    teacher = Teacher()
    ids, weights, metrics = build(builder, teacher)
    assert teacher.read == [[90, 91, 10, 11, 20, 21, 30, 31]]
    assert ids[[1, 2, 5, 6], 0].tolist() == [110, 111, 130, 131]
    assert weights[[1, 2, 5, 6]] == pytest.approx(np.tile([0.75, 0.25, 0], (4, 1)))
    assert not weights[[0, 3, 4]].any()
    assert metrics["sdft/total_completion_tokens"] == 4
    assert metrics.get("sdft/total_completion_positions", 4) == 4


def test_an_action_beyond_the_context_gets_no_targets():
    teacher = Teacher()
    _, weights, metrics = build(BUILDERS[0], teacher, max_context_length=7)
    assert teacher.read == [[90, 91, 10, 11, 20, 21, 30]]
    assert np.flatnonzero(weights.any(-1)).tolist() == [1, 2, 5]
    assert metrics["sdft/teacher_truncated_count"] == 1


def test_a_teacher_prompt_that_does_not_fit_is_not_sent():
    teacher = Teacher()
    _, weights, metrics = build(BUILDERS[0], teacher, max_context_length=1)
    advantages, _ = score(teacher, rollout(), max_context_length=1)
    assert teacher.read == []
    assert not weights.any()
    assert not advantages.any()
    assert metrics["sdft/num_without_targets"] == metrics["sdft/teacher_truncated_count"] == 1


@pytest.mark.parametrize(("teacher", "kept"), [(Teacher(6), [1, 2]), (Teacher(None, 3), [1, 5, 6])])
def test_rows_that_the_teacher_left_out_are_counted_and_shift_nothing(teacher, kept):
    ids, weights, metrics = build(BUILDERS[0], teacher)
    assert np.flatnonzero(weights.any(-1)).tolist() == kept
    assert ids[kept, 0].tolist() == [{1: 110, 2: 111, 5: 130, 6: 131}[at] for at in kept]
    assert metrics["sdft/teacher_missing_count"] == 4 - len(kept)


def test_advantages_are_the_differences_at_the_sampled_tokens():
    advantages, metrics = score(Teacher(), rollout())
    assert advantages == pytest.approx([0, 0, -0.1, 0, 0, -2, -2.1])
    assert metrics["sdft/mean_teacher_lp"] == pytest.approx(-8.2 / 4)
    assert metrics["sdft/mean_student_lp"] == -1
    assert metrics["sdft/mean_advantage"] == pytest.approx(-4.2 / 4)
    assert metrics["sdft/num_datums"] == 1
    # What the teacher sent no score for has none; the means are still over all four tokens.
    advantages, metrics = score(Teacher(), rollout(), max_context_length=6)
    assert advantages == pytest.approx([0, 0, -0.1, 0, 0, 0, 0])
    assert metrics["sdft/mean_advantage"] == pytest.approx(-0.1 / 4)
    assert metrics["sdft/teacher_truncated_count"] == 1
