"""From trajectories to training data.

A turn's observation is the whole prompt, so it mostly begins with everything that came before it:
the last observation and the last action. As long as it does, turns are one sequence and are trained
as one datum; where it does not (a renderer strips earlier thinking, say), a new datum begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.advantages import (
    compute_advantages,
    indices_of_varying_groups,
    remove_constant_reward_groups,
)
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.utils.imports import lazy_exports, lazy_module
from tinker_cookbook.utils.model_inputs import ChunkKeys, Keys

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.rl.envs.flat_observations import FlatOb, FlatObElem, ProvenanceSpan
else:
    tinker = lazy_module("tinker")
    types = lazy_module("tinker.types")

__all__ = [
    "DatumPlace",
    "FlatOb",
    "FlatObElem",
    "ProvenanceSpan",
    "assemble_training_data",
    "check_provenance",
    "compute_advantages",
    "data_for_loss",
    "divide_by_action_tokens",
    "indices_of_varying_groups",
    "remove_constant_reward_groups",
    "trajectory_to_data",
]

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(
        ("FlatOb", "FlatObElem", "ProvenanceSpan"), "tinker_cookbook.rl.envs.flat_observations"
    ),
)


@dataclass(frozen=True)
class DatumPlace:
    """Whose datum it is: the place of its group in the batch and of its trajectory in the group."""

    group: int
    member: int


def trajectory_to_data(
    traj: Trajectory, traj_advantage: float, include_provenance: bool = True
) -> list[tinker.Datum]:
    """One datum for each longest run of turns of which each extends the one before.

    A turn extends the last if its observation begins with the last observation and action, token
    by token (images: chunk by chunk). Of a run of T tokens the datum's ``model_input`` is all but
    the last and position i predicts token i + 1; all of the following are [T - 1]:

    - ``target_tokens`` int64; 0 where an image stands
    - ``mask`` float32: 1 for action tokens that are trained, 0 for observations and masked turns
    - ``advantages`` float32: ``traj_advantage * mask``
    - ``logprobs`` float32: those of the sampler where the mask is 1, else 0

    A run without an action token, or of masked turns alone, is a datum whose mask is 0 throughout.
    Runs of fewer than two tokens are left out.

    Args:
        traj: What was played.
        traj_advantage: Of the whole trajectory; each of its action tokens gets it.
        include_provenance: Attach which sampled sequence each token came from
            (``Datum.with_provenance``), as ``stable_reinforce`` needs it. A datum of which an
            action has no ``sequence_id`` gets none.

    Raises:
        DataValidationError: An action has no or not as many log-probabilities as tokens, or one
            that is not finite; an observation is empty; an image has no ``expected_tokens``.
    """
    return _to_data(traj, traj_advantage, include_provenance, unanswered=True)


def _to_data(
    traj: Trajectory, advantage: float, provenance: bool, unanswered: bool
) -> list[tinker.Datum]:
    """As ``trajectory_to_data``; ``unanswered`` keeps runs without an action token."""
    if not np.isfinite(advantage):
        raise DataValidationError(
            f"traj_advantage: got {advantage}, expected a finite number; check the rewards"
        )
    chunks = ChunkKeys()
    return [
        run.to_datum(advantage, chunks, provenance)
        for run in _runs(traj, chunks)
        if run.answered or (unanswered and run.length > 1)
    ]


def assemble_training_data(
    trajectory_groups_P: Sequence[TrajectoryGroup],
    advantages_P: Sequence[npt.NDArray[np.floating[Any]]],
    include_provenance: bool = True,
) -> tuple[list[tinker.Datum], list[DatumPlace]]:
    """Returns the data of all trajectories in order, and where each datum comes from.

    ``advantages_P`` holds [G] for each group, as ``compute_advantages`` gives them. Runs without an
    action token, which train nothing, are left out. Raises DataValidationError where the lengths
    differ, and what ``trajectory_to_data`` raises, naming group and member.
    """
    _check_lengths(trajectory_groups_P, advantages_P)
    data_D: list[tinker.Datum] = []
    places_D: list[DatumPlace] = []
    for g, (group, advantages_G) in enumerate(zip(trajectory_groups_P, advantages_P, strict=True)):
        for m, (traj, advantage) in enumerate(zip(group.trajectories_G, advantages_G, strict=True)):
            try:
                made = _to_data(traj, float(advantage), include_provenance, unanswered=False)
            except DataValidationError as error:
                raise DataValidationError(f"group {g}, member {m}: {error}") from error
            data_D += made
            places_D += [DatumPlace(g, m)] * len(made)
    return data_D, places_D


def data_for_loss(data_D: Sequence[tinker.Datum], loss_fn: str) -> list[tinker.Datum]:
    """Returns the data with the fields that ``loss_fn`` takes; arrays are shared, not copied.

    Backends refuse fields that a loss does not use, and ``mask`` is ours: it goes, as advantages
    are 0 where it is. ``gspo`` averages over the sequence and takes it as ``sequence_ratio_mask``.
    """
    out = []
    for datum in data_D:
        inputs = {name: value for name, value in datum.loss_fn_inputs.items() if name != "mask"}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = datum.loss_fn_inputs["mask"]
        out.append(replace(datum, loss_fn_inputs=inputs))
    return out


def _check_lengths(
    trajectory_groups_P: Sequence[TrajectoryGroup],
    advantages_P: Sequence[npt.NDArray[np.floating[Any]]],
) -> None:
    groups = [len(group.trajectories_G) for group in trajectory_groups_P]
    given = [len(advantages_G) for advantages_G in advantages_P]
    if groups != given:
        raise DataValidationError(
            f"advantages_P: got groups of {given}, expected {groups}, one advantage for each "
            "trajectory"
        )


@dataclass
class _Run:
    """Turns that extend one another: arrays that are joined when the run is complete."""

    turns: list[_Turn] = field(default_factory=list)
    length: int = 0

    @property
    def answered(self) -> bool:
        return any(len(turn.action) for turn in self.turns)

    def add(self, turn: _Turn) -> None:
        self.turns.append(turn)
        self.length += len(turn.new) + len(turn.action)

    def to_datum(self, advantage: float, chunks: ChunkKeys, provenance: bool) -> tinker.Datum:
        keys = np.concatenate([part for turn in self.turns for part in (turn.new, turn.action)])
        mask = np.concatenate([part for turn in self.turns for part in turn.mask])[1:]
        logprobs = np.concatenate([part for turn in self.turns for part in turn.logprobs])[1:]
        datum = tinker.Datum(
            model_input=chunks.model_input(keys[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.maximum(keys[1:], 0)),
                "logprobs": tinker.TensorData.from_numpy(logprobs * mask),
                "advantages": tinker.TensorData.from_numpy(np.float32(advantage) * mask),
                "mask": tinker.TensorData.from_numpy(mask),
            },
        )
        return _with_provenance(datum, self.turns) if provenance else datum


@dataclass(frozen=True)
class _Turn:
    """One turn in its run: the part of its observation that is new there, and its action."""

    new: Keys
    action: Keys
    sampled: npt.NDArray[np.float32]
    masked: bool
    sequence_id: str | None
    offset: int
    """Of ``new`` in the observation."""

    @property
    def mask(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        trained = np.float32(0 if self.masked else 1)
        action = np.full(len(self.action), trained, dtype=np.float32)
        return np.zeros(len(self.new), dtype=np.float32), action

    @property
    def logprobs(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        return np.zeros(len(self.new), dtype=np.float32), self.sampled


def _runs(traj: Trajectory, chunks: ChunkKeys) -> Iterator[_Run]:
    """The trajectory's runs. Each turn is compared with the observation and action before it."""
    run, before = _Run(), np.empty(0, dtype=np.int64)
    for number, transition in enumerate(traj.transitions):
        seen = chunks.keys(transition.ob)
        if not len(seen) and not transition.ac.tokens:
            continue  # a turn that was never sampled: it only carries a reward
        if not len(seen):
            raise DataValidationError(
                f"turn {number}: its observation is empty, expected at least one token to predict "
                "the action from; check the environment"
            )
        if run.turns and not _extends(seen, before):
            yield run
            run = _Run()
        action = np.asarray(transition.ac.tokens, dtype=np.int64)
        run.add(
            _Turn(
                new=seen[run.length :],
                action=action,
                sampled=_sampled_logprobs(transition, number),
                masked=transition.masked
                or bool(transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY)),
                sequence_id=transition.ac.sequence_id,
                offset=run.length,
            )
        )
        before = np.concatenate([seen, action])
    if run.turns:
        yield run


