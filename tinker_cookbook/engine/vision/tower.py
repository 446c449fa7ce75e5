"""The vision tower of a base model: features of images, and their place in the decoder's input."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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

SEES_BOTH_WAYS = frozenset({"gemma3"})
_KEPT_BYTES_CPU = 256 << 20
_KEPT_BYTES_GPU = 2 << 30


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
        self, model: Any, active: ActiveTerms, targets: Sequence[Target], device: torch.device
    ) -> None:
        self._model = model  # the multimodal model, which has ``get_image_features``
        self._embed = model.get_input_embeddings()
        self._active = active
        self._names = frozenset(target.name for target in targets if target.group == "vision")
        self.sees_both_ways = model.config.model_type in SEES_BOTH_WAYS
        """Whether the tokens of an image attend to all of the image."""
        budget = _KEPT_BYTES_CPU if device.type == "cpu" else _KEPT_BYTES_GPU
        self._frozen = _Kept(budget)
        self._adapted: weakref.WeakKeyDictionary[LowRank, _Kept] = weakref.WeakKeyDictionary()

    def last_seen(self, tokens: np.ndarray) -> np.ndarray | None:
        """Returns the last index [T] that each token of a sequence sees; ``None``: its own."""
        return last_seen(tokens) if self.sees_both_ways else None

    def positions(self, tokens: np.ndarray) -> np.ndarray | None:
        """Returns rotary positions [3, T] of a sequence; ``None`` if they just count tokens."""
        return rotary_positions(tokens)

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """Returns the decoder's arguments for tokens [B, L], some of which may be images."""
        at = is_image(tokens)
        if not at.any():
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
        embedded = self._embed(tokens.masked_fill(at, 0))
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
        trained = next(iter(terms.values()), None)
        if trained is not None and torch.is_grad_enabled() and trained.a.requires_grad:
            return self._compute(images, terms)
        kept = self._frozen
        if trained is not None:
            kept = self._adapted.setdefault(trained, _Kept(self._frozen.budget // 4))
        out = []
        for image in images:
            found = kept.get(image.digest)
            if found is None:
                # Each image alone: its features then do not depend on the others of a batch.
                with torch.no_grad():
                    (found,) = self._compute([image], terms)
                kept.add(image.digest, found)
            out.append(found)
        return out

    def _compute(self, images: Sequence[ImageInput], terms: Terms) -> list[Features]:
        if not images:
            return []
        device = self._embed.weight.device
        made = [image.pixels() for image in images]
        shapes = {tuple(array.shape[1:] for array in one.values()) for one in made}
        if len(shapes) > 1:  # other numbers of tiles
            return [self._compute([image], terms)[0] for image in images]
        pixels = {
            name: torch.from_numpy(np.concatenate([one[name] for one in made])).to(device)
            for name in made[0]
        }
        with self._active.use(terms):
            found = self._model.get_image_features(**pixels, return_dict=True)
        by_layer = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [Features(parts[0], parts[1:]) for parts in (zip(*by_layer, strict=True))]


class _Kept:
    """Features by the images' digests, at most ``budget`` bytes; the least recently used go
    first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._features: OrderedDict[bytes, Features] = OrderedDict()
        self._bytes = 0

    def get(self, digest: bytes) -> Features | None:
        found = self._features.get(digest)
        if found is not None:
            self._features.move_to_end(digest)
        return found

    def add(self, digest: bytes, features: Features) -> None:
        self._features[digest] = features
        self._bytes += features.nbytes
        while self._bytes > self.budget and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].nbytes


def _rows(features: Sequence[Features], rows: Tensor, part: int, like: Tensor) -> Tensor:
    """Returns the features [N, H] of the positions; part 0 are the embeddings."""
    parts = [(one.embeddings, *one.of_layers)[part] for one in features]
    return torch.cat(parts)[rows].to(like.dtype)


def has_vision(config: Any) -> bool:
    """Returns whether transformers' config describes a model with a vision tower."""
    return getattr(config, "vision_config", None) is not None
