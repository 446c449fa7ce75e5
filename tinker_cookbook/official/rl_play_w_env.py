"""Lets a person answer an environment in the terminal, to inspect the prompts of the model.

    python -m tinker_cookbook.rl.play_w_env model_name=MODEL \\
        dataset_builder=recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder \\
        dataset_builder.SETTING=VALUE …

``renderer_name=…`` is short for ``dataset_builder.renderer_name=…``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import chz

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.async_utils import run_in_daemon_thread
from tinker_cookbook.rl.rollouts.episode import run_rollout
from tinker_cookbook.rl.rollouts.errors import original
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks, RolloutState
from tinker_cookbook.rl.types import Env, RLDatasetBuilder, Trajectory, Transition
from tinker_cookbook.tokenizer_utils import (
    Tokenizer,
    decode_exactly,
    encode_without_special_tokens,
    get_tokenizer,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker

_HELP = "Type an answer; \\ at the end of a line continues it in the next. Ctrl-D stops."
_HELP_MULTILINE = "Type an answer of any number of lines; two empty lines end it. Ctrl-D stops."


async def get_async_input(prompt: str, multiline: bool = False) -> str:
    """Reads a person's input after ``prompt``, without blocking the event loop.

    ``multiline=True`` reads until two empty lines, which are dropped. Otherwise one line is read;
    a backslash at its end continues it in the next. Raises ``EOFError`` at the end of the input.
    """
    # A daemon thread, so that the program can end while it waits for a line.
    return await run_in_daemon_thread(lambda: _read_answer(input, prompt, multiline))


def _read_answer(read: Callable[[str], str], prompt: str, multiline: bool) -> str:
    lines = [read(prompt)]
    if multiline:
        while lines[-2:] != ["", ""]:
            lines.append(read(""))
        return "\n".join(lines[:-2])
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(". "))
    return "\n".join(lines)


@dataclass
class ManualPolicy(TokenCompleter):
    """Policy with answers typed by a person, without log-probabilities.

    The first stop string or stop token is appended to an answer, as a model would. ``read``
    returns a line like ``input``; with ``multiline``, two empty lines end an answer.
    """

    tokenizer: Tokenizer
    multiline: bool = True
    show_observation: bool = True
    read: Callable[[str], str] = input
    show: Callable[[str], None] = print
    _seen: list[int] = field(default_factory=list, init=False, repr=False)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Prints the new part of the prompt and returns the typed answer."""
        prompt = model_input.to_ints()
        # Print only the part that extends the last turn.
        known = len(self._seen) if prompt[: len(self._seen)] == self._seen else 0
        if self.show_observation:
            self.show(decode_exactly(self.tokenizer, prompt[known:]))
        text = await run_in_daemon_thread(lambda: _read_answer(self.read, "> ", self.multiline))
        tokens = encode_without_special_tokens(self.tokenizer, text)
        ending = stop[0] if stop else None
        if isinstance(ending, int):
            tokens = [*tokens, ending]
        # Encode the stop string together with the text, since tokens may span both.
        elif ending is not None:
            tokens = encode_without_special_tokens(self.tokenizer, text + ending)
        self._seen = [*prompt, *tokens]
        return TokensWithLogprobs(tokens, None)


@dataclass
class _PrintRewards(RolloutHooks):
    show: Callable[[str], None]

    async def on_turn_begin(self, state: RolloutState) -> None:
        # The last turn is complete only when the next one starts.
        if state.transitions:
            self._show_turn(state.transitions[-1], state.turn_index)

    async def on_artifacts(self, state: RolloutState) -> None:
        trajectory = state.trajectory
        assert trajectory is not None
        if trajectory.transitions:
            self._show_turn(trajectory.transitions[-1], len(trajectory.transitions))
        metrics = "".join(f", {name} {value:g}" for name, value in trajectory.metrics.items())
        self.show(f"end: {trajectory.stop_reason}, reward {trajectory.reward:g}{metrics}")

    def _show_turn(self, turn: Transition, number: int) -> None:
        metrics = "".join(f", {name} {value:g}" for name, value in turn.metrics.items())
        lines = [f"turn {number}: reward {turn.reward:g}{metrics}"]
        lines += [f"  {name}: {value}" for name, value in turn.logs.items()]
        self.show("\n".join(lines))


async def play_env(
    env: Env,
    tokenizer: Tokenizer,
    multiline: bool = True,
    show_observation: bool = True,
    *,
    read: Callable[[str], str] = input,
    show: Callable[[str], None] = print,
) -> Trajectory | None:
    """Runs one episode with a person as policy; returns ``None`` if the person stops early.

    Rewards of the whole group (``compute_group_rewards``) are not included.
    """
    show(_HELP_MULTILINE if multiline else _HELP)
    policy = ManualPolicy(tokenizer, multiline, show_observation, read, show)
    try:
        return await run_rollout(policy, env, hooks=_PrintRewards(show))
    except Exception as error:
        # run_rollout wraps errors of the policy; Ctrl-D is a wrapped EOFError.
        if not isinstance(original(error), EOFError):
            raise
        show("stopped")
        return None


def print_trajectory_summary(trajectory: Trajectory) -> None:
    """Prints the number of turns, the reward and the stop reason of an episode."""
    turns = trajectory.transitions
    print(f"turns: {len(turns)}, reward: {trajectory.reward:g}, ended: {trajectory.stop_reason}")
    for number, turn in enumerate(turns):
        if turn.reward:
            print(f"  turn {number}: reward {turn.reward:g}")


@chz.chz
class Config:
    """Environment to run: dataset_builder=module:Class dataset_builder.SETTING=VALUE …"""

    dataset_builder: RLDatasetBuilder = chz.field(doc="module:Class of a dataset builder")
    model_name: str = chz.field(doc="Model that has the tokenizer: a Hub name or a local folder")
    batch: int = chz.field(default=0, doc="Batch of the training data")
    group: int = chz.field(default=0, doc="Group of the batch")
    member: int = chz.field(default=0, doc="Environment of the group")


async def main(config: Config) -> None:
    """Runs one environment of a dataset."""
    # Report invalid settings before anything is loaded.
    config.dataset_builder.check()
    train, _ = await config.dataset_builder()
    _check_index("batch", config.batch, len(train))
    groups = await asyncio.to_thread(train.get_batch, config.batch)
    _check_index("group", config.group, len(groups))
    builder = groups[config.group]
    try:
        envs = await builder.make_envs()
        _check_index("member", config.member, len(envs))
        await play_env(envs[config.member], get_tokenizer(config.model_name), multiline=False)
    # Also after an error, to release the group's resources.
    finally:
        await builder.cleanup()


def _check_index(name: str, index: int, length: int) -> None:
    if not 0 <= index < length:
        raise ConfigurationError(f"{name}: got {index}, expected 0 to {length - 1}")


if __name__ == "__main__":
    run_entrypoint(main)