def _extends(seen: Keys, before: Keys) -> bool:
    return len(seen) >= len(before) and np.array_equal(seen[: len(before)], before)


def _sampled_logprobs(transition: Transition, number: int) -> npt.NDArray[np.float32]:
    tokens, given = transition.ac.tokens, transition.ac.maybe_logprobs
    if not tokens or (given is None and transition.masked):
        return np.zeros(len(tokens), dtype=np.float32)
    try:
        logprobs = np.asarray(transition.ac.logprobs, dtype=np.float32)
    except DataValidationError as error:
        raise DataValidationError(f"turn {number}: {error}") from error
    if logprobs.shape != (len(tokens),):
        raise DataValidationError(
            f"turn {number}: its action has {len(tokens)} tokens, but log-probabilities of shape "
            f"{logprobs.shape}; expected one for each token"
        )
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if wrong.size:
        raise DataValidationError(
            f"turn {number}: the log-probability of action token {wrong[0]} is "
            f"{logprobs[wrong[0]]}, expected a finite number; check the sampler"
        )
    return logprobs


def divide_by_action_tokens(data_D: Sequence[tinker.Datum]) -> list[tinker.Datum]:
    """Returns the data with advantages divided by the number of action tokens of all of them.

    A loss that is a sum over tokens then is their mean, so that the size of the gradient does not
    change with the length of the answers. Adam remembers the size of earlier gradients, hence with
    a plain sum a step counts for less after answers have become shorter.
    """
    num_tokens = sum(float(datum.loss_fn_inputs["mask"].to_numpy().sum()) for datum in data_D)
    scale = np.float32(1 / max(num_tokens, 1.0))
    out = []
    for datum in data_D:
        advantages = datum.loss_fn_inputs["advantages"].to_numpy() * scale
        scaled = {"advantages": tinker.TensorData.from_numpy(advantages)}
        out.append(replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **scaled}))
    return out


