"""Evaluation of image classifiers: the model names the class of test images.

    python -m recipes.vlm_classifier.eval model_path=FOLDER_OF_A_RUN

The accuracy is the share of images whose class the answer names. ``confusion=FILE.png`` draws which
classes are taken for which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.plot import save_figure
from tinker_cookbook.recipes.vlm_classifier.data import DATASET_HELP, ImageTable, LabelledImages
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import missing_extra, tinker
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class SamplingOptions:
    """How answers are sampled, and how many."""

    temperature: float = number(0.0, "Sampling temperature")
    max_tokens: int = number(128, "Maximum tokens of an answer", low=1)
    top_p: float = number(1.0, "Nucleus sampling: probability mass that is kept")
    top_k: int = number(-1, "Most likely tokens that are kept; -1: all", low=-1)
    n_eval: int | None = number(None, "Test images to evaluate on; None: all", low=1)
    max_parallel_tasks: int = number(128, "Answers sampled at the same time", low=1)
    max_image_size: int = number(480, "Pixels of an image's longest side", low=1)


@chz.chz
class ClassifierEvaluatorConfig(ImageTable, SamplingOptions):
    """Images to evaluate on, and how answers are sampled."""

    dataset_split: str = chz.field(doc="Usually test")


class ClassifierOutput(TypedDict):
    """What an answer says."""

    predicted_class_name: str


class ClassifierEvaluator(LabelledImages, SamplingClientEvaluator):
    """Accuracy of sampled answers. A subclass may ask or grade in another way."""

    def __init__(self, config: ClassifierEvaluatorConfig) -> None:
        super().__init__(config)
        # The same images in every evaluation and every run.
        self.shuffled_dataset = self.dataset.shuffle(seed=0)
        self.last_answers: list[tuple[str, str]] = []
        """Class and named class of each image of the last evaluation."""

    def build_generation_prompt(self, example: dict[str, Any]) -> tinker.ModelInput:
        """Returns the prompt of a row."""
        prefill = self.wording.before if self.wording.prefill else None
        return self.renderer.build_generation_prompt([self.question(example)], prefill=prefill)

    async def generate_output(
        self,
        model_input: tinker.ModelInput,
        sampling_client: SamplingClient,
        sampling_params: tinker.SamplingParams,
    ) -> ClassifierOutput:
        """Samples an answer and returns the class that it names."""
        response = await sampling_client.sample(model_input, 1, sampling_params)
        message, _ = self.renderer.parse_response(response.sequences[0].tokens)
        return ClassifierOutput(
            predicted_class_name=self.wording.class_in(get_text_content(message))
        )

    def get_metrics_for_output(
        self, example: dict[str, Any], classifier_output: ClassifierOutput
    ) -> dict[str, float]:
        """Returns whether the answer names the class."""
        named = classifier_output["predicted_class_name"]
        return {"accuracy": float(named == self.class_name_of(example))}

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the mean metrics of the first ``n_eval`` images of a fixed order."""
        config = self.config
        params = tinker.SamplingParams(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop=self.renderer.get_stop_sequences(),
        )
        count = min(len(self.shuffled_dataset), config.n_eval or len(self.shuffled_dataset))
        free = asyncio.Semaphore(config.max_parallel_tasks)

        async def answer(index: int) -> tuple[str, str, dict[str, float]]:
            async with free:
                # Decoding an image takes time, which other requests should not wait for.
                row = await asyncio.to_thread(self.shuffled_dataset.__getitem__, index)
                prompt = await asyncio.to_thread(self.build_generation_prompt, row)
                output = await self.generate_output(prompt, sampling_client, params)
            metrics = self.get_metrics_for_output(row, output)
            return self.class_name_of(row), output["predicted_class_name"], metrics

        answers = await asyncio.gather(*map(answer, range(count)))
        self.last_answers = [(name, named) for name, named, _ in answers]
        return {key: sum(metrics[key] for *_, metrics in answers) / count for key in answers[0][2]}


@chz.chz
class ClassifierEvaluatorBuilder(SamplingOptions):
    """Builds the evaluator of the test images of a dataset."""

    dataset: str = chz.field(doc=DATASET_HELP)
    model_name_for_tokenizer: str = chz.field(doc="Model of tokenizer and image processor")
    renderer_name: str = chz.field(doc="Chat format with images")

    def __call__(self) -> ClassifierEvaluator:
        """Returns the evaluator."""
        settings = {name: getattr(self, name) for name in chz.chz_fields(type(self))}
        return ClassifierEvaluator(ClassifierEvaluatorConfig(**settings, dataset_split="test"))


