"""A program that calls the model itself is an environment of the loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tinker

from recipes.verifiers_rl.driven_env import DrivenEnv, ProgramResult
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.rollouts import RolloutFailedError, do_single_rollout
from tinker_cookbook.rl.types import TrajectoryGroup


class Counting(TokenCompleter):
    """Returns the length of the prompt, twice, with log-probabilities that name it."""

    async def __call__(self, model_input, stop, *, max_tokens=None) -> TokensWithLogprobs:
        length = model_input.length
        return TokensWithLogprobs([length, stop[0]], [-float(length), -0.5], "length")


def prompt(*tokens: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def run(program):
    return asyncio.run(do_single_rollout(Counting(), DrivenEnv(program)))


def test_calls_are_turns_and_their_responses_are_what_was_sampled():
    got = []

    async def program(call):
        tokens = [7, 8]
        for trained in (True, False, True):
            response = await call(prompt(*tokens), [len(got)], trained=trained)
            got.append(response)
            tokens += [*response.tokens, 9]
        return ProgramResult(0.75, {"calls": 3}, stop_reason="tired")

    trajectory = run(program)
    turns = trajectory.transitions
    assert [turn.ob.length for turn in turns] == [2, 5, 8]
    assert [turn.ac.tokens for turn in turns] == [[2, 0], [5, 1], [8, 2]]
    assert [one.tokens for one in got] == [turn.ac.tokens for turn in turns]
    assert [one.logprobs for one in got] == [turn.ac.logprobs for turn in turns]
    assert [one.stop_reason for one in got] == ["length"] * 3
    assert (trajectory.reward, trajectory.stop_reason) == (0.75, "tired")
    assert turns[-1].metrics == {"calls": 3, "stop/tired": 1.0}
    # The call that is not trained is context: its tokens have no weight.
    other = TrajectoryGroup([trajectory], [0.0], [{}])
    data, _ = assemble_training_data([other], [np.array([1.0])])
    (datum,) = data
    mask = datum.loss_fn_inputs["mask"].to_torch().tolist()
    assert sum(mask) == 4


def test_a_caller_that_gave_up_gets_no_turn():
    async def program(call):
        both = asyncio.gather(call(prompt(1), [0]), asyncio.sleep(0))
        lost = asyncio.ensure_future(call(prompt(1, 1, 1), [0]))
        await both
        lost.cancel()
        await asyncio.sleep(0)
        await call(prompt(1, 1), [0])
        return ProgramResult(1.0)

    # The call may have begun before it was cancelled; its response is then lost, not the program.
    assert [turn.ob.length for turn in run(program).transitions][-1] == 2


@pytest.mark.parametrize("after", [0, 1])
def test_an_error_of_the_program_fails_the_rollout(after):
    async def program(call):
        for _ in range(after):
            await call(prompt(1), [0])
        raise KeyError("the shop is closed")

    with pytest.raises(RolloutFailedError, match="the shop is closed"):
        run(program)


def test_close_cancels_a_program_that_waits():
    ended = []

    async def program(call):
        try:
            await call(prompt(1), [0])
        finally:
            ended.append(True)
        return ProgramResult(1.0)

    async def main():
        env = DrivenEnv(program)
        await env.initial_observation()
        await env.close()
        await env.close()

    asyncio.run(main())
    assert ended == [True]
