"""Image classification with a vision-language model, as supervised fine-tuning.

    python -m recipes.vlm_classifier.train            # scanned digits; pip install -e '.[vision]'
    python -m recipes.vlm_classifier.train dataset=caltech101 model_name=Qwen/Qwen3-VL-2B-Instruct
    python -m recipes.vlm_classifier.train dataset=FOLDER model_name=…   # train/CLASS/NAME.png

The default model is a tiny Qwen3-VL of random weights, which the recipe makes. The run's folder is
``experiment_dir/NAME``, with the settings in its name. ``recipes.vlm_classifier.eval confusion=…``
draws which classes are taken for which. On the digits the accuracy is 0.95 - 0.97 after 1:40
minutes.
"""

from __future__ import annotations

import asyncio
import re
from datetime import date
from pathlib import Path

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.tiny_models.llama import make_model_once
from tinker_cookbook.recipes.tiny_models.vlm import RENDERER, make_tiny_vlm
from tinker_cookbook.recipes.vlm_classifier.data import (
    DATASET_HELP,
    TrainingImages,
    get_dataset_builder,
)
from tinker_cookbook.recipes.vlm_classifier.eval import SamplingOptions, get_evaluator_builder
from tinker_cookbook.recipes.vlm_classifier.images import image_data
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.types import SupervisedDatasetBuilder
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.training.lr_scheduling import LRSchedule
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

TINY = "tiny"


@chz.chz
class ExperimentConfig(TrainingImages, SamplingOptions, train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "vlm_classifier"
    experiment_dir: str = chz.field(
        default=cli_utils.default_log_path("vlm_classifier"), doc="Folder of the run's folder"
    )
    log_path: str = chz.field(
        default="", doc="Folder of this run; default: one in experiment_dir, named by settings"
    )
    dataset: str = chz.field(default="digits", doc=DATASET_HELP)
    model_name: str = chz.field(
        default=TINY, doc="Hub name or folder of a model; tiny: one that the recipe makes"
    )
    learning_rate: float | None = peak_rate(
        None, "Peak learning rate of AdamW; default: 5e-4, and 5e-3 for the tiny model"
    )
    lr_schedule: LRSchedule = "cosine"
    num_epochs: int = 3
    eval_every: int = 20
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.LAST_ASSISTANT_MESSAGE, doc="Which messages are trained on"
    )
    run_nll_evaluator: bool = chz.field(default=True, doc="Evaluate the loss on test images")
    run_sampling_evaluator: bool = chz.field(default=True, doc="Evaluate the accuracy of answers")
    n_eval: int | None = number(360, "Test images for the accuracy; None: all", low=1)
    max_tokens: int = number(32, "Maximum tokens of an answer", low=1)

    def build_dataset(self) -> SupervisedDatasetBuilder:
        """Returns the images."""
        return get_dataset_builder(
            self.dataset,
            self.model_name,
            self.renderer,
            train_on_what=self.train_on_what,
            run_nll_evaluator=self.run_nll_evaluator,
            **self.values_of(TrainingImages),
        )

    def resolved(self) -> train.Config:
        """Returns the config of the loop, with the evaluation of answers."""
        config = super().resolved()
        options = self.values_of(SamplingOptions)
        evaluator = get_evaluator_builder(self.dataset, self.model_name, self.renderer, **options)
        more = [evaluator] if self.run_sampling_evaluator else []
        name = Path(self.log_path).name
        return chz.replace(
            config,
            evaluator_builders=[*config.evaluator_builders, *more],
            wandb_name=self.wandb_name or name,
            session_name=self.session_name or self.wandb_name or name,
        )


def learning_rate(config: ExperimentConfig) -> float:
    """Returns the learning rate that was set, or the model's default."""
    return config.learning_rate or (5e-3 if config.model_name == TINY else 5e-4)


def with_model(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the settings with folder, learning rate and model, which is made if it is absent."""
    config = chz.replace(config, log_path=run_folder(config), learning_rate=learning_rate(config))
    if config.model_name != TINY:
        return config
    if config.dataset != "digits":
        raise ConfigurationError(
            f"dataset: got {config.dataset}, but model_name=tiny is made for digits; give a "
            "model_name, such as Qwen/Qwen3-VL-2B-Instruct"
        )
    folder, digits = cli_utils.default_log_path("vlm_classifier_tiny_digits"), image_data("digits")
    texts = [digits.question, *map(digits.answer, "0123456789")]
    make_model_once(folder, lambda: make_tiny_vlm(folder, texts))
    return chz.replace(
        config,
        model_name=folder,
        renderer_name=config.renderer_name or RENDERER,
        # Its vision tower has random weights, so it must be trained too.
        train_vision=True,
    )


def experiment_name(config: ExperimentConfig) -> str:
    """Returns the name of a run's folder, which ``eval_sweep`` reads, without its date."""
    # A path becomes one part of the name; the dataset is the part before the first dash.
    dataset = re.sub(r"[^\w.]+", "_", Path(config.dataset).name)
    model = config.model_name.strip("/.~").replace("/", "-")
    name = (
        f"{dataset}-{model}-{config.lora_rank}rank-{learning_rate(config)}lr-"
        f"{config.batch_size}batch"
    )
    if config.examples_per_class:
        name += f"-{config.examples_per_class}shot-seed{config.subset_seed}"
    return name


def run_folder(config: ExperimentConfig) -> str:
    """Returns ``log_path``, or a folder of ``experiment_dir``.

    To resume, that is the newest folder of a run with these settings, on whatever day it began.
    """
    if config.log_path:
        return config.log_path
    folder, name = Path(config.experiment_dir).expanduser(), experiment_name(config)
    begun = sorted(folder.glob(f"{name}-[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]"))
    if begun and config.behavior_if_log_dir_exists == "resume":
        return str(begun[-1])
    return str(folder / f"{name}-{date.today()}")


async def main(config: ExperimentConfig) -> None:
    """Trains an image classifier, or resumes the run."""
    config = await asyncio.to_thread(with_model, config)
    await train.main(config)


def run_experiment(experiment_config: ExperimentConfig) -> None:
    """Trains an image classifier, for code without an event loop."""
    asyncio.run(main(experiment_config))


if __name__ == "__main__":
    run_entrypoint(main)
