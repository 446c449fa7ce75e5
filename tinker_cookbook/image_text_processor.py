"""What an image is in a prompt, by transformers' whole processor of a model.

For models whose images the engine reads by no code of its own, and for chat templates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tinker_cookbook._process import importing_libraries
from tinker_cookbook.engine.model.resolve import model_config, resolve_model
from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.image_processing_utils import get_image_processor, pillow

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_PLACES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""Arrays of tokens; a vision tower takes none of them."""


class ImageTextProcessor:
    """transformers' processor of texts with images, made of the model's tokenizer and its image
    processor. That of videos, which needs torchvision, is left out."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        given = {
            "image_processor": get_image_processor(str(folder)),
            "tokenizer": AutoTokenizer.from_pretrained(folder, local_files_only=True),
        }
        kind = _processor_class(folder)

        class WithoutVideos(kind):
            @classmethod
            def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
                return [given.get(name) for name in cls.get_attributes()]

            def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
                return value and super().check_argument_for_proper_class(name, value)

        self._processor: Any = WithoutVideos.from_pretrained(folder, local_files_only=True)
        self._count = lru_cache(1024)(self._count_tokens)
        self.mark: str = self._processor.image_token
        """What a chat template writes for an image."""
        self.mark_id: int = given["tokenizer"].convert_tokens_to_ids(self.mark)
        config = model_config(folder)
        own = config.get("image_token_id", config.get("image_token_index", self.mark_id))
        if own != self.mark_id or own is None:
            raise ConfigurationError(
                f"its mark of an image, {self.mark!r}, is token {self.mark_id}, but the model's "
                f"own is {own}"
            )
        # Only images show that a setting is missing, or that they depend on each other.
        sizes = (64, 48), (40, 96)
        alone = sum(self._count(*size) for size in sizes)
        blanks = [pillow().new("RGB", size) for size in sizes]
        options = {"add_special_tokens": False, "return_tensors": "np"}
        both = self.of_prompt([self.mark, self.mark], blanks, **options)["input_ids"].size
        if both != alone:
            raise ConfigurationError(
                f"it writes {both} tokens for two images in one prompt, but {alone} if each is "
                "alone; expected as many"
            )

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        """Returns the arrays of one image for the vision tower, and ``input_ids`` [1, n]: its
        tokens, -1 where it has a feature; raises ValueError for a size that it refuses."""
        try:
            made = dict(self.of_prompt([self.mark], images, add_special_tokens=False, **options))
        except ValueError:
            raise
        except Exception as error:  # processors may raise anything for unusual sizes
            raise ValueError(f"{type(error).__name__}: {error}") from error
        tokens = made["input_ids"]
        arrays = {name: value for name, value in made.items() if name not in _PLACES}
        return arrays | {"input_ids": tokens * (tokens != self.mark_id) - (tokens == self.mark_id)}

    def of_prompt(self, parts: Sequence[str], images: Sequence[Any], **options: Any) -> Any:
        """Returns transformers' input for the text of ``parts``, among them a ``mark`` for each
        image."""
        # In a list for the prompt: several images of one prompt may be other inputs than several
        # prompts with one image.
        return self._processor(text=["".join(parts)], images=[list(images)], **options)

    def count(self, image: Any) -> int:
        """Returns the number of tokens of a Pillow image."""
        return self._count(*image.size)

    def _count_tokens(self, width: int, height: int) -> int:
        blank = pillow().new("RGB", (width, height))
        return self([blank], return_tensors="np")["input_ids"].size

    def to_dict(self) -> dict[str, Any]:
        """Returns its settings."""
        return self._processor.to_dict()


@cache
def get_image_text_processor(model_name: str) -> ImageTextProcessor:
    """Returns the processor of a model (folder or Hub name), made once.

    Raises ``ConfigurationError`` or ``ModelNotFoundError`` if it cannot be made.
    """
    folder = resolve_model(model_name, need="tokenizer").folder
    try:
        with importing_libraries():
            return ImageTextProcessor(folder)
    except Exception as error:  # processors may raise anything
        if isinstance(error, TinkerCookbookError) and str(error).startswith("model_name"):
            raise
        lacks = "" if (folder / _FILES[0]).is_file() else f"; the folder lacks {_FILES[0]}"
        raise ConfigurationError(
            f"model_name: transformers' processor of texts and images in {folder} cannot be used: "
            f"{error}{lacks}"
        ) from error


def _processor_class(folder: Path) -> Any:
    """Returns the class that AutoProcessor would make, also where it needs torchvision."""
    from transformers.models.auto import processing_auto
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    known: dict[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    named = (json.loads(file.read_text("utf-8")).get("processor_class") for file in files)
    kind = str(model_config(folder).get("model_type"))
    name = next(filter(None, named), known.get(kind, ""))
    for module in (model_type_to_module_name(one) for one, its in known.items() if its == name):
        package = f"transformers.models.{module}"
        try:
            return getattr(import_module(f"{package}.processing_{module}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                continue
        # Pixtral's imports a function of the image processor for torchvision; that for Pillow has
        # the same.
        missing = f"{package}.image_processing_{module}"
        sys.modules[missing] = import_module(f"{package}.image_processing_pil_{module}")
        try:
            return getattr(import_module(f"{package}.processing_{module}"), name)
        finally:
            del sys.modules[missing]
    raise ConfigurationError(f"transformers has no processor for model_type {kind!r}")
