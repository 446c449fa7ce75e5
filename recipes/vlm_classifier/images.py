"""Labelled images: tables of the Hub and of local folders, and the scanned digits of scikit-learn.

A folder has subfolders ``train`` and ``test`` with a subfolder of images for each class, or is a
local copy of a Hub dataset.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.image_processing_utils import open_image, pillow, png_bytes, resize_image
from tinker_cookbook.supervised.hf_datasets import load_hf_splits
from tinker_cookbook.utils.imports import missing_extra

if TYPE_CHECKING:
    import datasets
    from PIL import Image

_HELD_OUT = 360
_NAMES_OF_TEST = ("test", "validation", "valid", "val", "dev")

_EXPECTED = (
    "expected a folder with train/CLASS/NAME.png and test/CLASS/NAME.png, a copy of a Hub dataset, "
    "or the name of one"
)


@dataclass(frozen=True)
class ImageData:
    """A dataset and the text around its images: the question, and the answer before and after the
    name of the class."""

    path: str
    """``digits``, a Hub name or a local folder."""
    question: str = "What is the name of the subject in this photo?"
    before: str = "The subject in this photo is:"
    after: str = "\n"
    image_first: bool = True
    """Whether the image is before the question."""
    prefill: bool = True
    """Whether an evaluated answer begins with ``before``, so that only the name is sampled."""
    hflip_probability: float = 0.5
    """Share of training images that are mirrored."""

    def answer(self, name: str) -> str:
        """Returns the answer that names a class."""
        return f"{self.before} {name}{self.after}"

    def class_in(self, answer: str) -> str:
        """Returns the name of the class in an answer, which may lack ``before``."""
        return answer.rpartition(self.before)[2].strip().rstrip(".").strip().lower()


KNOWN = {
    "caltech101": ImageData("dpdl-benchmark/caltech101"),
    "flowers102": ImageData("dpdl-benchmark/oxford_flowers102"),
    "pets": ImageData("dpdl-benchmark/oxford_iiit_pet"),
    "cars": ImageData("tanganke/stanford_cars"),
    "digits": ImageData(
        "digits",
        "Which digit?",
        "The digit is",
        ".",
        image_first=False,
        prefill=False,
        hflip_probability=0.0,  # mirrored digits are other signs
    ),
}
"""Datasets with a short name."""


def image_data(dataset: str) -> ImageData:
    """Returns the dataset of a short name, a Hub name or a local folder."""
    return KNOWN.get(dataset) or ImageData(dataset)


@lru_cache(maxsize=4)
def load_images(dataset: str) -> Mapping[str, datasets.Dataset]:
    """Returns the splits of a dataset: a short name, a Hub name or a local folder."""
    path = image_data(dataset).path
    if path == "digits":
        return _digits()
    folder = Path(path).expanduser()
    if folder.is_dir():
        import datasets

        return cast("Mapping[str, Any]", datasets.load_dataset(str(folder)))
    splits = cast("Mapping[str, Any]", load_hf_splits(path, instead=_EXPECTED))
    # Rows of images and labels have no objects, so they need no cleaning.
    return {name: rows.with_format(None) for name, rows in splits.items()}


def split_of(dataset: str, split: str, label_column: str = "label") -> datasets.Dataset:
    """Returns a split with class labels; ``test`` may have the name ``validation``.

    Raises DataValidationError for a missing split.
    """
    import datasets

    splits = load_images(dataset)
    names = _NAMES_OF_TEST if split == "test" else (split,)
    found = next((splits[name] for name in names if name in splits), None)
    if found is None:
        raise DataValidationError(
            f"dataset: {dataset} has the splits {', '.join(splits)}, expected {split!r} among them"
        )
    if isinstance(found.features[label_column], datasets.ClassLabel):
        return found
    return found.class_encode_column(label_column)


def image_of(cell: Any, max_size: int) -> Image.Image:
    """Returns the image of a cell, at most ``max_size`` pixels long."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    return resize_image(open_image(cell)[0], max_size)


def _digits() -> Mapping[str, datasets.Dataset]:
    """Returns the 1,797 scanned digits of scikit-learn: 1,437 train, 360 test, in a fixed order."""
    try:
        library: Any = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise missing_extra("the scanned digits of scikit-learn", error, "vision") from error
    import datasets

    found = library.load_digits()
    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list("0123456789"))}
    order = np.random.default_rng(0).permutation(len(found.target))
    splits = {"train": order[:-_HELD_OUT], "test": order[-_HELD_OUT:]}
    # Pixels are 0 to 16; white ink on black, as scanned.
    pixels = np.minimum(found.images * 16, 255).astype(np.uint8)
    return {
        name: datasets.Dataset.from_dict(
            {
                "image": [{"bytes": png_bytes(pillow().fromarray(pixels[i]))} for i in rows],
                "label": found.target[rows].tolist(),
            },
            features=datasets.Features(columns),
        )
        for name, rows in splits.items()
    }
