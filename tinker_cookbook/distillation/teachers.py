"""Teachers score the student's samples; the negative reverse KL becomes the advantage.

With ``d = logprob of the student - logprob of its teacher`` at each sampled token, of which the
expectation is the reverse KL(student || teacher) (Agarwal et al. 2023, arXiv 2306.13649; Gu et al.
2023, arXiv 2306.08543)::

    advantages += -coef * mask * d

Training is on the student's own samples, so every token at which it differs from the teacher gives
a signal.

``d`` is positive on average, so most sampled tokens have a negative advantage. Subtracting a
baseline keeps the expected gradient and reduces its variance (Williams 1992,
https://doi.org/10.1007/BF00992696)::

    advantages += coef * mask * (mean(d) - d)

``teacher_kl``
    Mean of ``d`` over the trained tokens of the batch, in nats: an estimate of KL(student ||
    teacher) that is exact on average, and may be below 0 by chance. Starts between 0.1 and 3 for
    most pairs of models and should fall towards 0. It rises if the learning rate is too high, or if
    other rewards conflict with the teacher.
``teacher_kl/dataset_i``
    The same over the groups of ``dataset_configs[i]``, against the teacher of that.
``teacher_kl/per_episode``
    ``d`` added up over an episode's tokens, and the mean of that over episodes: an estimate of the
    KL between whole answers. If answers become shorter, the mean per token may rise while this
    falls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.distillation.teacher_view import AnswerEndings, dataset_index
from tinker_cookbook.exceptions import (
    CheckpointError,
    DataValidationError,
    TinkerCookbookError,
    TrainingError,
)
from tinker_cookbook.preference.reference import reference_client
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.kl import (
    add_to_advantages,
    check_penalty,
    sampled_logprobs,
    trained_values,
)
from tinker_cookbook.rl.loop.adjuster import (
    Adjustment,
    AdvantageAdjuster,
    Mean,
    RolloutData,
    advantages_of,
    kl_is_significant,
)
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.training.weights import check_weights
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.model_inputs import score_datums

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient
    from tinker_cookbook.distillation.datasets import TeacherConfig
    from tinker_cookbook.training.config import TrainingConfig
    from tinker_cookbook.training.session import TrainingSession
else:
    tinker = lazy_module("tinker")

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrajectoryData:
    """Trajectory with its training data."""

    trajectory: Trajectory
    data: list[tinker.Datum]


@dataclass(frozen=True)
class Teacher:
    """Teacher that scores samples of the student.

    Attributes:
        client: Samples from the teacher's weights.
        endings: Translates to the teacher's chat format, where the teacher sees a prompt of its
            own; ``None``: it sees what the student does.
    """

    client: SamplingClient
    endings: AnswerEndings | None = None

    async def score(self, trajectories: Sequence[TrajectoryData]) -> list[_Array]:
        """Returns the log-probabilities [N] of each trajectory's trained tokens."""
        if self.endings is None:
            return await self._score_data([item.data for item in trajectories])
        # The teacher scores the same answer in its own chat format, after its own prompt.
        translated = [_in_teacher_format(item.trajectory, self.endings) for item in trajectories]
        scores = await self._score_data([trajectory_to_data(each, 0.0) for each in translated])
        return [
            _on_student_tokens(item.trajectory, self.endings, values)
            for item, values in zip(trajectories, scores, strict=True)
        ]

    async def _score_data(self, data_of: Sequence[list[tinker.Datum]]) -> list[_Array]:
        data_D = [datum for data in data_of for datum in data]
        try:
            scores_D = await self._logprobs(data_D)
        except TinkerCookbookError as error:
            longest = max(datum.model_input.length + 1 for datum in data_D)
            raise TrainingError(
                f"the teacher could not score the student's answers (the longest has {longest} "
                f"tokens with its prompt): {error}"
            ) from error
        places = iter(zip(data_D, scores_D, strict=True))
        out = []
        for data in data_of:
            pairs = [next(places) for _ in data]
            own, scores = [datum for datum, _ in pairs], [score for _, score in pairs]
            out.append(trained_values(own, scores, "teacher"))
        return out

    async def _logprobs(self, data_D: Sequence[tinker.Datum]) -> list[_Array]:
        return await score_datums(self.client, data_D)


