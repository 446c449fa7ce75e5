"""Reinforcement learning with rubrics: a judge model grades the answers.

    python -m recipes.rubric.train
    python -m recipes.rubric.train train_jsonl_path=my.jsonl labelled_path=labelled.jsonl \\
        grader_url=http://localhost:8000/v1 grader_llm_name=NAME
    python -m recipes.rubric.train grader_mode=text   # sample a text and read the score in it

Before the first step the judge is measured on labelled answers: accuracy, Cohen's kappa, AUC.
An answer that it cannot grade is left out of its group; its reward is never 0. With a judge and a
policy of 260k parameters the judge's score rises from 0.27 to 0.81 - 0.94 in a minute.
"""

from __future__ import annotations

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.judges.settings import JudgeMode, JudgeSettings
from tinker_cookbook.recipes.rubric.data import (
    RubricDatapointListBuilder,
    RubricDatapointListBuilderFromJsonl,
)
from tinker_cookbook.recipes.rubric.env import RubricGradedDatasetBuilder
from tinker_cookbook.recipes.start import DEMO_MODEL, example_data
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollouts.strategy import LeaveOutUngraded
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.config import BackendSettings, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class JudgedSettings(train.Config):
    """Settings of a recipe with a judge, in addition to those of the loop."""

    model_name: str = DEMO_MODEL
    groups_per_batch: int = 8
    group_size: int = 8
    learning_rate: float | None = None  # a quarter of the recommended rate
    grader_llm_name: str | None = chz.field(
        default=None,
        doc="Judge: a model of the backend, or its name on the server; default: model_name, "
        "untrained",
    )
    grader_model_path: str | None = weights_field("sampler_weights", "Weights of a trained judge")
    grader_renderer_name: str | None = chz.field(
        default=None, doc="The judge's chat format; default: the model's"
    )
    grader_url: str | None = chz.field(
        default=None, doc="Server with the OpenAI chat API that has the judge"
    )
    grader_api_key_env: str = chz.field(
        default="OPENAI_API_KEY", doc="Environment variable with its key"
    )
    grader_mode: JudgeMode = chz.field(
        default="labels", doc="labels: probability of Yes; text: sample a text and read the score"
    )
    grader_max_tokens: int = number(2048, "grader_mode=text: maximum tokens of the text", low=1)
    grader_concurrency: int = number(64, "Concurrent requests to the judge", low=1)
    grader_retries: int = number(3, "Retries after an error or an unreadable score")
    grader_timeout_seconds: float = number(300, "Time limit of an attempt", low=1)
    grader_cache_path: str | None = chz.field(
        default=None, doc="JSONL file that stores judgements for later runs"
    )
    test_group_size: int = number(1, "Answers to a held-out conversation", low=1)
    format_coef: float = chz.field(
        default=0.1, doc="Penalty for an answer without the stop sequence"
    )
    labelled_path: str | None = chz.field(
        default=None, doc="JSONL file of labelled answers to measure the judge on before training"
    )
    min_kappa: float | None = chz.field(
        default=None, doc="Do not train if the judge's Cohen's kappa is below this value"
    )

    def judge_settings(self) -> JudgeSettings:
        """Returns the settings of the judge."""
        if self.grader_url is not None and self.grader_llm_name is None:
            raise ConfigurationError(
                f"grader_llm_name: got none with grader_url={self.grader_url}, expected the "
                "server's name of the judge"
            )
        local = self.grader_url is None
        # A judge without a name is the model before training, which needs no other weights.
        same = self.grader_llm_name in (None, self.model_name)
        renderer = self.renderer if same and local else None
        return JudgeSettings(
            model_name=self.grader_llm_name or self.model_name,
            model_path=self.grader_model_path,
            renderer_name=self.grader_renderer_name or renderer,
            url=self.grader_url,
            api_key_env=self.grader_api_key_env,
            mode=self.grader_mode,
            max_tokens=self.grader_max_tokens,
            max_concurrency=self.grader_concurrency,
            max_retries=self.grader_retries,
            timeout_seconds=self.grader_timeout_seconds,
            cache_path=self.grader_cache_path,
            **self.values_of(BackendSettings),
        )

    def judged_dataset(
        self,
        train_data: RubricDatapointListBuilder,
        test_data: RubricDatapointListBuilder | None,
        labelled_path: str | None,
    ) -> RubricGradedDatasetBuilder:
        """Returns conversations whose answers the judge grades."""
        return self.builder_of(
            RubricGradedDatasetBuilder,
            train_group_size=self.group_size,
            train_datapoint_list_builder=train_data,
            test_datapoint_list_builder=test_data,
            judge=self.judge_settings(),
            labelled_path=labelled_path,
        )

    def resolved(self) -> train.Config:
        """Returns the config of the loop, which leaves out answers without a grade."""
        config = super().resolved()
        if config.rollout_error_tolerance is not None:
            return config
        # The judge retries; a resampled answer would not help it.
        return chz.replace(config, rollout_error_tolerance=LeaveOutUngraded())


@chz.chz
class CLIConfig(JudgedSettings):
    """Settings of the recipe."""

    recipe_name: str = "rubric"
    train_jsonl_path: str | None = chz.field(
        default=None, doc="Conversations with rubrics to train on; default: the example data"
    )
    test_jsonl_path: str | None = chz.field(
        default=None, doc="Conversations with rubrics to evaluate on"
    )

    def build_dataset(self) -> RubricGradedDatasetBuilder:
        """Returns the conversations of the files, or of the example."""
        # The example's labels apply only to the example's criteria.
        example = self.train_jsonl_path is None

        def path_of(given: str | None, file: str) -> str | None:
            return given or (str(example_data(file)) if example else None)

        train_path = self.train_jsonl_path or str(example_data("rubric_train.jsonl"))
        test_path = path_of(self.test_jsonl_path, "rubric_test.jsonl")
        return self.judged_dataset(
            RubricDatapointListBuilderFromJsonl(jsonl_path=train_path),
            (test_path and RubricDatapointListBuilderFromJsonl(jsonl_path=test_path)) or None,
            path_of(self.labelled_path, "rubric_labelled.jsonl"),
        )


def get_dataset_builder(
    batch_size: int,
    policy_model_name: str,
    renderer_name: str,
    grader_llm_name: str,
    train_group_size: int,
    train_jsonl_path: str,
    test_jsonl_path: str | None = None,
    test_group_size: int = 1,
    grader_renderer_name: str | None = None,
) -> RLDatasetBuilder:
    """Returns the builder of the original cookbook, with a judge that samples a text."""
    test = test_jsonl_path and RubricDatapointListBuilderFromJsonl(jsonl_path=test_jsonl_path)
    return RubricGradedDatasetBuilder(
        batch_size=batch_size,
        model_name_for_tokenizer=policy_model_name,
        renderer_name=renderer_name,
        grader_llm_name=grader_llm_name,
        grader_renderer_name=grader_renderer_name,
        train_datapoint_list_builder=RubricDatapointListBuilderFromJsonl(
            jsonl_path=train_jsonl_path
        ),
        test_datapoint_list_builder=test or None,
        train_group_size=train_group_size,
        test_group_size=test_group_size,
    )


async def main(cli_config: CLIConfig) -> None:
    """Trains a model on a judge's scores of its answers."""
    await train.main(cli_config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