def check_provenance(data_D: Sequence[tinker.Datum], loss_fn: str) -> None:
    """Raises ``DataValidationError`` where ``loss_fn`` needs provenance that a datum lacks."""
    if loss_fn != "stable_reinforce":
        return
    for index, datum in enumerate(data_D):
        if datum.loss_fn_input_spans is None:
            raise DataValidationError(
                f"datum {index}: it has no provenance, which loss_fn='stable_reinforce' needs, "
                "because one of its actions has no sequence_id; a TokenCompleter of your own must "
                "set TokensWithLogprobs.sequence_id, or train with another loss_fn"
            )


def _with_provenance(datum: tinker.Datum, turns: Sequence[_Turn]) -> tinker.Datum:
    """Names the sampled sequence, and the place in its prompt or sample, of every position.

    Spans must cover the whole datum, so one turn without a ``sequence_id`` leaves it without any.
    A backend refuses those of a datum without a sampled token.
    """
    if not any(len(turn.action) for turn in turns):
        return datum
    spans: list[ProvenanceSpan] = []
    for turn in turns:
        if not turn.sequence_id:
            return datum
        spans.append(
            types.PromptProvenanceSpan(
                sequence_id=turn.sequence_id, offset=turn.offset, length=len(turn.new)
            )
        )
        spans.append(
            types.SampledProvenanceSpan(sequence_id=turn.sequence_id, length=len(turn.action))
        )
    spans = [span for span in spans if span.length]
    # The input lacks the run's last token; the targets lack its first.
    last = replace(spans[-1], length=spans[-1].length - 1)
    first = replace(spans[0], offset=spans[0].offset + 1, length=spans[0].length - 1)
    return datum.with_provenance(
        model_input=[*spans[:-1], *([last] if last.length else [])],
        loss_fn_inputs=[*([first] if first.length else []), *spans[1:]],
    )