class TeacherSignal(AdvantageAdjuster):
    """Advantages from the teachers' scores.

    Args:
        teachers: One for each of the run's datasets.
        coef: Weight of the teachers.
        discount: Above 0 the KL of later tokens counts too, each further one with one more factor.
        reward_coef: Weight of the environments' rewards; 0: teachers only.
        center: Take the mean of ``d`` over the data of the same dataset as baseline.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        coef: float = 1.0,
        discount: float = 0.0,
        reward_coef: float = 1.0,
        center: bool = False,
    ) -> None:
        check_penalty(coef, discount)
        self._center = center
        self._teachers = list(teachers)
        self._coef, self._discount, self._reward_coef = coef, discount, reward_coef

    async def adjust(self, rollouts: RolloutData) -> Adjustment:
        """Scores all trajectories with their teachers and changes the advantages."""
        # A trajectory may have several datums, but a teacher reads it as a whole.
        trajectories: dict[tuple[int, int], TrajectoryData] = {}
        for place, datum in zip(rollouts.places_D, rollouts.data_D, strict=True):
            entry = trajectories.setdefault(
                (place.group, place.member), TrajectoryData(rollouts.trajectory(place), [])
            )
            entry.data.append(datum)
        indices = [dataset_index(rollouts.groups[group].tags) for group, _ in trajectories]
        scores = await self._score(list(trajectories.values()), indices)
        has_rewards = self._weigh_rewards(rollouts.data_D)
        means, added = add_reverse_kl(
            rollouts.data_D,
            np.concatenate([np.empty(0), *scores]),
            [dataset_index(rollouts.groups[place.group].tags) for place in rollouts.places_D],
            self._coef,
            self._discount,
            center=self._center,
        )
        if "teacher_kl" in means:
            means["teacher_kl/per_episode"] = Mean(means["teacher_kl"].total, len(trajectories))
        return Adjustment(has_rewards or kl_is_significant(added, self._coef), means)

    async def _score(
        self, trajectories: Sequence[TrajectoryData], dataset_indices: Sequence[int]
    ) -> list[_Array]:
        """Returns each trajectory's scores by the teacher of its dataset."""

        async def score_dataset(index: int) -> None:
            own = [i for i, other in enumerate(dataset_indices) if other == index]
            values = await self._teachers[index].score([trajectories[i] for i in own])
            scores.update(zip(own, values, strict=True))

        scores: dict[int, _Array] = {}
        # All teachers score at the same time.
        await asyncio.gather(*map(score_dataset, sorted(set(dataset_indices))))
        return [scores[i] for i in range(len(trajectories))]

    def _weigh_rewards(self, data_D: Sequence[tinker.Datum]) -> bool:
        """Multiplies the advantages by ``reward_coef``; returns whether any is not 0."""
        if self._reward_coef != 1:
            for datum, values in zip(data_D, advantages_of(data_D), strict=True):
                weighed = (self._reward_coef * values).astype(np.float32)
                datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(weighed)
        return any(values.any() for values in advantages_of(data_D))


