"""The frozen base model: loaded once, shared by every run and sampler on the device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinker_cookbook.engine.activations import activation_bytes_per_token
from tinker_cookbook.engine.kernels import (
    StepList,
    fuse,
    quantized_layout,
    training_attention,
)
from tinker_cookbook.engine.memory import KnownLimits, release_cached_memory
from tinker_cookbook.engine.model import attention_hook
from tinker_cookbook.engine.model.attention_hook import Layout
from tinker_cookbook.engine.model.attention_support import (
    check_batch_attention,
    check_packed_attention,
    check_tree_attention,
    probe_tokens,
)
from tinker_cookbook.engine.model.experts import AdapterExperts, stacked_experts
from tinker_cookbook.engine.model.head import Head
from tinker_cookbook.engine.model.loading import (
    check_architecture,
    dequantized,
    eos_ids,
    leave_file,
    model_class,
    weights_digest,
)
from tinker_cookbook.engine.model.lora import (
    ActiveTerms,
    AdapterLinear,
    AdapterSpec,
    Target,
)
from tinker_cookbook.engine.model.low_rank import Segments, Terms
from tinker_cookbook.engine.model.placement import Placement, whole_parameters
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout
from tinker_cookbook.engine.sampling.paged_cache import LayerShape
from tinker_cookbook.engine.training.packed_attention import PackedLayout
from tinker_cookbook.engine.training.packing import MicroBatch, Row, pad
from tinker_cookbook.engine.training.tree_attention import TreeLayout
from tinker_cookbook.engine.vision.images import is_image
from tinker_cookbook.engine.vision.probe import Probe, difference, probe_of, whole_probe
from tinker_cookbook.engine.vision.tower import VisionTower, has_vision
from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.leaves import load_leaf

_ATTN = re.compile(r"\.(self_attn|attn|attention|self_attention|linear_attn)\.")
_MLP = re.compile(r"\.(mlp|feed_forward|block_sparse_moe)\.")
_LAYER = re.compile(r"\.\d+\.")
_TRAINING_ATTENTION = "tinker_cookbook_cpu"
_DIFFERS = "log-probabilities of the engine differ from the model's own"


class BaseModel:
    """A transformers causal or vision-language model with hooks for adapters and a chunked head.

    Attributes: ``name`` as the user gave it, ``folder``, ``device``, ``dtype``, ``targets`` (the
    layers that can carry an adapter), ``head``, ``vocab_size``, ``context_length``, ``eos_ids``,
    ``weights_digest`` (identifies the weights; checkpoints record it).
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        base_dtype: str = "auto",
        replay_router: bool = False,
        *,
        sharding: Any = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.name, self.folder, self.device, self.dtype = name, folder, device, dtype
        quantized = base_dtype != "auto"
        placement = Placement(device, quantized_layout(base_dtype), sharding)
        self.weights_digest = weights_digest(folder)
        self.sharding = sharding
        """``extensions.parallel.sharding.Sharding`` if the processes of torchrun keep a shard each;
        then all run its layers in step."""
        self.with_processes: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the layers run; it makes the other processes run them too."""
        # A model that is quantised or sharded may fit the device only then, so its matrices move
        # one by one.
        whole = not quantized and sharding is None
        at = device if whole else torch.device("cpu")
        model = self._model = _load(name, folder, at, device, dtype)
        # Of a run that trains all weights. Not in place: parameters may be mapped from the file.
        if weights is not None:
            for key, parameter in model.named_parameters():
                parameter.data = weights[key].detach().to(parameter, copy=True)
        self.config: Any = model.config
        of_text = getattr(model.config, "text_config", model.config)
        self.context_length = int(getattr(of_text, "max_position_embeddings", 0) or 1 << 30)
        self.limits = KnownLimits()
        self.sampled_tokens = 0  # total, including cancelled requests

        self._decoder: Any = model.get_decoder() if has_vision(model.config) else model.base_model
        vocabulary = model.get_input_embeddings().weight.shape[0]
        text = probe_tokens(vocabulary, 8)
        probe = probe_of(name, folder, model.config, text, at)
        expected, hidden = probe.reference(model, with_hidden=quantized)
        self._active = ActiveTerms()
        self.targets = _hook(model, self._decoder, self._active, placement)
        self.vision: VisionTower | None = None
        """Of a model that takes images."""
        self.image_refusal = ""
        """Why a vision-language model takes none."""
        if probe.image is not None:
            self.vision = self._tower(sees_both_ways=probe.image.both_ways)
        if sharding is None:
            model.to(device)
        else:  # the rest is moved layer by layer
            for part in (*whole_parameters(model).values(), *model.buffers()):
                part.data = part.to(device)
        self.head = Head.of(model, self.config)
        self.vocab_size = self.head.weight.shape[0]
        # Shrunken models often keep the original's ids, which no sample can reach.
        self.eos_ids = tuple(one for one in eos_ids(model) if 0 <= one < self.vocab_size)
        self.unembed_name = next((t.name for t in self.targets if t.group == "unembed"), "")
        self._rotary = fuse(model, dtype)
        self._steps: StepList | None = None
        if sharding is not None:
            sharding.shard_layers(self._decoder, device)
        # Before the head is quantised: its check is for full precision.
        self._check(probe, expected, hidden)
        self._admit_images(whole_probe(name, folder, device))
        if quantized:
            tables = load_leaf("engine.extensions.quantized", f"base_dtype={base_dtype}")
            self.head = replace(self.head, weight=tables.quantize_tables(model))
        if device.type == "cpu":
            leave_file(model, whole_parameters(model).values())
        self.replay: Any = self._made_replayable(text) if replay_router else None
        """``extensions.router_replay.RouterReplay``: experts that the sampler has chosen, for
        training to choose the same."""
        release_cached_memory(device)  # loading needs a second copy of the weights

    @torch.no_grad()
    def _check(self, probe: Probe, expected: Tensor, hidden: Tensor | None) -> None:
        """Compares the engine's layers and head with transformers' own, once. Given ``hidden``
        states of transformers, compares only the head, because quantised layers differ."""
        kind = type(self._model).__name__
        own = self._logprobs(probe, self.hidden_of_row(probe.tokens))
        shorter = self._logprobs(probe, self.hidden_of_row(probe.tokens[:-1]))
        if wrong := self._difference(own[:-1], shorter):
            raise ConfigurationError(
                f"{kind}: log-probabilities depend on later tokens, {wrong}: its attention goes in "
                "both directions, so it would learn to copy the answer. Choose a causal model"
            )
        found = own if hidden is None else self._logprobs(probe, hidden[0].to(self.device))
        # An architecture that changes logits in a way that ``Head`` does not know would train
        # wrongly, without an error.
        if wrong := self._difference(found, expected.to(self.device)):
            raise ConfigurationError(
                f"{kind}: {_DIFFERS} {wrong}; it computes something that the engine does not know, "
                "so it would train wrongly"
            )

    def _logprobs(self, probe: Probe, hidden: Tensor) -> Tensor:
        targets = probe.targets(self.device)[: len(hidden)]
        return self.head.logprobs(hidden[: len(targets)], targets, None)

    def _difference(self, found: Tensor, expected: Tensor) -> str:
        return difference(found, expected, exact=self.dtype == torch.float32)

    def _tower(self, *, sees_both_ways: bool = False) -> VisionTower:
        parts = self._model.base_model, self._active, self.targets, self.device
        return VisionTower(*parts, sees_both_ways=sees_both_ways)

    @torch.no_grad()
    def _admit_images(self, probe: Probe | str | None) -> None:
        """Takes images by transformers' processor if the layers then compute what transformers
        does. Text works without."""
        why = probe if isinstance(probe, str) else ""
        if isinstance(probe, Probe):
            self.vision = self._tower()
            try:
                # The layers are those of transformers still, and their hooks do nothing by now.
                own = self._model.base_model(**probe.inputs, use_cache=False).last_hidden_state[0]
                both = own, self.hidden_of_row(probe.tokens)
                wrong = self._difference(*(self._logprobs(probe, one) for one in both))
                why = wrong and f"{_DIFFERS} {wrong}"
            except Exception as error:  # models may raise anything for unusual inputs
                why = f"the model fails for the output of transformers' processor: {error}"
        if why:
            self.vision = None
            self.image_refusal = (
                f"{self.name} (model_type {self.config.model_type!r}) takes no images: {why}. Text "
                "alone works"
            )

    def check_images(self, tokens: np.ndarray) -> None:
        """Raises ``ConfigurationError`` if ``tokens`` [T] have images and the model takes none."""
        if self.image_refusal and is_image(tokens).any():
            raise ConfigurationError(self.image_refusal)

    @torch.no_grad()
    def _made_replayable(self, text: np.ndarray) -> Any:
        tokens = torch.from_numpy(text).to(self.device)[None]
        make = load_leaf("engine.extensions.router_replay", "replay_router=true").RouterReplay
        replay = make(self._model, self._active, lambda: self.hidden(tokens))
        if self.kv_shapes is None:
            raise ConfigurationError(
                f"replay_router=true, but {self.name} is sampled without the paged cache, which "
                "stores the experts' choices; leave it out"
            )
        return replay

    @contextmanager
    def adapted(self, terms: Terms, choices: Tensor | None = None) -> Iterator[None]:
        """Applies an adapter to the forward passes inside the block and to their recomputation;
        ``choices`` are those of ``RouterReplay.find``."""
        # The rotary kernel too: recomputed layers must save the same tensors as the first time.
        active = self._active.use(terms=terms, segments=None, replayed=choices)
        with active, self._rotary.active():
            yield

    def with_segments(self, terms: Terms) -> AbstractContextManager[None]:
        """Applies an adapter without gradients, as the sampler does."""
        return self._active.use(terms={}, segments=Segments.of_one(terms))

    def hidden(
        self,
        tokens: Tensor,
        *,
        images: bool = True,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns the last hidden states [B, L, H] of right-padded ``tokens`` [B, L]; ``kwargs``
        (cache, mask) go to the transformers model, and so do ``position_ids`` unless they count the
        tokens. Without ``images`` all tokens are text."""
        # No mask: attention is causal, so padding at the end cannot affect earlier tokens.
        kwargs.setdefault("use_cache", False)
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        with self.with_processes(), self._rotary.active():
            inputs = {"input_ids": tokens}
            if images and self.vision is not None:
                inputs = self.vision.inputs(tokens)
            return self._decoder(**inputs, **kwargs).last_hidden_state

    def hidden_of_row(self, tokens: np.ndarray) -> Tensor:
        """Returns the last hidden states [T, H] of one sequence [T], which may have images."""
        row = MicroBatch((Row((0,), len(tokens)),))
        batch = pad(row, [tokens], self.device, vision=self.vision)
        with self.attending(batch.layout):
            hidden = self.hidden(batch.tokens, position_ids=batch.positions)
        return hidden[0, : len(tokens)]

    def positions(self, tokens: np.ndarray) -> np.ndarray | None:
        """Returns rotary positions [3, T] of a sequence with images; ``None`` if they count its
        tokens."""
        return None if self.vision is None else self.vision.positions(tokens)

    def last_seen(self, tokens: np.ndarray) -> np.ndarray | None:
        """Returns the index [T] of the last token that each token of a sequence sees; ``None`` if
        that is the token itself."""
        return None if self.vision is None else self.vision.last_seen(tokens)

    def hidden_with_backward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        """Returns ``hidden`` after a backward pass to the embeddings, whose result is dropped."""
        embedded: list[Tensor] = []
        hook = self._model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: embedded.append(output.requires_grad_())
        )
        with torch.enable_grad():
            try:
                hidden = self.hidden(tokens, **kwargs)
            finally:
                hook.remove()
            torch.autograd.grad(hidden.sum(), embedded)
        return hidden.detach()

    def hidden_of_batch(
        self, tokens: Tensor, positions: Tensor, layout: BatchLayout, segments: Segments
    ) -> Tensor:
        """Returns the last hidden states [T, H] of the tokens [T] of many sequences.

        ``positions`` are [T] or, with images, [3, T]. Choices of experts are written to the
        sequences' cache, if it stores them.
        """
        if self._steps is not None:
            return self._steps.hidden(tokens, positions, layout.runs, segments)
        cache = layout.runs[0].table.cache if layout.runs else None
        images = not all(run.decodes for run in layout.runs)  # sampled tokens are text
        chosen: list[Tensor] = []
        active = self._active.use(terms={}, segments=segments, recorded=chosen)
        with attention_hook.use_layout(self._decoder.config, layout), active:
            at = positions[..., None, :]
            hidden = self.hidden(tokens[None], images=images, position_ids=at)[0]
        if cache is not None and cache.choices:
            cache.write_choices(layout.runs, torch.cat(chosen, 1))
        return hidden

    def attending(self, layout: Layout | None) -> AbstractContextManager[None]:
        """Activates ``layout`` inside the block; recomputed layers need it again."""
        if layout is None:
            return nullcontext()
        return attention_hook.use_layout(self._decoder.config, layout)

    @contextmanager
    def checkpointed(self, share: float) -> Iterator[None]:
        """Recomputes a share of the layers in the backward pass (activation checkpointing), a third
        more work for them. The adapter must be active again during the backward pass."""
        if not share:
            yield
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        # transformers supports checkpointing only in training mode, which would activate dropout.
        # In evaluation mode nothing uses random numbers, so their state need not be saved.
        tower = self.vision is not None and self.vision.trains(self._active.terms)
        modules = (self._model if tower else self._decoder).modules()
        layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise TrainingError(
                f"{self.name}: this architecture does not support activation checkpointing, which "
                "a sequence of this length needs; set max_length lower"
            )
        # Checkpoint the first layers: when they are recomputed, the others' activations are free.
        layers = layers[: math.ceil(share * len(layers))]
        for layer in layers:
            # Not reentrant: a reentrant checkpoint works with ``backward()`` only, and the passes
            # call ``torch.autograd.grad``.
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward  # restores the method of the class

    def require_covered(self, spec: AdapterSpec) -> None:
        """Raises ``ConfigurationError`` if an adapter cannot cover some of the requested layers."""
        # Experts that are stacked in a way that ``AdapterExperts`` does not support.
        stacked = [
            name
            for name, parameter in whole_parameters(self._model).items()
            if parameter.dim() == 3 and _group_of(name) == "mlp"
        ]
        if not (spec.train_mlp and stacked):
            return
        kinds = sorted({_LAYER.sub(".*.", name) for name in stacked})
        raise ConfigurationError(
            f"train_mlp=true, but {self.name} has routed experts in {len(stacked)} stacked "
            f"parameters ({', '.join(kinds)}), which adapters do not support; set "
            "train_mlp=false to train attention and unembedding alone"
        )

    def filling(self, tokens: int) -> int:
        """Returns the number of padding tokens with which a token's result does not depend on the
        number of ``tokens`` in a batch."""
        # torch's products of a few rows (routers of experts) use other kernels on a CPU.
        return -tokens % 8 if self._steps is None else 0

    @cached_property
    def kv_shapes(self) -> list[LayerShape] | None:
        """Cache shape of each layer; ``None`` if sequences cannot be batched."""
        shapes, self._steps = check_batch_attention(self, self._decoder)
        return shapes

    @cached_property
    def packs_rows(self) -> bool:
        """Whether sequences follow one another in one row, without padding (on CUDA)."""
        return check_packed_attention(self)

    @cached_property
    def groups_experts(self) -> bool:
        """Whether one call computes the adapters of several runs on routed experts."""
        layers = [one for one in self._model.modules() if isinstance(one, AdapterExperts)]
        return all(layer.one_call for layer in layers)

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether sequences may share a row (see ``prefix_tree``)."""
        return self.shared_layout is not None

    @cached_property
    def shared_layout(self) -> type[PackedLayout | TreeLayout] | None:
        """Attention layout of rows with shared prefixes; ``None`` if the model supports none."""
        return check_tree_attention(self)

    @cached_property
    def activation_bytes_per_token(self) -> int:
        """Bytes of activations per trained token, from the model's shapes."""
        config = getattr(self.config, "text_config", self.config)
        hidden = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        # A token saves the inner activations of each of its experts.
        chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
        inner = max(inner, chosen * int(getattr(config, "moe_intermediate_size", None) or inner))
        layers = int(config.num_hidden_layers)
        return activation_bytes_per_token(layers, hidden, inner, self.dtype.itemsize)


