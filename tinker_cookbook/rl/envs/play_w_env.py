"""A person plays an environment in the terminal, to see what the model will see.

    python -m tinker_cookbook.rl.envs.play_w_env model_name=MODEL \\
        dataset_builder=recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder \\
        dataset_builder.SETTING=VALUE …

``renderer_name=…`` is short for ``dataset_builder.renderer_name=…``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from tinker_cookbook.utils.command_line.entrypoint import also_named, run_entrypoint

if TYPE_CHECKING:
    import tinker

_HELP = "Type an answer; \\ at the end of a line goes on in the next. Ctrl-D stops."
_HELP_MULTILINE = "Type an answer of any number of lines; two empty lines end it. Ctrl-D stops."


async def get_async_input(prompt: str, multiline: bool = False) -> str:
    """Returns what a person types after ``prompt``, without blocking the event loop.

    ``multiline=True`` reads lines until two in a row are empty; these two are left out. Otherwise
    one line is read, which a backslash at its end continues in the next. Raises ``EOFError`` at the
    end of the input.
    """
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
    """Asks a person for each answer.

    What was typed is ended as the model would end it, with the first stop string or stop token.
    Its answers have no log-probabilities.

    Attributes:
        tokenizer: Shows the prompt and encodes the answer.
        read: Returns a line typed after a prompt; as ``input`` does.
        show: Shows text.
        multiline: An answer ends with two empty lines rather than with its first line.
        show_observation: Show what is new in the prompt.
    """

    tokenizer: Tokenizer
    read: Callable[[str], str] = input
    show: Callable[[str], None] = print
    multiline: bool = False
    show_observation: bool = True
    _seen: list[int] = field(default_factory=list, init=False, repr=False)

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        """Shows what is new in the prompt and returns what is typed, however long it is.

        Raises:
            EOFError: The person does not want to go on.
        """
        prompt = model_input.to_ints()
        # After the first turn only what was added is of interest, where the prompt was added to.
        known = len(self._seen) if prompt[: len(self._seen)] == self._seen else 0
        if self.show_observation:
            self.show(decode_exactly(self.tokenizer, prompt[known:]))
        text = await run_in_daemon_thread(lambda: _read_answer(self.read, "> ", self.multiline))
        tokens = encode_without_special_tokens(self.tokenizer, text)
        ending = stop[0] if stop else None
        if isinstance(ending, int):
            tokens = [*tokens, ending]
        elif ending is not None:
            tokens = encode_without_special_tokens(self.tokenizer, text + ending)
        self._seen = [*prompt, *tokens]
        return TokensWithLogprobs(tokens, None)


@dataclass
class _Narrator(RolloutHooks):
    """Says what each answer earned."""

    show: Callable[[str], None]

    async def on_turn_begin(self, state: RolloutState) -> None:
        if state.transitions:
            self.show(_describe(state.transitions[-1], state.turn_index))

    async def on_artifacts(self, state: RolloutState) -> None:
        trajectory = state.trajectory
        assert trajectory is not None
        if trajectory.transitions:
            self.show(_describe(trajectory.transitions[-1], len(trajectory.transitions)))
        metrics = _pairs(trajectory.metrics)
        self.show(f"over: {trajectory.stop_reason}, reward {trajectory.reward:g}{metrics}")


async def play_env(
    env: Env,
    tokenizer: Tokenizer,
    multiline: bool = False,
    show_observation: bool = True,
    *,
    read: Callable[[str], str] = input,
    show: Callable[[str], None] = print,
) -> Trajectory | None:
    """Lets a person play one episode; ``None`` where they stopped before its end.

    Rewards of a whole group (``compute_group_rewards``) are not in it. The arguments are those of
    :class:`ManualPolicy`.
    """
    show(_HELP_MULTILINE if multiline else _HELP)
    policy = ManualPolicy(tokenizer, read, show, multiline, show_observation)
    try:
        return await run_rollout(policy, env, hooks=_Narrator(show))
    except Exception as error:
        if not isinstance(original(error), EOFError):
            raise
        show("stopped")
        return None


def print_trajectory_summary(trajectory: Trajectory) -> None:
    """Prints how many turns an episode had and what it and each of them earned."""
    turns = trajectory.transitions
    print(f"turns: {len(turns)}, reward: {trajectory.reward:g}, ended: {trajectory.stop_reason}")
    for number, turn in enumerate(turns):
        if turn.reward:
            print(f"  turn {number}: reward {turn.reward:g}")


def _describe(turn: Transition, number: int) -> str:
    lines = [f"turn {number}: reward {turn.reward:g}{_pairs(turn.metrics)}"]
    lines += [f"  {name}: {value}" for name, value in turn.logs.items()]
    return "\n".join(lines)


def _pairs(metrics: dict[str, float | int]) -> str:
    return "".join(f", {name} {value:g}" for name, value in metrics.items())


@also_named(renderer_name="dataset_builder.renderer_name")
@chz.chz
class Config:
    """Which environment to play: dataset_builder=module:Class dataset_builder.SETTING=VALUE …"""

    dataset_builder: RLDatasetBuilder = chz.field(doc="module:Class of a dataset builder")
    model_name: str = chz.field(doc="Whose tokenizer to use: a Hub name or a local folder")
    batch: int = chz.field(default=0, doc="Batch of the training data")
    group: int = chz.field(default=0, doc="Group of the batch")
    member: int = chz.field(default=0, doc="Environment of the group")


async def main(config: Config) -> None:
    """Plays one environment of a dataset."""
    config.dataset_builder.check()
    train, _ = await config.dataset_builder()
    if not 0 <= config.batch < len(train):
        raise ConfigurationError(f"batch: got {config.batch}, expected 0 to {len(train) - 1}")
    groups = await asyncio.to_thread(train.get_batch, config.batch)
    if not 0 <= config.group < len(groups):
        raise ConfigurationError(f"group: got {config.group}, expected 0 to {len(groups) - 1}")
    builder = groups[config.group]
    try:
        envs = await builder.make_envs()
        if not 0 <= config.member < len(envs):
            raise ConfigurationError(f"member: got {config.member}, expected 0 to {len(envs) - 1}")
        await play_env(envs[config.member], get_tokenizer(config.model_name))
    finally:
        await builder.cleanup()


if __name__ == "__main__":
    run_entrypoint(main)
