"""Converts trajectories to training data.

A turn's observation is the whole prompt, so it usually begins with the previous observation and
action. While it does, the turns are one sequence and one datum. Where it does not (for example
because a renderer strips earlier thinking), a new datum begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.advantages import compute_advantages as compute_advantages
from tinker_cookbook.rl.advantages import (
    remove_constant_reward_groups as remove_constant_reward_groups,
)
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.utils.imports import official_names, tinker
from tinker_cookbook.utils.model_inputs import ChunkKeys, Keys

__getattr__ = official_names(__name__)

SAMPLER_LOGPROBS = "sampler_logprobs"
"""Field with the sampler's log-probabilities if ``logprobs`` were replaced by the trainer's."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""Field with the log-probabilities [T] of a teacher or a reference policy, for the record."""
_NOT_OF_LOSS = ("mask", SAMPLER_LOGPROBS, REFERENCE_LOGPROBS)


@dataclass(frozen=True)
class DatumOrigin:
    """Index of a datum's group in the batch, and of its trajectory in the group.

    ``turns`` has the number of each turn in the datum, and the target at which its action begins.
    """

    group: int
    member: int
    turns: tuple[tuple[int, int], ...] = ()


def trajectory_to_data(
    traj: Trajectory, traj_advantage: float, include_provenance: bool = True
) -> list[tinker.Datum]:
    """Returns one datum for each maximal run of turns in which every turn extends the one before.

    A turn extends the previous one if its observation begins with that observation and action,
    token by token (images: chunk by chunk). The ``model_input`` of a run of T tokens is all but the
    last; position i predicts token i + 1. The other fields are [T - 1]:

    - ``target_tokens`` int64; 0 at an image
    - ``mask`` float32: 1 for action tokens that are trained, 0 for observations and masked turns
    - ``advantages`` float32: ``traj_advantage * mask``
    - ``logprobs`` float32: the sampler's where the mask is 1, otherwise 0

    ``include_provenance`` attaches the sampled sequence of each token, which ``stable_reinforce``
    needs, unless an action has no ``sequence_id``. A run of two or more tokens without an action
    token makes a datum whose mask is 0.

    Raises:
        DataValidationError: An action lacks a finite log-probability for each token; an observation
            is empty; an image has no ``expected_tokens``.
    """
    made = _trajectory_data(traj, traj_advantage, include_provenance, keep_unanswered=True)
    return [datum for datum, _ in made]


def _trajectory_data(
    traj: Trajectory, traj_advantage: float, include_provenance: bool, *, keep_unanswered: bool
) -> list[tuple[tinker.Datum, tuple[tuple[int, int], ...]]]:
    """Returns each datum with its turns, as ``DatumOrigin.turns``."""
    chunks = ChunkKeys()
    data = []
    for turns in _runs(traj, chunks):
        # Join the turns. Nothing predicts the first token, so targets begin at the second ([1:]).
        keys = np.concatenate([part for turn in turns for part in (turn.new, turn.action)])
        answered = any(len(turn.action) for turn in turns)
        if not (answered or (keep_unanswered and len(keys) > 1)):
            continue
        mask = np.concatenate(
            [
                np.full(len(part), trained, dtype=np.float32)
                for turn in turns
                for part, trained in ((turn.new, False), (turn.action, not turn.masked))
            ]
        )[1:]
        logprobs = np.concatenate(
            [part for turn in turns for part in (np.zeros(len(turn.new), np.float32), turn.sampled)]
        )[1:]
        datum = tinker.Datum(
            model_input=chunks.model_input(keys[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.maximum(keys[1:], 0)),
                "logprobs": tinker.TensorData.from_numpy(logprobs * mask),
                "advantages": tinker.TensorData.from_numpy(np.float32(traj_advantage) * mask),
                "mask": tinker.TensorData.from_numpy(mask),
            },
        )
        # Backends refuse the provenance of a datum without a sampled token.
        if include_provenance and answered:
            datum = _with_provenance(datum, turns)
        # Target i is token i + 1, so an action's first target has the index of the token before.
        data.append((datum, tuple((turn.number, turn.start - 1) for turn in turns)))
    return data


def assemble_training_data(
    trajectory_groups_P: Sequence[TrajectoryGroup],
    advantages_P: Sequence[npt.NDArray[np.floating[Any]]],
    include_provenance: bool = True,
) -> tuple[list[tinker.Datum], list[DatumOrigin]]:
    """Returns the data of all trajectories in order, and the origin of each datum.

    ``advantages_P`` holds [G] for each group. Runs without an action token are left out.

    Raises:
        DataValidationError: :func:`trajectory_to_data` fails; the message names group and member.
    """
    data_D: list[tinker.Datum] = []
    origins_D: list[DatumOrigin] = []
    for g, (group, advantages_G) in enumerate(zip(trajectory_groups_P, advantages_P, strict=True)):
        for m, (traj, advantage) in enumerate(zip(group.trajectories_G, advantages_G, strict=True)):
            try:
                # Runs without an action token are left out, because nothing in them is trained.
                data_of_turns = _trajectory_data(
                    traj, float(advantage), include_provenance, keep_unanswered=False
                )
            except DataValidationError as error:
                raise DataValidationError(f"group {g}, member {m}: {error}") from error
            data_D += [datum for datum, _ in data_of_turns]
            origins_D += [DatumOrigin(g, m, turns) for _, turns in data_of_turns]
    return data_D, origins_D


