"""Settings of the pipeline; they are checked before any stage begins."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.recipes.preference.datasets import get_comparison_builder
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.run.paths import CONFIG_FILE
from tinker_cookbook.training.config import TrainingConfig, number

STAGES = ("sft", "rm", "rl")
DEFAULT_LOG_PATH = str(cli_utils.default_log_path("rlhf"))


@chz.chz
class CLIConfig(TrainingConfig):
    """Settings of the pipeline. Options that are None are derived from the model and printed.

    Those without a stage in their name hold for all stages.
    """

    model_name: str = DEMO_MODEL
    short_name: str | None = chz.field(
        default=None, doc="Name of the model in the default log_path: …/rlhf-SHORT_NAME"
    )
    run_sft: bool = chz.field(default=True, doc="Stage 1: imitate demonstrations")
    run_rm: bool = chz.field(
        default=True, doc="Stage 2: train the reward model; without it, judge=prompted still works"
    )
    run_rl: bool = chz.field(default=True, doc="Stage 3: reinforcement learning, and the win rate")
    judge: Literal["trained", "prompted"] = chz.field(
        default="trained",
        doc="Reward of stage 3: the model of stage 2, or model_name itself; stage 2 then only "
        "measures the win rate",
    )

    dataset: str = chz.field(
        default="example", doc="Comparisons: example, hhh, helpsteer3, ultrafeedback, or a file"
    )
    test_path: str | None = chz.field(default=None, doc="Held-out comparisons, with a file")
    test_size: int | None = chz.field(
        default=None, doc="Without test_path: comparisons to hold out"
    )
    sft_dataset: str = chz.field(
        default="comparisons",
        doc="Demonstrations: comparisons (both answers of each), or a JSONL file of conversations",
    )
    num_test: int = number(80, "Maximum held-out comparisons per evaluation", low=1)
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which examples are cut; default: the model's context"
    )

    batch_size: int = chz.field(default=8, doc="Examples per step in stages 1 and 2")
    sft_learning_rate: float | None = chz.field(
        default=None, doc="Default: the recommended rate for the model"
    )
    sft_max_steps: int | None = number(40, "Steps of stage 1, if max_steps allows", low=1)
    rm_learning_rate: float | None = chz.field(
        default=None, doc="Default: 0.4 times the recommended rate"
    )
    rm_max_steps: int | None = number(30, "Steps of stage 2, if max_steps allows", low=1)

    rl_learning_rate: float | None = chz.field(
        default=None, doc="Default: 0.075 times the recommended rate"
    )
    rl_max_steps: int | None = number(20, "Steps of stage 3, if max_steps allows", low=1)
    rl_batch_size: int = chz.field(default=4, doc="Prompts per step in stage 3")
    rl_group_size: int = chz.field(default=4, doc="Answers to a prompt, compared with each other")
    rl_max_tokens: int = chz.field(default=128, doc="Maximum tokens to sample in an answer")
    # Small judges prefer one position whatever the texts are; the mean over both orders cancels
    # such a bias (docs/preferences.md).
    judge_both_orders: bool = chz.field(
        default=True, doc="Score both orders of the answers and average the log-odds"
    )
    kl_penalty_coef: float = chz.field(
        default=0.02, doc="Weight of the KL penalty towards stage 1; 0: none"
    )
    num_groups_to_log: int = chz.field(
        default=4, doc="Groups per step of stage 3 whose conversations and logs are written"
    )

    log_path: str = chz.field(default=DEFAULT_LOG_PATH, doc="Folder of the stages' folders")
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="resume", doc="ask, resume, delete or raise, for the folder of each stage to run"
    )
    save_every: int | None = 10
    eval_every: int = 100

    @property
    def folder(self) -> Path:
        """The folder of the stages' folders.

        A stage prints a command to continue it with its own folder; then the parent is used.
        """
        named = self.short_name is not None and self.log_path == DEFAULT_LOG_PATH
        path = Path(f"{self.log_path}-{self.short_name}" if named else self.log_path).expanduser()
        of_a_stage = path.name in STAGES and (path / CONFIG_FILE).exists()
        return path.parent if of_a_stage else path

    def stage_folder(self, stage: str) -> str:
        """Returns the ``log_path`` of a stage."""
        return str(self.folder / stage)

    @cached_property
    def comparisons(self) -> ComparisonDatasetBuilder:
        """Source of the comparisons, shared by all stages, so that it is read once."""
        return get_comparison_builder(self.dataset, self.test_path, self.test_size, self.seed)
