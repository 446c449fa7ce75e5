"""A small recipe with a tool that never returns the same twice: ``python -m tool_stories …``.

The story model writes text, which is the argument of a call. The tool counts on disk how often it
was called from this place of the run, so a call that is repeated after a resume returns something
else, unless its first result was recorded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.renderers import ToolCall, get_renderer, get_text_content
from tinker_cookbook.rl import train
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.rollouts.place import current_place
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import AgentToolMessageEnv, tool
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


class Visits:
    """Counts the calls of each place in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder, self.calls = Path(folder), 0

    @tool(record=os.environ.get("RECORD_TOOLS", "1") == "1")
    def visit(self, word: str) -> int:
        """Returns how often it was called from this place of the run."""
        self.calls += 1
        place = current_place()
        assert place is not None
        file = self.folder / "-".join(map(str, [*place.position, self.calls]))
        visits = int(file.read_text()) + 1 if file.exists() else 1
        file.write_text(str(visits))
        return visits


class CallsAlways(AgentToolMessageEnv):
    """Each answer is a call, whatever the model writes."""

    async def step(self, message):
        arguments = json.dumps({"word": get_text_content(message)})
        call = ToolCall(function=ToolCall.FunctionBody(name="visit", arguments=arguments))
        return await super().step({**message, "tool_calls": [call]})

    async def observe_truncated_response(self, message):
        return await self.step(message)


def reward(history, episode):
    """The longer the words the better, and much worse for a place that was visited before."""
    words = sum(len(call.arguments["word"]) for call in episode.calls)
    visits = sum(int(call.text) for call in episode.calls)
    return words / 50 - 10 * (visits - len(episode.calls)), {"visits": visits}


class StoryGroup(EnvGroupBuilder):
    def __init__(self, cli, renderer, question):
        self.cli, self.renderer, self.question = cli, renderer, question

    async def make_envs(self):
        return [self.env() for _ in range(4)]

    def env(self):
        messages = [{"role": "user", "content": self.question}]
        inner = CallsAlways([Visits(self.cli.visits).visit], messages, 2, reward)
        return EnvFromMessageEnv(self.renderer, inner, terminate_on_length=False)


@chz.chz
class StoryBuilder(RLDatasetBuilder):
    cli: CLIConfig

    async def __call__(self):
        renderer = get_renderer("role_colon", get_tokenizer(self.cli.model_name))
        questions = ["Tell me of Lily.", "Who is Tom?", "A dog?", "The park"]

        def group(question):
            return StoryGroup(self.cli, renderer, question)

        test = ProblemDataset(questions[:2], group, 2)
        return ProblemDataset(questions, group, 1), test


@chz.chz
class CLIConfig(train.Config):
    recipe_name: str = "tool_stories"
    renderer_name: str | None = "role_colon"
    max_tokens: int = 8
    learning_rate: float | None = 0.005
    loss_normalization: str = "sum"
    visits: str = chz.field(doc="Folder of the counts")
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior | None = "raise"

    def build_dataset(self) -> StoryBuilder:
        return StoryBuilder(cli=self)


async def main(cli: CLIConfig) -> None:
    """Trains."""
    Path(cli.visits).mkdir(exist_ok=True)
    await train.main(cli)


if __name__ == "__main__":
    run_entrypoint(main)