@chz.chz
class Caltech101EvaluatorBuilder(ClassifierEvaluatorBuilder):
    """As ``Caltech101DatasetBuilder``."""

    dataset: str = chz.field(default="caltech101", doc=DATASET_HELP)


@chz.chz
class Flowers102EvaluatorBuilder(ClassifierEvaluatorBuilder):
    """As ``Flowers102DatasetBuilder``."""

    dataset: str = chz.field(default="flowers102", doc=DATASET_HELP)


@chz.chz
class OxfordPetsEvaluatorBuilder(ClassifierEvaluatorBuilder):
    """As ``OxfordPetsDatasetBuilder``."""

    dataset: str = chz.field(default="pets", doc=DATASET_HELP)


@chz.chz
class StanfordCarsEvaluatorBuilder(ClassifierEvaluatorBuilder):
    """As ``StanfordCarsDatasetBuilder``."""

    dataset: str = chz.field(default="cars", doc=DATASET_HELP)


EVALUATORS: dict[str, type[ClassifierEvaluatorBuilder]] = {
    "caltech101": Caltech101EvaluatorBuilder,
    "flowers102": Flowers102EvaluatorBuilder,
    "pets": OxfordPetsEvaluatorBuilder,
    "cars": StanfordCarsEvaluatorBuilder,
}


def get_evaluator_builder(
    dataset: str,
    model_name_for_tokenizer: str,
    renderer_name: str,
    temperature: float = 0.0,
    max_tokens: int = 128,
    top_p: float = 1.0,
    top_k: int = -1,
    n_eval: int | None = None,
    max_parallel_tasks: int = 128,
    max_image_size: int = 480,
) -> ClassifierEvaluatorBuilder:
    """Returns the builder of an evaluator: a short name, a Hub name or a local folder."""
    return EVALUATORS.get(dataset, ClassifierEvaluatorBuilder)(**locals())


@chz.chz
class EvalConfig(SamplingModelSettings, SamplingOptions):
    """Settings of the evaluation of a checkpoint."""

    dataset: str = chz.field(default="digits", doc=DATASET_HELP)
    confusion: str | None = chz.field(default=None, doc="Picture of the confusion matrix to write")


def draw_confusion(answers: Sequence[tuple[str, str]], path: str | Path) -> None:
    """Writes a picture of how often each class is named for each; answers that name none are
    "other"."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from sklearn.metrics import ConfusionMatrixDisplay
    except ImportError as error:
        raise missing_extra("pictures of confusion matrices", error, "plot,vision") from error
    truth, named = zip(*answers, strict=True)
    names = sorted(set(truth))
    named = [name if name in names else "other" for name in named]
    labels = [*names, "other"] if "other" in named else names
    size = 1.5 + 0.35 * max(4, len(labels))
    figure, axes = pyplot.subplots(figsize=(size, size), constrained_layout=True)
    settings: dict[str, Any] = {"cmap": "Blues", "colorbar": False, "xticks_rotation": "vertical"}
    ConfusionMatrixDisplay.from_predictions(truth, named, labels=labels, ax=axes, **settings)
    save_figure(figure, path, "confusion")


async def evaluate(config: EvalConfig) -> dict[str, float]:
    """Returns the metrics of a checkpoint, or of a base model."""
    config.check()
    with config.connect() as connection:
        model = await open_sampling_model(connection, config)
        evaluator = get_evaluator_builder(
            config.dataset,
            model.model_name,
            model.renderer_name,
            **{name: getattr(config, name) for name in chz.chz_fields(SamplingOptions)},
        )()
        metrics = await evaluator(model.client)
    if config.confusion is not None:
        draw_confusion(evaluator.last_answers, config.confusion)
    return metrics


async def main(config: EvalConfig) -> None:
    """Prints the metrics of a checkpoint."""
    print_line(f"Metrics = {await evaluate(config)}")


def run_eval(eval_config: EvalConfig) -> None:
    """Prints the metrics of a checkpoint, for code without an event loop."""
    asyncio.run(main(eval_config))


if __name__ == "__main__":
    run_entrypoint(main)