def _load(
    name: str, folder: Path, at: torch.device, device: torch.device, dtype: torch.dtype
) -> Any:
    """Loads a model to the device ``at``, for use on ``device``."""
    from transformers.masking_utils import sdpa_mask

    check_architecture(name, folder)
    if device.type == "cuda" and dtype == torch.float32:
        # By default cuDNN rounds the inputs of convolutions to TF32 (10 bits). The convolutions of
        # vision towers and of Qwen3-Next then have errors of 1e-4.
        torch.backends.cudnn.allow_tf32 = False
    # On CUDA, load directly to the device: the host never holds the whole model.
    where = {"device_map": {"": at}} if at.type == "cuda" else {}
    model: Any = model_class(folder).from_pretrained(
        folder, dtype=dtype, local_files_only=True, **where, **dequantized(name, folder)
    )
    chosen = getattr(model.config, "_attn_implementation", None)  # eager where it must be (Gemma 2)
    kernel = training_attention(device, dtype)
    # An architecture that requires another attention keeps it.
    if chosen == "sdpa" and kernel is not None:
        attention_hook.register(_TRAINING_ATTENTION, kernel, sdpa_mask)
        # Not in a vision tower, whose attention is not causal.
        parts = {"text_config": _TRAINING_ATTENTION} if has_vision(model.config) else None
        model.set_attn_implementation(parts or _TRAINING_ATTENTION)
    # Frozen, and in evaluation mode: dropout would make training differ from sampling.
    return model.requires_grad_(False).eval().to(at)


