"""Images as runs of token ids above the vocabulary.

An image takes as many positions of a sequence as it has features. Each of these positions gets an
id that no text token has and that depends on the pixels, so everything that compares tokens
(packing, shared prefixes, the prefix cache, scoring) also compares images. Images are expanded here
for sampler and trainer alike, so the two cannot disagree.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    ``advance``; ``None``: positions count tokens. ``digest`` identifies pixels and processor.
    """

    digest: bytes
    make_pixels: Callable[[], dict[str, np.ndarray]] = field(repr=False)
    tokens: np.ndarray
    positions: np.ndarray | None = None
    advance: int = 0

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
        values = self.digest, self.make_pixels, self.tokens, self.positions, self.advance
        return _unpickled, values


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


def joined(parts: Sequence[np.ndarray | ImageInput]) -> np.ndarray:
    """Returns the token ids [T] int64 of a sequence of text tokens and images."""
    arrays = [part.tokens if isinstance(part, ImageInput) else part for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