def data_for_loss(data_D: Sequence[tinker.Datum], loss_fn: str) -> list[tinker.Datum]:
    """Returns the data with the fields that ``loss_fn`` accepts; arrays are shared, not copied."""
    out = []
    for datum in data_D:
        # Backends refuse fields that a loss does not use. Advantages are 0 where the mask is 0, so
        # only gspo, which averages over the sequence, needs the mask.
        inputs = {
            name: value for name, value in datum.loss_fn_inputs.items() if name not in _NOT_OF_LOSS
        }
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = datum.loss_fn_inputs["mask"]
        out.append(replace(datum, loss_fn_inputs=inputs))
    return out


@dataclass(frozen=True)
class _Turn:
    """Turn of a run: the part of its observation that is new in the run, and its action."""

    new: Keys
    action: Keys
    sampled: npt.NDArray[np.float32]
    masked: bool
    sequence_id: str | None
    offset: int
    """Offset of ``new`` in the observation."""
    number: int

    @property
    def start(self) -> int:
        """Offset of the action in the run."""
        return self.offset + len(self.new)


def _runs(traj: Trajectory, chunks: ChunkKeys) -> Iterator[list[_Turn]]:
    """Yields the runs of the trajectory."""
    turns: list[_Turn] = []
    before = np.empty(0, dtype=np.int64)  # last observation and action
    for number, transition in enumerate(traj.transitions):
        seen = chunks.keys(transition.ob)
        if not len(seen) and not transition.ac.tokens:
            continue  # a turn without a sample, which only carries a reward
        if not len(seen):
            raise DataValidationError(
                f"turn {number}: its observation is empty, expected at least one token to predict "
                "the action from; check the environment"
            )
        # Start a new run where the observation does not begin with the previous turn.
        if turns and not np.array_equal(seen[: len(before)], before):
            yield turns
            turns, before = [], before[:0]
        action = np.asarray(transition.ac.tokens, dtype=np.int64)
        sampled = _sampled_logprobs(transition, number)
        # Of the observation, add only the part that the run does not have yet.
        offset = len(before)
        turns.append(
            _Turn(
                seen[offset:],
                action,
                sampled,
                transition.is_masked,
                transition.ac.sequence_id,
                offset,
                number,
            )
        )
        # The next turn extends this one if its prompt begins with all of it, token by token.
        before = np.concatenate([seen, action])
    if turns:
        yield turns


def _sampled_logprobs(transition: Transition, number: int) -> npt.NDArray[np.float32]:
    tokens, given = transition.ac.tokens, transition.ac.maybe_logprobs
    # A masked turn is not trained, so it may lack log-probabilities.
    if not tokens or (given is None and transition.is_masked):
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
    # One NaN or infinity would make the whole gradient NaN.
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if wrong.size:
        raise DataValidationError(
            f"turn {number}: the log-probability of action token {wrong[0]} is "
            f"{logprobs[wrong[0]]}, expected a finite number; check the sampler"
        )
    return logprobs


def divide_by_action_tokens(data_D: Sequence[tinker.Datum]) -> list[tinker.Datum]:
    """Returns the data with advantages divided by the total number of action tokens.

    A loss that is a sum over tokens then is their mean. With a plain sum a step counts less once
    responses have become shorter, because Adam normalizes by earlier gradients.
    """
    num_tokens = sum(float(datum.loss_fn_inputs["mask"].to_numpy().sum()) for datum in data_D)
    # If all turns are masked, there is no action token; advantages are 0.
    scale = np.float32(1 / max(num_tokens, 1.0))
    out = []
    for datum in data_D:
        advantages = datum.loss_fn_inputs["advantages"].to_numpy() * scale
        scaled = {"advantages": tinker.TensorData.from_numpy(advantages)}
        out.append(replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **scaled}))
    return out


def check_provenance(data_D: Sequence[tinker.Datum], loss_fn: str) -> None:
    """Raises ``DataValidationError`` if ``loss_fn`` needs provenance that a datum lacks."""
    # Only this loss uses the sampled sequence of each token.
    if loss_fn != "stable_reinforce":
        return
    for index, datum in enumerate(data_D):
        if datum.loss_fn_input_spans is None:
            raise DataValidationError(
                f"datum {index}: it has no provenance, which loss_fn='stable_reinforce' needs, "
                "because one of its actions has no sequence_id; a custom TokenCompleter must "
                "set TokensWithLogprobs.sequence_id, or train with another loss_fn"
            )


def _with_provenance(datum: tinker.Datum, turns: Sequence[_Turn]) -> tinker.Datum:
    """Returns the datum with the sampled sequence, and the offset in it, of every position."""
    spans: list[tinker.PromptProvenanceSpan | tinker.SampledProvenanceSpan] = []
    for turn in turns:
        # Spans must cover the whole datum, so one turn without a sequence_id leaves it without any.
        if not turn.sequence_id:
            return datum
        for span in (
            tinker.PromptProvenanceSpan(
                sequence_id=turn.sequence_id, offset=turn.offset, length=len(turn.new)
            ),
            tinker.SampledProvenanceSpan(sequence_id=turn.sequence_id, length=len(turn.action)),
        ):
            if span.length:
                spans.append(span)
    # The input lacks the run's last token; the targets lack its first.
    last = replace(spans[-1], length=spans[-1].length - 1)
    first = replace(spans[0], offset=spans[0].offset + 1, length=spans[0].length - 1)
    return datum.with_provenance(
        model_input=[*spans[:-1], *([last] if last.length else [])],
        loss_fn_inputs=[*([first] if first.length else []), *spans[1:]],
    )
