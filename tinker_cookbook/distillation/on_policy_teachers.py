"""Teachers of on-policy distillation score the student's samples by the reverse KL.

With ``d = logprob of the student - logprob of its teacher`` at each sampled token, the
expectation of ``d`` is the reverse KL(student || teacher) (Agarwal et al. 2023, arXiv 2306.13649;
Gu et al. 2023, arXiv 2306.08543)::

    advantages += -coef * mask * d

The student trains on its own samples, so every token at which it differs from the teacher has
a signal.

``d`` is positive on average, so most sampled tokens have a negative advantage. Subtracting a
baseline keeps the expected gradient and reduces its variance (Williams 1992,
https://doi.org/10.1007/BF00992696)::

    advantages += coef * mask * (mean(d) - d)

The sampled token alone is a noisy estimate. With ``n_teacher_targets`` = K the loss is the KL
itself over the teacher's top K, with all other tokens as one more outcome (generalised knowledge
distillation, arXiv 2306.13649, on samples of the student)::

    loss = coef * sum over positions t, outcomes k of  p_tk * (log p_tk - log q_tk)

The metric ``teacher_kl`` is the mean of ``d`` in nats, ``teacher_kl/dataset_i`` the same mean over
the groups of one dataset, and ``teacher_kl/per_episode`` the mean over episodes of its sum
(docs/rl-metrics.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tinker_cookbook.backends import Future, SamplingClient, TrainingClient
from tinker_cookbook.distillation.on_policy_prompts import AnswerEndings, dataset_index
from tinker_cookbook.distillation.topk_distributions import PROBABILITY_ROUNDING, score_with_topk
from tinker_cookbook.exceptions import TinkerCookbookError, TrainingError
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import REFERENCE_LOGPROBS, trajectory_to_data
from tinker_cookbook.rl.loop.adjuster import (
    Adjustment,
    AdvantageAdjuster,
    Mean,
    RolloutData,
    advantages_of,
    kl_is_significant,
)
from tinker_cookbook.rl.metrics import (
    add_to_advantages,
    sampled_logprobs,
    trained_values,
)
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.utils.imports import tinker, torch
from tinker_cookbook.utils.model_inputs import score_datums, whole_sequence

_Array: TypeAlias = npt.NDArray[np.float64]

TrajectoryData: TypeAlias = "tuple[Trajectory, list[tinker.Datum]]"
"""A trajectory with its training data."""

_IDS, _PROBABILITIES = "teacher_ids", "teacher_probabilities"


@dataclass(frozen=True)
class Teacher:
    """Teacher that scores samples of the student.

    ``endings`` is for a teacher with another prompt or chat format than the student's. With ``k``
    above 0, :meth:`score` also attaches the teacher's ``k`` most probable tokens at each position
    to the datum, for :class:`TopKSignal`; ``vocab_size`` is the student's.
    """

    client: SamplingClient
    endings: AnswerEndings | None = None
    k: int = 0
    vocab_size: int | None = None

    async def score(self, trajectories: Sequence[TrajectoryData]) -> list[_Array]:
        """Returns the log-probabilities [N] of each trajectory's trained tokens."""
        data_of = [data for _, data in trajectories]
        if self.endings is not None:
            # A teacher with another prompt scores the answer in its own chat format, after that
            # prompt.
            translated = [self.endings.to_teacher(trajectory) for trajectory, _ in trajectories]
            data_of = [trajectory_to_data(each, 0.0) for each in translated]
        data_D = [datum for data in data_of for datum in data]
        try:
            if self.k:
                scores_D = list(await asyncio.gather(*map(self._attach_topk, data_D)))
            else:
                scores_D = await score_datums(self.client, data_D)
        except TinkerCookbookError as error:
            longest = max(datum.model_input.length + 1 for datum in data_D)
            raise TrainingError(
                f"the teacher could not score the student's answers (the longest has {longest} "
                f"tokens with its prompt): {error}"
            ) from error
        # Convert back to one array per trajectory.
        # A trajectory has several datums if its context was rewritten between turns.
        ends = np.cumsum([len(data) for data in data_of], dtype=np.int64).tolist()
        scores = [
            trained_values(data_D[start:end], scores_D[start:end], "teacher")
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        if self.endings is None:
            return scores
        return [
            self.endings.to_student(trajectory, values)
            for (trajectory, _), values in zip(trajectories, scores, strict=True)
        ]

    async def _attach_topk(self, datum: tinker.Datum) -> _Array:
        """Attaches the top ``k`` [T, k] to the datum; returns the log-probabilities [T]."""
        topk, logprobs = await score_with_topk(self.client, whole_sequence(datum), self.k)
        # Only action tokens are trained, so other tokens get no targets.
        trained = datum.loss_fn_inputs["mask"].to_numpy() != 0
        rows = topk[trained].within(self.vocab_size)
        ids = np.zeros((len(trained), self.k), np.int64)
        q = np.zeros((len(trained), self.k), np.float32)
        ids[trained], q[trained] = rows.ids, np.exp(rows.logprobs)
        datum.loss_fn_inputs[_IDS] = tinker.TensorData.from_numpy(ids)
        datum.loss_fn_inputs[_PROBABILITIES] = tinker.TensorData.from_numpy(q)
        return logprobs


class TeacherSignal(AdvantageAdjuster):
    """Computes advantages from the scores of ``teachers``, one teacher per dataset.

    ``Config`` of ``train_on_policy`` documents the settings.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        coef: float = 1.0,
        discount: float = 0.0,
        reward_coef: float = 1.0,
        center: bool = False,
    ) -> None:
        self._center = center
        self._teachers = list(teachers)
        self._coef, self._discount, self._reward_coef = coef, discount, reward_coef

    async def adjust(self, rollouts: RolloutData) -> Adjustment:
        """Scores all trajectories with their teachers and changes the advantages."""
        data_D = rollouts.data_D
        # A trajectory may have several datums, but the teacher scores it as a whole.
        trajectories: dict[tuple[int, int], TrajectoryData] = {}
        for origin, datum in zip(rollouts.origins_D, data_D, strict=True):
            member = (origin.group, origin.member)
            _, own_data = trajectories.setdefault(member, (rollouts.trajectory(origin), []))
            own_data.append(datum)
        items = list(trajectories.values())
        dataset_of = [dataset_index(rollouts.groups[group].tags) for group, _ in trajectories]
        scores: dict[int, _Array] = {}

        async def score_dataset(number: int) -> None:
            own = [i for i, other in enumerate(dataset_of) if other == number]
            # Each teacher scores only the trajectories of its dataset.
            values = await self._teachers[number].score([items[i] for i in own])
            scores.update(zip(own, values, strict=True))

        # All teachers score concurrently.
        await asyncio.gather(*map(score_dataset, sorted(set(dataset_of))))
        # So far, the advantages are only from the environments' rewards: weight these first.
        if self._reward_coef != 1:
            for datum, values in zip(data_D, advantages_of(data_D), strict=True):
                weighed = (self._reward_coef * values).astype(np.float32)
                datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(weighed)
        # Without rewards, there is no signal if the teacher agrees with the student.
        has_rewards = any(values.any() for values in advantages_of(data_D))
        teacher = np.concatenate([np.empty(0), *(scores[i] for i in range(len(items)))])
        keep_reference(data_D, teacher)
        means, added = add_reverse_kl(
            data_D,
            teacher,
            [dataset_index(rollouts.groups[origin.group].tags) for origin in rollouts.origins_D],
            self._coef,
            self._discount,
            center=self._center,
        )
        if "teacher_kl" in means:
            means["teacher_kl/per_episode"] = Mean(means["teacher_kl"].total, len(items))
        return Adjustment(has_rewards or kl_is_significant(added, self._coef), means)


def keep_reference(data_D: Sequence[tinker.Datum], logprobs: _Array) -> None:
    """Adds the teacher's log-probabilities [N] of the trained tokens to the data."""
    start = 0
    for datum in data_D:
        trained = datum.loss_fn_inputs["mask"].to_numpy() != 0
        values = np.full(len(trained), np.nan, np.float32)
        count = int(np.count_nonzero(trained))
        values[trained] = logprobs[start : start + count]
        start += count
        datum.loss_fn_inputs[REFERENCE_LOGPROBS] = tinker.TensorData.from_numpy(values)


def add_reverse_kl(
    data_D: Sequence[tinker.Datum],
    teacher_logprobs: _Array,
    dataset_indices_D: Sequence[int],
    coef: float,
    discount: float,
    *,
    center: bool = False,
) -> tuple[dict[str, Mean], _Array]:
    """Adds ``-coef * d``, or with ``center`` ``coef * (mean(d) - d)``, to the advantages.

    ``teacher_logprobs`` [N] belong to the trained tokens of all data, in order. Changes ``data_D``;
    returns ``teacher_kl`` and ``teacher_kl/dataset_i``, and the added values [N].
    """
    # One sampled token per position is an unbiased estimate of the reverse KL at that position.
    difference = sampled_logprobs(data_D) - teacher_logprobs
    # Number of trained tokens per datum, to map the flat arrays [N] to datums and datasets.
    counts = [np.count_nonzero(datum.loss_fn_inputs["mask"].to_numpy()) for datum in data_D]
    baseline = np.zeros_like(difference)
    if center:
        # Teachers differ in their mean KL. With a common mean, all answers of one dataset, good
        # ones too, would have a negative advantage.
        dataset_of = np.repeat(np.asarray(dataset_indices_D, dtype=np.int64), counts)
        for number in np.unique(dataset_of):
            own = dataset_of == number
            baseline[own] = difference[own].mean()
    added = add_to_advantages(data_D, coef * (baseline - difference), discount)
    means: dict[str, Mean] = {}
    parts = np.split(difference, np.cumsum(counts)[:-1])
    for number, part in zip(dataset_indices_D, parts, strict=True):
        if part.size:
            # Keep sums and counts, so that the means of minibatches can be combined per token.
            mean = Mean(float(part.sum()), part.size)
            for name in ("teacher_kl", f"teacher_kl/dataset_{number}"):
                means[name] = means.get(name, Mean()) + mean
    return means, added


class TopKSignal(TeacherSignal):
    """Trains on the top-K distributions attached by :meth:`Teacher.score`.

    Metrics and advantages are computed from the sampled tokens, as with any other teacher.
    """

    def submit(
        self, client: TrainingClient, data_D: Sequence[tinker.Datum], config: Config
    ) -> Future[tinker.ForwardBackwardOutput]:
        """Queues one pass with autograd."""
        data = []
        for datum in data_D:
            inputs = datum.loss_fn_inputs
            q = inputs[_PROBABILITIES].to_numpy()
            # The sampled token is an additional target [T, K + 1] with weight 0: its
            # log-probability is only for the metrics.
            sampled = inputs["target_tokens"].to_numpy()[:, None]
            fields = {
                "target_tokens": np.concatenate([inputs[_IDS].to_numpy(), sampled], axis=1),
                "weights": np.concatenate([q, np.zeros_like(q[:, :1])], axis=1),
            }
            arrays = {name: tinker.TensorData.from_numpy(array) for name, array in fields.items()}
            data.append(replace(datum, loss_fn_inputs=arrays))
        return client.forward_backward_custom(data, TopKReverseKL(self._coef))

    def trained_logprobs(self, output: tinker.ForwardBackwardOutput) -> list[Any]:
        """Returns the log-probabilities [T] of the sampled tokens, the last target of each row."""
        return [values.to_numpy()[:, -1] for values in super().trained_logprobs(output)]


class TopKReverseKL:
    """The top-K loss above, for ``forward_backward_custom``; ``weights`` [T, K] are ``q``."""

    # The loss is a sum over datums that reads only trained positions.
    group_size = 1
    trained_only = True

    def __init__(self, coef: float = 1.0) -> None:
        self._coef = coef

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns the loss of these datums, summed over their positions."""
        total = logprobs[0].new_zeros(())
        for datum, log_p_all in zip(data, logprobs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_torch().to(log_p_all.device)
            # Rows without a target belong to prompts and observations.
            at = (weights > 0).any(-1)
            q, present = weights[at], weights[at] > 0
            # An entry without a target has the id of another token, so mask it.
            log_p = log_p_all[at].masked_fill(~present, 0.0)
            # p is over the whole vocabulary, so its remainder is a real probability.
            p = log_p.exp() * present
            inside = (p * (log_p - torch.where(present, q, 1.0).log())).sum()
            # All tokens outside the top K form one additional outcome.
            p_rest = (1 - p.sum(-1)).clamp_min(PROBABILITY_ROUNDING)
            q_rest = (1 - q.sum(-1)).clamp_min(PROBABILITY_ROUNDING)
            total = total + inside + (p_rest * (p_rest / q_rest).log()).sum()
        return self._coef * total, {}