def add_reverse_kl(
    data_D: Sequence[tinker.Datum],
    teacher_logprobs: _Array,
    dataset_indices_D: Sequence[int],
    coef: float,
    discount: float,
    *,
    center: bool = False,
) -> tuple[dict[str, Mean], _Array]:
    """Adds ``-coef * d``, or ``coef * (mean(d) - d)``, to the advantages; changes ``data_D``.

    The mean is taken per dataset. Teachers differ in their mean KL, so with a common mean all
    answers of one dataset, good ones too, would have a negative advantage.

    Args:
        data_D: What the student sampled.
        teacher_logprobs: [N], for the trained tokens of all data in order.
        dataset_indices_D: Which dataset each datum comes from.
        coef: Weight.
        discount: As in ``rl.kl.add_to_advantages``.
        center: Whether the mean of ``d`` over the data of the same dataset is the baseline.

    Returns:
        ``teacher_kl`` and ``teacher_kl/dataset_i``, and what was added [N].
    """
    # d of the docstring, for the trained tokens of all data in order.
    difference = sampled_logprobs(data_D) - teacher_logprobs
    counts = [int(np.count_nonzero(_mask(datum))) for datum in data_D]
    baseline = np.zeros_like(difference)
    if center:
        dataset_of = np.repeat(np.asarray(dataset_indices_D, dtype=np.int64), counts)
        for number in np.unique(dataset_of):
            own = dataset_of == number
            baseline[own] = difference[own].mean()
    added = add_to_advantages(data_D, coef * (baseline - difference), discount)
    means: dict[str, Mean] = {}
    parts = np.split(difference, np.cumsum(counts)[:-1])
    for number, part in zip(dataset_indices_D, parts, strict=True):
        if part.size:
            mean = Mean(float(part.sum()), part.size)
            for name in ("teacher_kl", f"teacher_kl/dataset_{number}"):
                means[name] = means.get(name, Mean()) + mean
    return means, added


async def open_teacher(
    session: TrainingSession,
    config: TrainingConfig,
    teacher: TeacherConfig,
    where: str,
) -> SamplingClient:
    """Opens a client of the teacher's weights.

    Raises:
        CheckpointError: There are no such weights, or they are of another model than
            ``teacher.base_model``; names the setting.
    """
    path = teacher.load_checkpoint_path
    if path is not None:
        try:
            model = SimpleNamespace(model_name=teacher.base_model)
            await check_weights(session.connection.service, path, model)
        except CheckpointError as error:
            raise CheckpointError(f"{where}.load_checkpoint_path: {error}") from error
    return await reference_client(session, config, path or teacher.base_model)


def _mask(datum: tinker.Datum) -> npt.NDArray[np.float32]:
    return datum.loss_fn_inputs["mask"].to_numpy()


def _in_teacher_format(trajectory: Trajectory, endings: AnswerEndings) -> Trajectory:
    """Returns the trajectory with the teacher's prompts and end-of-answer tokens."""
    turns: list[Transition] = []
    for turn in trajectory.transitions:
        if turn.ac.tokens and turn.teacher_ob is None:
            raise DataValidationError(
                "a turn has no teacher prompt: it was sampled before the teacher had one; start a "
                "new run, or use the teacher settings of that time"
            )
        count, ending = endings.translate(turn.ac.tokens)
        tokens = [*turn.ac.tokens[: len(turn.ac.tokens) - count], *ending]
        turns.append(
            replace(
                turn,
                ob=turn.teacher_ob if turn.teacher_ob is not None else turn.ob,
                ac=TokensWithLogprobs(tokens, [0.0] * len(tokens)),
            )
        )
    return Trajectory(turns, trajectory.final_ob)


def _on_student_tokens(trajectory: Trajectory, endings: AnswerEndings, values: _Array) -> _Array:
    """Maps scores of the teacher's tokens to the student's tokens.

    If an ending has another number of tokens in the teacher's format, the difference between
    student and teacher over the whole ending is divided evenly among the student's tokens.
    """
    out = [np.empty(0)]
    start = 0
    for turn in trajectory.transitions:
        if turn.masked or not turn.ac.tokens:
            continue
        count, ending = endings.translate(turn.ac.tokens)
        body = len(turn.ac.tokens) - count
        out.append(values[start : start + body])
        start += body
        if count:
            sampled = np.asarray(turn.ac.logprobs[body:], dtype=np.float64)
            judged = float(values[start : start + len(ending)].sum())
            out.append(sampled - (float(sampled.sum()) - judged) / count)
            start += len(ending)
    return np.concatenate(out)
