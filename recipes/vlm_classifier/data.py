"""Datasets of labelled images, as questions about an image with the name of its class as answer.

``dataset`` is one of ``DATASETS``, a Hub name, or a local folder (see ``images``).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.image_processing_utils import get_image_processor, pillow
from tinker_cookbook.recipes.vlm_classifier.images import KNOWN, image_data, image_of, split_of
from tinker_cookbook.renderers import ImagePart, Message, TextPart, TrainOnWhat, get_renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.imports import tinker, torch

if TYPE_CHECKING:
    import datasets

DATASET_HELP = f"{', '.join(KNOWN)}, a Hub name, or a local folder"


@chz.chz
class TrainingImages:
    """Which images are trained on, and how."""

    num_repeats: float = number(1, "Passes over the training images in an epoch")
    batch_size: int = number(32, "Images per step", low=1)
    max_length: int = number(8192, "Maximum tokens of an example", low=2)
    examples_per_class: int | None = number(None, "Training images per class; None: all", low=1)
    subset_seed: int = chz.field(default=0, doc="Seed of the choice of examples_per_class")
    max_image_size: int = number(480, "Pixels of an image's longest side", low=1)


@chz.chz
class ImageTable:
    """A dataset of labelled images, and the model that reads them."""

    dataset: str = chz.field(doc=DATASET_HELP)
    image_column_name: str = chz.field(default="image", doc="Column of the images")
    label_column_name: str = chz.field(default="label", doc="Column of the labels")
    model_name_for_tokenizer: str = chz.field(doc="Model of tokenizer and image processor")
    renderer_name: str = chz.field(doc="Chat format with images")


@chz.chz
class ClassifierDatasetConfig(ImageTable, TrainingImages):
    """One split of a dataset of labelled images."""

    dataset_split: str = chz.field(doc="train or test")
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.LAST_ASSISTANT_MESSAGE, doc="Which messages are trained on"
    )
    hflip_probability: float = number(0.5, "Share of images that are mirrored", below=1.0001)


class LabelledImages:
    """Rows, class names and renderer of a config of the data or of the evaluator."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.renderer = get_renderer(
            config.renderer_name,
            get_tokenizer(config.model_name_for_tokenizer),
            image_processor=get_image_processor(config.model_name_for_tokenizer),
        )
        self.dataset = split_of(config.dataset, config.dataset_split, config.label_column_name)
        self.class_labels: Any = self.dataset.features[config.label_column_name]
        self.wording = image_data(config.dataset)

    def get_class_name(self, label: str) -> str:
        """Returns the readable name of a class."""
        for mark in "_.-":
            label = label.replace(mark, " ")
        return label.strip().lower()

    def class_name_of(self, example: dict[str, Any]) -> str:
        """Returns the readable name of a row's class."""
        label = example[self.config.label_column_name]
        return self.get_class_name(self.class_labels.int2str(label))

    def question(self, example: dict[str, Any]) -> Message:
        """Returns the user's message: the question and the image of a row."""
        image = image_of(example[self.config.image_column_name], self.config.max_image_size)
        picture = ImagePart(type="image", image=image)
        text = TextPart(type="text", text=self.wording.question)
        first = self.wording.image_first
        return Message(role="user", content=[picture, text] if first else [text, picture])


