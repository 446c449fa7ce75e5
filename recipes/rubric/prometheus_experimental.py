"""Reinforcement learning on the rubrics of Feedback-Collection (Kim et al., 2023).

    python -m recipes.rubric.prometheus_experimental model_name=… grader_llm_name=…

Experimental, as in the official cookbook: the judge's score rises, which does not show that the
answers get better. Measure the judge on labelled answers first (``labelled_path``).
"""

from __future__ import annotations

import chz

from tinker_cookbook.judges.settings import JudgeMode
from tinker_cookbook.recipes.rubric.data import PrometheusDatapointListBuilder
from tinker_cookbook.recipes.rubric.env import RubricGradedDatasetBuilder
from tinker_cookbook.recipes.rubric.train import JudgedSettings
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(JudgedSettings):
    """Settings of the recipe."""

    recipe_name: str = "rubric_prometheus"
    data_path: str = chz.field(
        default="prometheus-eval/Feedback-Collection", doc="Hub name, or a file with its columns"
    )
    # The rubrics have five steps, for which Yes and No are too few.
    grader_mode: JudgeMode = chz.field(
        default="text", doc="text: sample a text and read the score; labels: probability of Yes"
    )

    def build_dataset(self) -> RubricGradedDatasetBuilder:
        """Returns the conversations of Feedback-Collection."""
        data = PrometheusDatapointListBuilder(data_path=self.data_path)
        return self.judged_dataset(data, None, self.labelled_path)


def get_dataset_builder(
    batch_size: int,
    policy_model_name: str,
    renderer_name: str,
    grader_llm_name: str,
    train_group_size: int,
    test_group_size: int = 1,
    grader_renderer_name: str | None = None,
) -> RLDatasetBuilder:
    """Returns the builder of the original cookbook."""
    return RubricGradedDatasetBuilder(
        batch_size=batch_size,
        model_name_for_tokenizer=policy_model_name,
        renderer_name=renderer_name,
        grader_llm_name=grader_llm_name,
        grader_renderer_name=grader_renderer_name,
        train_datapoint_list_builder=PrometheusDatapointListBuilder(),
        train_group_size=train_group_size,
        test_group_size=test_group_size,
    )


async def main(cli_config: CLIConfig) -> None:
    """Trains a model on a judge's scores of its answers."""
    await train.main(cli_config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
