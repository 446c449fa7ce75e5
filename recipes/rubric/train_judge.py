"""Trains a judge on labelled answers, and measures it on held-out ones.

    python -m recipes.rubric.train_judge
    python -m recipes.rubric.train_judge labelled_path=labelled.jsonl test_path=held-out.jsonl

The trained token is the label, Yes or No. ``recipes.rubric.train grader_model_path=…`` uses the
weights as its judge; their path is printed at the end.
"""

from __future__ import annotations

from functools import partial

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.judges.judge import YES_NO, LabelJudge
from tinker_cookbook.judges.labels import LabelRenderer
from tinker_cookbook.recipes.rubric.data import load_labelled
from tinker_cookbook.recipes.rubric.env import judge_agreement
from tinker_cookbook.recipes.start import DEMO_MODEL, example_data
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class JudgeDatasetBuilder(SupervisedDatasetBuilder):
    """One example for each criterion of each answer: the judge's prompt and the right label."""

    labelled_path: str = chz.field(doc="Labelled answers")
    model_name_for_tokenizer: str = chz.field(doc="Model that has the tokenizer")
    renderer_name: str = chz.field(doc="Chat format of the judge")
    batch_size: int = chz.field(doc="Examples per step")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Loads the answers."""
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        labels = LabelRenderer(renderer, list(YES_NO))

        def datum(row: dict[str, int]) -> tinker.Datum:
            one, item = labelled[row["answer"]], row["item"]
            right = "Yes" if one.labels[item] >= 0.5 else "No"
            prompt = one.rubric_items[item].get_label_prompt(list(one.convo))
            tokens, weights = labels.example(prompt, right)
            return datum_from_model_input_weights(tinker.ModelInput.from_ints(tokens), weights)

        labelled = load_labelled(self.labelled_path)
        rows = [
            {"answer": i, "item": item}
            for i, one in enumerate(labelled)
            for item in range(len(one.labels))
        ]
        return SupervisedDatasetFromHFDataset(rows, self.batch_size, datum), None


class AgreementEvaluator(SamplingClientEvaluator):
    """Agreement of the weights, as a judge, with held-out labels: ``judge/accuracy`` and others."""

    def __init__(self, path: str | None, model_name: str, renderer_name: str) -> None:
        self.labelled = load_labelled(path or example_data("rubric_labelled.jsonl"))
        self.renderer = get_renderer(renderer_name, get_tokenizer(model_name))

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Grades all answers, and prints the agreement."""
        found = await judge_agreement(LabelJudge(sampling_client, self.renderer), self.labelled)
        print_line("\n  ".join(("On held-out labels:", *found.lines())))
        return {f"judge/{name}": getattr(found, name) for name in ("accuracy", "kappa", "auc")}


@chz.chz
class CLIConfig(train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "rubric_judge"
    model_name: str = DEMO_MODEL
    labelled_path: str | None = chz.field(
        default=None, doc="Labelled answers to train on; default: the example data"
    )
    test_path: str | None = chz.field(
        default=None, doc="Labelled answers to measure on; default: the example's"
    )
    batch_size: int = number(32, "Criteria per step", low=1)
    learning_rate: float | None = None  # the recommended rate
    num_epochs: int = 6
    eval_every: int = 60
    show_samples: int = 0

    def build_dataset(self) -> JudgeDatasetBuilder:
        """Returns the labelled answers to train on."""
        return JudgeDatasetBuilder(
            labelled_path=self.labelled_path or str(example_data("rubric_judge_train.jsonl")),
            model_name_for_tokenizer=self.model_name,
            renderer_name=self.renderer,
            batch_size=self.batch_size,
        )


async def main(cli: CLIConfig) -> None:
    """Trains the judge, and prints its agreement and where its weights are."""
    build = partial(AgreementEvaluator, cli.test_path, cli.model_name, cli.renderer)
    build()  # an error in the file is one before the training
    await train.main(chz.replace(cli, evaluator_builders=[*cli.evaluator_builders, build]))
    saved = get_last_checkpoint(cli.run_path, "sampler_path")
    if saved is not None:
        print_line(f"grader_model_path={saved.sampler_path}")


if __name__ == "__main__":
    run_entrypoint(main)