def _hook(model: Any, decoder: Any, active: ActiveTerms, placement: Placement) -> list[Target]:
    """Replaces every linear layer of decoder, vision tower and connector by one that supports
    adapters; the head, which ``Head`` applies in chunks, is only listed."""
    head = model.get_output_embeddings()
    of_decoder = {id(module) for module in decoder.modules()}
    # A tower is small compared with its decoder, so it stays whole and in full precision.
    of_tower = Placement(placement.device)
    targets = []
    # Iterate by name, so that each plain matrix is freed as soon as it is packed.
    for name in [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        module = model.get_submodule(name)
        group = "unembed" if module is head else _group_of(name)
        if module is not head and id(module) not in of_decoder:
            group = "vision"
        if group is None:
            continue
        targets.append(Target(name, group, module.in_features, module.out_features))
        if module is not head:
            where = of_tower if group == "vision" else placement
            model.set_submodule(name, AdapterLinear(module, name, active, where))
    for name in stacked_experts(model):
        group = _group_of(f"{name}.")
        if group is None:
            continue
        experts = AdapterExperts(model.get_submodule(name), name, active, group, placement)
        model.set_submodule(name, experts)
        targets += experts.targets
    if not targets:
        raise ConfigurationError(
            f"{type(model).__name__}: no linear layer was found that an adapter could cover"
        )
    return targets


def _group_of(name: str) -> str | None:
    """Returns ``attn`` or ``mlp`` for a module of the language model; ``None`` for others."""
    if not _LAYER.search(name) or "vis" in name:
        return None
    return "attn" if _ATTN.search(name) else "mlp" if _MLP.search(name) else None
