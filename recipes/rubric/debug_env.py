"""Shows how one answer is graded: the conversation, the answer, the judge's prompt and output.

python -m recipes.rubric.debug_env
python -m recipes.rubric.debug_env dataset=prometheus grader_mode=text model_name=…
"""

from __future__ import annotations

from typing import Literal

import chz

from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.recipes.rubric.data import (
    PrometheusDatapointListBuilder,
    Rubric,
    RubricBasedDatapoint,
)
from tinker_cookbook.recipes.rubric.env import RubricGradedEnv
from tinker_cookbook.recipes.rubric.train import CLIConfig as TrainSettings
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(TrainSettings):
    """Settings of the run whose grading is shown."""

    dataset: Literal["addition", "prometheus"] = chz.field(
        default="addition", doc="addition or prometheus"
    )
    max_tokens: int = chz.field(default=64, doc="Maximum tokens of the answer")


def get_addition_datapoint() -> RubricBasedDatapoint:
    """Returns a sum with two criteria."""
    return RubricBasedDatapoint(
        convo=[
            Message(role="user", content="What is 4 + 5?"),
            Message(role="assistant", content="9"),
            Message(role="user", content="What is 125 + 311?"),
        ],
        rubric_items=[
            Rubric(rubric_str="Does the chatbot correctly get the answer 436?"),
            Rubric(rubric_str="Does the chatbot provide an answer without saying anything else?"),
        ],
    )


def get_prometheus_datapoint() -> RubricBasedDatapoint:
    """Returns the first datapoint of Feedback-Collection."""
    return PrometheusDatapointListBuilder()()[0]


async def main(datapoint: RubricBasedDatapoint, config: CLIConfig | None = None) -> None:
    """Samples an answer and has it graded, by default by the demo model."""
    config = config or CLIConfig()
    with connect_with(config) as connection:
        client = await connection.service.create_sampling_client(base_model=config.model_name)
        policy = TinkerTokenCompleter(client, config.max_tokens, config.temperature)
        renderer = get_renderer(config.renderer, get_tokenizer(config.model_name))
        judge = config.judge_settings()()
        await do_single_rollout(policy, RubricGradedEnv(renderer, datapoint, judge, debug=True))


async def cli_main(config: CLIConfig) -> None:
    """Shows one answer of the dataset being graded."""
    check_model(config)
    is_sum = config.dataset == "addition"
    await main(get_addition_datapoint() if is_sum else get_prometheus_datapoint(), config)


if __name__ == "__main__":
    run_entrypoint(cli_main)
