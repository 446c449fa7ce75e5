"""The vision tower of a base model: features of images, and their place in the decoder's input."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.activations import activation_bytes_per_token
from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.engine.model.lora import ActiveTerms, Target
from tinker_cookbook.engine.model.low_rank import LowRank, Terms
from tinker_cookbook.engine.vision.images import (
    ImageInput,
    image_at,
    is_image,
    last_seen,
    numbers_and_indices,
    rotary_positions,
)

_KEPT_BYTES_CPU = 256 << 20
_KEPT_BYTES_GPU = 2 << 30
_KEPT_SHARE_GPU = 16
"""A GPU keeps at most its free memory, when the model is loaded, divided by this."""


class Features(NamedTuple):
    """Features [n, H] of an image, and those that the decoder's first layers add (Qwen3-VL)."""

    embeddings: Tensor
    of_layers: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(part.nbytes for part in (self.embeddings, *self.of_layers))


class VisionTower:
    """Computes features of images.

    Features for the frozen weights of the tower, and for a sampler's snapshot, are computed once
    and kept, as many as fit into a budget. While an adapter on the tower is trained, they are
    part of the graph.
    """

    def __init__(
        self,
        model: Any,
        active: ActiveTerms,
        targets: Sequence[Target],
        device: torch.device,
        *,
        sees_both_ways: bool,
    ) -> None:
        self._model = model  # the multimodal model, which has ``get_image_features``
        self._active = active
        self._names = frozenset(target.name for target in targets if target.group == "vision")
        self.sees_both_ways = sees_both_ways
        """Whether the tokens of an image attend to all of the image."""
        budget = _KEPT_BYTES_CPU
        if device.type != "cpu":
            budget = min(_KEPT_BYTES_GPU, free_memory_bytes(device) // _KEPT_SHARE_GPU)
        self.kept = KeptFeatures(budget)
        self._numbers: weakref.WeakKeyDictionary[LowRank, int] = weakref.WeakKeyDictionary()
        """Of the adapters whose features are kept, by their first term; 0 is the frozen tower."""
        self._counter = itertools.count(1)

    def last_seen(self, tokens: np.ndarray) -> np.ndarray | None:
        """Returns the last index [T] that each token of a sequence sees; ``None``: its own."""
        return last_seen(tokens) if self.sees_both_ways else None

    def positions(self, tokens: np.ndarray) -> np.ndarray | None:
        """Returns rotary positions [3, T] of a sequence; ``None`` if they just count tokens."""
        return rotary_positions(tokens)

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """Returns the decoder's arguments for tokens [B, L], some of which may be images."""
        at = is_image(tokens)
        if not at.any():  # on a GPU, the host waits for this
            return {"input_ids": tokens}
        ids = tokens[at].cpu().numpy()
        numbers, indices = numbers_and_indices(ids)
        owners, all_terms = self._owners(at)
        # Each image once for each adapter that computes it.
        keys = np.stack([owners, numbers])
        _, first, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        features: list[Features] = [Features(torch.empty(0))] * len(first)
        for number, terms in enumerate(all_terms):
            mine = [i for i, at_id in enumerate(first) if owners[at_id] == number]
            images = [image_at(int(ids[first[i]])) for i in mine]
            for i, found in zip(mine, self.features(images, terms), strict=True):
                features[i] = found
        # Index of each position's feature in those of all images, one after another.
        starts = np.cumsum([0, *(len(one.embeddings) for one in features)])
        rows = torch.from_numpy(starts[which.reshape(-1)] + indices).to(tokens.device)
        # Not kept from the start: a quantised base replaces its embeddings.
        embedded = self._model.get_input_embeddings()(tokens.masked_fill(at, 0))
        embedded = embedded.masked_scatter(at[..., None], _rows(features, rows, 0, embedded))
        layers = range(1, 1 + len(features[0].of_layers))
        if not layers:
            return {"inputs_embeds": embedded}
        return {
            "inputs_embeds": embedded,
            "visual_pos_masks": at,
            "deepstack_visual_embeds": [_rows(features, rows, i, embedded) for i in layers],
        }

    def _owners(self, at: Tensor) -> tuple[np.ndarray, Sequence[Terms]]:
        """Returns the index of the adapter of each image position, and each adapter's terms of the
        tower."""
        if (segments := self._active.segments) is None:
            every = [self._active.terms]
        else:
            every = [terms for terms, _, _ in segments.stretches] or [{}]
        found = [{n: term for n, term in terms.items() if n in self._names} for terms in every]
        if not any(found) or len(found) == 1 or segments is None:
            return np.zeros(int(at.sum()), dtype=np.int64), found[:1]
        numbers = segments.numbers(at.numel())
        assert numbers is not None
        return numbers[at.flatten().cpu()].cpu().numpy(), found

    def features(self, images: Sequence[ImageInput], terms: Terms) -> list[Features]:
        """Returns the features of images, with an adapter's ``terms`` of the tower."""
        if any(image.block for image in images):
            parts = [image.block or (image,) for image in images]
            every = iter(self.features([one for block in parts for one in block], terms))
            blocks = (list(itertools.islice(every, len(block))) for block in parts)
            return [Features(torch.cat([one.embeddings for one in block])) for block in blocks]
        trained = next(iter(terms.values()), None)
        if trained is not None and torch.is_grad_enabled() and trained.a.requires_grad:
            return self._compute(images, terms)
        number = 0
        if trained is not None:
            number = self._numbers.get(trained) or next(self._counter)
            self._numbers[trained] = number
        out = []
        for image in images:
            key = number, image.digest
            found = self.kept.get(key)
            if found is None:
                # Each image alone: its features then do not depend on the others of a batch.
                with torch.no_grad():
                    (found,) = self._compute([image], terms)
                self.kept.add(key, found)
            out.append(found)
        return out

    def trains(self, terms: Terms) -> bool:
        """Whether an adapter covers the tower."""
        return not self._names.isdisjoint(terms)

    def activation_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes that the tower keeps for the backward pass per token of an image."""
        config = self._model.config
        vision = config.vision_config
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        hidden = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL's name
        inner = getattr(vision, "intermediate_size", None) or 4 * hidden
        of_patch = activation_bytes_per_token(int(layers), int(hidden), int(inner), itemsize)
        if tokens := getattr(config, "mm_tokens_per_image", None):
            return -(-((vision.image_size // vision.patch_size) ** 2) // tokens) * of_patch
        # The side of a token in patches; InternVL has its inverse.
        names = ("spatial_merge_size", "scale_factor")
        found = (getattr(part, name, None) for part in (vision, config) for name in names)
        merged = next(filter(None, found), 1 / getattr(config, "downsample_ratio", 1))
        return round(merged**2) * of_patch

    def _compute(self, images: Sequence[ImageInput], terms: Terms) -> list[Features]:
        if not images:
            return []
        counts = [int(is_image(image.tokens).sum()) for image in images]
        if counts == [1]:  # Mistral 3 of transformers fails for one feature in all
            return self._compute([*images, *images], terms)[:1]
        device = self._model.get_input_embeddings().weight.device
        made = [image.pixels() for image in images]
        shapes = {tuple(array.shape[1:] for array in one.values()) for one in made}
        if len(shapes) > 1:  # other numbers of tiles
            return [self._compute([image], terms)[0] for image in images]
        pixels = {
            name: torch.from_numpy(np.concatenate([one[name] for one in made])).to(device)
            for name in made[0]
        }
        with self._active.use(terms=terms, segments=None):
            found = self._model.get_image_features(**pixels, return_dict=True)
        by_layer = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        split = (_rows_of(layer).split(counts) for layer in by_layer)
        return [Features(parts[0], parts[1:]) for parts in zip(*split, strict=True)]


class KeptFeatures:
    """Features by number of the adapter and digest of the image, at most ``budget`` bytes. Random
    ones make room for new ones, those of adapters that no longer exist too."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._features: dict[tuple[int, bytes], Features] = {}
        # The least recently used are those that a repeated epoch needs next: of an epoch that is
        # larger than the budget, nothing would be found.
        self._random = random.Random(0)

    def get(self, key: tuple[int, bytes]) -> Features | None:
        """Returns the features; ``None`` if they are not kept."""
        return self._features.get(key)

    def add(self, key: tuple[int, bytes], features: Features) -> None:
        """Keeps the features, unless they alone are above the budget."""
        if features.nbytes > self.budget:
            return
        self.nbytes += features.nbytes
        while self.nbytes > self.budget:
            gone = self._features.pop(self._random.choice(list(self._features)))
            self.nbytes -= gone.nbytes
        self._features[key] = features


def _rows_of(layer: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns features [n, H] of all images; models return one tensor, or one for each image or
    tile."""
    parts = [layer] if isinstance(layer, Tensor) else layer
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _rows(features: Sequence[Features], rows: Tensor, part: int, like: Tensor) -> Tensor:
    """Returns the features [N, H] of the positions; part 0 are the embeddings."""
    parts = [(one.embeddings, *one.of_layers)[part] for one in features]
    return torch.cat(parts)[rows].to(like.dtype)


def has_vision(config: Any) -> bool:
    """Returns whether transformers' config describes a model with a vision tower."""
    return getattr(config, "vision_config", None) is not None
