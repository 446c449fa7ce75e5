"""Self-distillation: a model learns from itself, reading a demonstration (SDFT).

    python -m recipes.distillation.sdft
    python -m recipes.distillation.sdft dataset_path=my.jsonl max_tokens=… reverse=True …

The student answers each question; the teacher, the same model with the file's answer in its
prompt, says what it would have written at each token of that answer (arXiv 2601.19897). The example
data teach a manner of answering in three lines: "In short", "Why", "Try".
"""

from __future__ import annotations

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.distillation import sdft
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.examples import example_data
from tinker_cookbook.recipes.sl_basic import DEMO_MODEL
from tinker_cookbook.recipes.start import start
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.training.config import RunSettings, check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(RunSettings):
    """Settings of the recipe; what is None is derived from the model and printed."""

    model_name: str = chz.field(default=DEMO_MODEL, doc="Hub name or local folder of the model")
    dataset_path: str | None = chz.field(
        default=None, doc="Your demonstrations, a JSONL file of conversations; default: example"
    )
    test_path: str | None = chz.field(default=None, doc="Held-out conversations, a JSONL file")
    test_size: int = chz.field(default=0, doc="Else: conversations to hold out of dataset_path")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    groups_per_batch: int = chz.field(default=8, doc="Questions a step")
    group_size: int = chz.field(default=1, doc="Answers of the student to a question")
    on_policy: bool = chz.field(
        default=True, doc="The student writes the answers; else the demonstrations are the texts"
    )
    max_tokens: int = chz.field(default=256, doc="Most tokens of an answer")
    temperature: float = chz.field(default=1.0, doc="Of the student's answers")
    topk: int = chz.field(default=20, doc="Targets a position: the teacher's most probable tokens")
    reverse: bool = chz.field(
        default=False, doc="Reverse KL over the teacher's top K in place of cross-entropy"
    )
    demo_template: str = chz.field(
        default=sdft.DEFAULT_DEMO_TEMPLATE,
        doc="The teacher's question, of {question} and {golden_answer}",
    )
    system_prompt: str | None = chz.field(default=None, doc="The teacher's system message")
    skip_first_n_tokens: int = chz.field(
        default=3, doc="First tokens of an answer that are not trained on"
    )
    teacher_sync_every: int | None = chz.field(
        default=None, doc="Steps after which the teacher takes the student's weights; None: never"
    )
    max_context_length: int = chz.field(
        default=32768, doc="Most tokens of teacher prompt and answer; at most the model's context"
    )
    learning_rate: float | None = chz.field(default=None, doc="Default: the model's recommended")
    log_path: str = chz.field(default=cli_utils.default_log_path("sdft"), doc="Folder of this run")
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )
    eval_every: int = chz.field(default=15, doc="Steps between evaluations on the held-out part")
    save_every: int = chz.field(default=15, doc="Steps between checkpoints")
    show_samples: int = chz.field(default=1, doc="Held-out prompts answered before and after")


def build_dataset(cli: CLIConfig, renderer_name: str) -> sdft.DemonstrationBuilder:
    """The demonstrations that the settings ask for."""
    path, test_path = cli.dataset_path, cli.test_path
    if path is None:
        if cli.test_size:
            raise ConfigurationError(
                f"test_size: got {cli.test_size} without dataset_path; expected it only beside a "
                "file of yours, since the example has a held-out part of its own"
            )
        path = str(example_data("conversations.jsonl"))
        test_path = test_path or str(example_data("conversations_test.jsonl"))
    return sdft.DemonstrationBuilder(
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=cli.model_name,
            renderer_name=renderer_name,
            max_length=model_info.resolve_max_length(cli.model_name, None),
            batch_size=cli.groups_per_batch,
        ),
        file_path=path,
        test_file_path=test_path,
        test_size=cli.test_size,
        shuffle_seed=cli.seed,
    )


def build_config(cli: CLIConfig) -> sdft.Config:
    """Fills in what is derived from the model."""
    check_model(cli)
    renderer_name, _ = model_info.resolve_renderer_name(
        cli.model_name, cli.renderer_name, cli.log_path
    )
    learning_rate = cli.learning_rate
    if learning_rate is None:
        learning_rate = hyperparam_utils.get_lr(cli.model_name)
    return sdft.Config(
        recipe_name="sdft",
        log_path=cli.log_path,
        model_name=cli.model_name,
        dataset_builder=build_dataset(cli, renderer_name),
        renderer_name=renderer_name,
        learning_rate=learning_rate,
        on_policy=cli.on_policy,
        group_size=cli.group_size,
        max_tokens=cli.max_tokens,
        temperature=cli.temperature,
        topk=cli.topk,
        reverse=cli.reverse,
        demo_template=cli.demo_template,
        system_prompt=cli.system_prompt,
        skip_first_n_tokens=cli.skip_first_n_tokens,
        teacher_sync_every=cli.teacher_sync_every,
        max_context_length=cli.max_context_length,
        show_samples=cli.show_samples,
        **cli.shared(),
    )


async def main(config: CLIConfig) -> None:
    """Teaches a model from demonstrations that only its teacher sees."""
    await start(build_config(config), config.behavior_if_log_dir_exists, sdft.main)


if __name__ == "__main__":
    run_entrypoint(main)
