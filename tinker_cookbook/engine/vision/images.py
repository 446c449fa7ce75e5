"""Images as runs of token ids above the vocabulary.

An image takes as many positions of a sequence as it has features. Each of these positions gets an
id that no text token has and that depends on the pixels, so everything that compares tokens
(packing, shared prefixes, the prefix cache, scoring) also compares images. Images are expanded here
for sampler and trainer alike, so the two cannot disagree.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from tinker_cookbook.exceptions import DataValidationError

_INDEX_BITS = 16
_NUMBER_BITS = 46
IMAGE_IDS = 1 << (_INDEX_BITS + _NUMBER_BITS)
"""Ids of this size and above are positions of images."""

MOST_TOKENS = 1 << _INDEX_BITS
"""Maximum positions of one image."""


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image of a prompt, for the models of one image processor.

    ``tokens`` [n] int64 are its ids in a sequence; those below ``IMAGE_IDS`` are text tokens of its
    expansion, such as row and column marks. ``positions`` [3, n] are rotary positions of time,
    height and width, relative to the image's first token, and the next token follows after
    ``advance``; ``None``: positions count tokens. With ``both_ways``, its tokens see each other in
    both directions. ``digest`` identifies pixels and processor.

    Such images without text between them are one ``ImageInput``, whose ``block`` they are.
    """

    digest: bytes
    make_pixels: Callable[[], dict[str, np.ndarray]] = field(repr=False)
    tokens: np.ndarray
    positions: np.ndarray | None = None
    advance: int = 0
    both_ways: bool = False
    block: tuple[ImageInput, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def number(self) -> int:
        """Number of the image, the same in every process."""
        return number_of(self.digest)

    def pixels(self) -> dict[str, np.ndarray]:
        """Returns the arrays that the image processor makes of the image."""
        return self.make_pixels()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, tuple(getattr(self, one.name) for one in fields(self))


_images: weakref.WeakValueDictionary[int, ImageInput] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def number_of(digest: bytes) -> int:
    """Returns the number of the image with this digest."""
    # A function of the pixels, so that the order of sequences, and with it each sum of a pass, is
    # the same in a resumed run. Two of 10,000 images have the same number once in a million times.
    return int.from_bytes(digest[:8], "big") >> (64 - _NUMBER_BITS)


def feature_ids(digest: bytes, count: int) -> np.ndarray:
    """Returns the ids [count] of an image's features."""
    return IMAGE_IDS + (number_of(digest) << _INDEX_BITS) + np.arange(count, dtype=np.int64)


def interned(image: ImageInput) -> ImageInput:
    """Returns the live image with the same pixels, or else ``image``, which is found from now on by
    the ids in its tokens as long as it is referenced."""
    with _lock:
        found = _images.get(image.number)
        if found is not None and found.digest == image.digest:
            return found
        _images[image.number] = image
        return image


def image_at(token: int) -> ImageInput:
    """Returns the image of a token id of ``IMAGE_IDS`` or above."""
    return _images[(token - IMAGE_IDS) >> _INDEX_BITS]


def text_tokens(tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens of a sequence [T] that are not positions of images."""
    at = is_image(tokens)
    return tokens[~at] if at.any() else tokens


def is_image(tokens: Any) -> Any:
    """Returns the mask of the tokens (array or tensor) that are positions of images."""
    return tokens >= IMAGE_IDS


def numbers_and_indices(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the image's number and the index in it of each of ``tokens`` [T], which are all
    positions of images."""
    ids = tokens - IMAGE_IDS
    return ids >> _INDEX_BITS, ids & (MOST_TOKENS - 1)


def rotary_positions(tokens: np.ndarray) -> np.ndarray | None:
    """Returns the positions [3, T] of time, height and width of a sequence [T]; ``None`` if it has
    no image with such positions.

    Source: Wang et al. 2024, "Qwen2-VL" (arXiv 2409.12191), section 2.1.
    """
    starts = np.flatnonzero(is_image(tokens) & ((tokens & (MOST_TOKENS - 1)) == 0))
    if not len(starts):
        return None
    images = [image_at(int(tokens[start])) for start in starts]
    if images[0].positions is None:
        return None
    out = np.empty((3, len(tokens)), dtype=np.int64)
    done = following = 0
    for start, image in zip(starts, images, strict=True):
        assert image.positions is not None
        out[:, done:start] = following + np.arange(start - done)
        following += start - done
        done = start + len(image)
        out[:, start:done] = following + image.positions[:, : len(tokens) - start]
        following += image.advance
    out[:, done:] = following + np.arange(max(0, len(tokens) - done))
    return out


def last_seen(tokens: np.ndarray) -> np.ndarray | None:
    """Returns the index [T] of the last token that each token of a sequence attends to, in models
    whose images see themselves in both directions: the end of the image, or the token itself.
    ``None`` for a sequence without images."""
    at = is_image(tokens)
    if not at.any():
        return None
    out = np.arange(len(tokens))
    for start in np.flatnonzero(at & ((tokens & (MOST_TOKENS - 1)) == 0)):
        end = min(start + len(image_at(int(tokens[start]))), len(tokens))
        out[start:end] = end - 1
    return out


def whole_images(seen: np.ndarray | None, start: int, count: int) -> int:
    """Returns the number of tokens from ``start`` on that ends outside of images, given ``seen`` of
    ``last_seen``: at most ``count``, unless the first image alone has more tokens."""
    last = start + count - 1
    if seen is None or seen[last] == last:
        return count
    first = int(np.searchsorted(seen, seen[last]))  # the first token of the image
    return first - start if first > start else int(seen[last]) + 1 - start


def grid_positions(height: int, width: int) -> np.ndarray:
    """Returns relative positions [3, height * width] of an image's features, row by row."""
    down, across = np.divmod(np.arange(height * width), width)
    return np.stack([np.zeros_like(down), down, across])


def _unpickled(*values: Any) -> ImageInput:
    return interned(ImageInput(*values))


def joined(
    parts: Sequence[np.ndarray | ImageInput], where: str = ""
) -> tuple[np.ndarray, tuple[ImageInput, ...]]:
    """Returns the token ids [T] int64 of a sequence of text tokens and images, and its images.

    Raises ``DataValidationError``, which begins with ``where``, for a block of too many images.
    """
    found: list[np.ndarray | ImageInput] = []
    runs = itertools.groupby(filter(len, parts), lambda part: getattr(part, "both_ways", False))
    for both_ways, run in runs:
        group = list(run)
        found += [_block(group, where)] if both_ways and len(group) > 1 else group
    arrays = [part.tokens if isinstance(part, ImageInput) else part for part in found]
    tokens = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
    return tokens, tuple(part for part in found if isinstance(part, ImageInput))


def _block(images: Sequence[Any], where: str) -> ImageInput:
    """Returns neighbouring images as one.

    Its ids differ from those of the images alone, because the first image sees the later ones: no
    sequence with other images after it may share its keys and values.
    """
    count = sum(map(len, images))
    if count > MOST_TOKENS:
        raise DataValidationError(
            f"{where}: {len(images)} images without text between them have {count} tokens, "
            f"expected at most {MOST_TOKENS}; put text between them"
        )
    digest = hashlib.sha256(b"".join(image.digest for image in images)).digest()
    ids, block = feature_ids(digest, count), tuple(images)
    make_pixels = partial(_pixels_of, block)
    return interned(ImageInput(digest, make_pixels, ids, both_ways=True, block=block))


def _pixels_of(images: Sequence[ImageInput]) -> dict[str, np.ndarray]:
    made = [image.pixels() for image in images]
    return {name: np.concatenate([one[name] for one in made]) for name in made[0]}