class ClassifierDataset(LabelledImages, SupervisedDataset):
    """Batches of examples, in an order that depends on the epoch's seed."""

    config: ClassifierDatasetConfig

    def __init__(self, config: ClassifierDatasetConfig) -> None:
        super().__init__(config)
        if config.examples_per_class is not None:
            self.dataset = self._sample_per_class(self.dataset)
        self.set_epoch(0)

    def get_shuffled_indices(self, seed: int = 0) -> list[int]:
        """Returns row numbers of an epoch: ``num_repeats`` passes, each in its own order."""
        rng = random.Random(seed)
        count = len(self.dataset)
        passes = math.ceil(self.config.num_repeats)
        rows = [row for _ in range(passes) for row in rng.sample(range(count), count)]
        return rows[: math.ceil(self.config.num_repeats * count)]

    def _sample_per_class(self, dataset: datasets.Dataset) -> datasets.Dataset:
        """Returns ``examples_per_class`` rows of each class, by ``subset_seed``."""
        rows = defaultdict[int, list[int]](list)
        for index, label in enumerate(dataset[self.config.label_column_name]):
            rows[label].append(index)
        rng = random.Random(self.config.subset_seed)
        count = self.config.examples_per_class
        return dataset.select(
            [i for label in sorted(rows) for i in rng.sample(rows[label], len(rows[label]))[:count]]
        )

    def build_supervised_example(
        self, example: dict[str, Any]
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """Returns tokens and weights of a row: its image, the question and the answer."""
        answer = self.wording.answer(self.class_name_of(example))
        messages = [self.question(example), Message(role="assistant", content=answer)]
        tokens, weights = self.renderer.build_supervised_example(
            messages, self.config.train_on_what
        )
        return tokens, weights

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the batch at ``index``."""
        size = self.config.batch_size
        numbers = range(index * size, min((index + 1) * size, len(self.shuffled_indices)))
        return [
            datum_from_model_input_weights(
                *self.build_supervised_example(self._row(number)), self.config.max_length
            )
            for number in numbers
        ]

    def _row(self, number: int) -> dict[str, Any]:
        """Returns the row at a position of the epoch, mirrored at random."""
        row = self.dataset[self.shuffled_indices[number]]
        # The choice depends on epoch and position only, so that a resumed run makes it again.
        rng = random.Random(f"{self._epoch_seed} {number}")
        if rng.random() < self.config.hflip_probability:
            column = self.config.image_column_name
            image = image_of(row[column], self.config.max_image_size)
            row = row | {column: image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)}
        return row

    def __len__(self) -> int:
        """Returns the number of batches."""
        return math.ceil(len(self.shuffled_indices) / self.config.batch_size)

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffles the rows."""
        self._epoch_seed = seed
        self.shuffled_indices = self.get_shuffled_indices(seed)

    def data_sources(self) -> dict[str, Any]:
        """Returns the rows."""
        return {"": self.dataset}


@chz.chz
class ClassifierDatasetBuilder(ImageTable, TrainingImages, SupervisedDatasetBuilder):
    """Training images, and test images for the loss on them."""

    train_on_what: TrainOnWhat | None = chz.field(
        default=None, doc="Which messages are trained on; None: the last answer"
    )
    hflip_probability: float | None = number(
        None, "Share of training images that are mirrored; default: 0.5, and 0 for digits"
    )
    run_nll_evaluator: bool = chz.field(default=False, doc="Evaluate the loss on the test images")

    def __call__(self) -> tuple[ClassifierDataset, ClassifierDataset | None]:
        """Returns the training set, and the test set if its loss is evaluated."""
        mirrored = self.hflip_probability
        if mirrored is None:
            mirrored = image_data(self.dataset).hflip_probability
        train = self._split("train", self.examples_per_class, mirrored)
        # The test set is complete and not mirrored.
        return train, self._split("test", None, 0.0) if self.run_nll_evaluator else None

    def _split(
        self, split: str, examples_per_class: int | None, hflip_probability: float
    ) -> ClassifierDataset:
        shared = chz.chz_fields(ClassifierDatasetConfig).keys() & chz.chz_fields(type(self)).keys()
        settings = {name: getattr(self, name) for name in shared} | {
            "dataset_split": split,
            "train_on_what": self.train_on_what or TrainOnWhat.LAST_ASSISTANT_MESSAGE,
            "num_repeats": self.num_repeats if split == "train" else 1,
            "examples_per_class": examples_per_class,
            "hflip_probability": hflip_probability,
        }
        return ClassifierDataset(ClassifierDatasetConfig(**settings))


@chz.chz
class Caltech101DatasetBuilder(ClassifierDatasetBuilder):
    """Caltech 101: objects of 101 kinds."""

    dataset: str = chz.field(default="caltech101", doc=DATASET_HELP)


@chz.chz
class Flowers102DatasetBuilder(ClassifierDatasetBuilder):
    """Oxford Flowers 102: flowers of 102 kinds."""

    dataset: str = chz.field(default="flowers102", doc=DATASET_HELP)


@chz.chz
class OxfordPetsDatasetBuilder(ClassifierDatasetBuilder):
    """Oxford-IIIT Pet: cats and dogs of 37 breeds."""

    dataset: str = chz.field(default="pets", doc=DATASET_HELP)


@chz.chz
class StanfordCarsDatasetBuilder(ClassifierDatasetBuilder):
    """Stanford Cars: 196 models of cars."""

    dataset: str = chz.field(default="cars", doc=DATASET_HELP)


DATASETS: dict[str, type[ClassifierDatasetBuilder]] = {
    "caltech101": Caltech101DatasetBuilder,
    "flowers102": Flowers102DatasetBuilder,
    "pets": OxfordPetsDatasetBuilder,
    "cars": StanfordCarsDatasetBuilder,
}


def get_dataset_builder(
    dataset: str,
    model_name_for_tokenizer: str,
    renderer_name: str,
    num_repeats: float = 1,
    batch_size: int = 32,
    max_length: int = 8192,
    train_on_what: TrainOnWhat | None = None,
    examples_per_class: int | None = None,
    subset_seed: int = 0,
    max_image_size: int = 480,
    run_nll_evaluator: bool = False,
) -> ClassifierDatasetBuilder:
    """Returns the builder of a dataset: a short name, a Hub name or a local folder."""
    # A subclass has another default, and no other behaviour.
    return DATASETS.get(dataset, ClassifierDatasetBuilder)(**locals())
