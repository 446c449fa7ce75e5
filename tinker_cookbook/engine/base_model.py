"""The frozen base model: loaded once, shared by every run and sampler on the device."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tinker_cookbook.engine.adapters import ActivePairs, AdapterLinear, Pairs, Target
from tinker_cookbook.engine.head import Head
from tinker_cookbook.exceptions import ConfigurationError, TrainingError

logger = logging.getLogger(__name__)

_ATTN = re.compile(r"\.(self_attn|attn|attention|linear_attn)\.")
_MLP = re.compile(r"\.(mlp|feed_forward|block_sparse_moe)\.")
_LAYER = re.compile(r"\.\d+\.")


class BaseModel:
    """A transformers causal language model with hooks for adapters and a chunked head.

    Attributes: ``name`` as the user gave it, ``folder``, ``device``, ``dtype``, ``targets`` (the
    layers that can carry an adapter), ``head``, ``vocab_size``, ``context_length``, ``eos_ids``.
    """

    def __init__(self, name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self.folder, self.device, self.dtype = name, folder, device, dtype
        self._model = _load(folder, device, dtype)
        self.config: Any = self._model.config
        self._active = ActivePairs()
        self.head = Head.of(self._model, self.config)
        self.vocab_size = self.head.weight.shape[0]
        self.context_length = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 30)
        self.eos_ids = _eos_ids(self._model)
        _check_head(self._model, self.head)
        self.targets = _hook(self._model, self._active)
        self._decoder: nn.Module = self._model.base_model

    @contextmanager
    def adapted(self, pairs: Pairs) -> Iterator[None]:
        """Applies an adapter to the forwards inside the block."""
        with self._active.use(pairs):
            yield

    def hidden(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Last hidden states [B, L, H] of right-padded ``tokens`` [B, L].

        Without a mask every row is causal, and what stands to the right of a row's end cannot
        reach it, so right padding needs none. ``kwargs`` go to the transformers model (cache,
        positions, mask).
        """
        kwargs.setdefault("use_cache", False)
        return self._decoder(input_ids=tokens, **kwargs).last_hidden_state

    def unembed_pair(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The adapter of the unembedding layer, if it has one."""
        return next(
            (pairs[t.name] for t in self.targets if t.group == "unembed" and t.name in pairs), None
        )

    @contextmanager
    def checkpointed(self, on: bool) -> Iterator[None]:
        """Recomputes each layer in the backward pass: a third more work, a fraction of the memory.

        transformers checkpoints layers that are in training mode. Only the layers' own flag is
        set; their children stay in evaluation mode, so no dropout wakes up.
        """
        if not on:
            yield
            return
        layers = [m for m in self._decoder.modules() if hasattr(m, "gradient_checkpointing")]
        layers = [m for m in layers if type(m).__name__.endswith("Layer")]
        if not layers:
            raise TrainingError(
                f"{self.name}: this architecture does not support activation checkpointing, which "
                "a sequence of this length needs; set max_length lower"
            )
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False
            self._model.gradient_checkpointing_disable()

    def activation_bytes_per_token(self) -> int:
        """Memory that one trained token's activations take, from the model's shapes.

        A layer keeps about ten tensors of the hidden width (norms, projections, attention) and
        five of the MLP's inner width for the backward pass.
        """
        config = getattr(self.config, "text_config", self.config)
        hidden = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        layers = int(config.num_hidden_layers)
        return layers * (10 * hidden + 5 * inner) * self.dtype.itemsize


def _load(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.requires_grad_(False).eval().to(device)


def _eos_ids(model: Any) -> tuple[int, ...]:
    """End-of-sequence ids: those of generation_config.json first, as ``generate`` does."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return ()


def _hook(model: Any, active: ActivePairs) -> list[Target]:
    """Replaces every linear layer of the decoder, and the head, by one that takes an adapter."""
    head = model.get_output_embeddings()
    targets = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if module is head:
            group = "unembed"
        elif not _LAYER.search(name) or "vis" in name:
            continue
        elif _ATTN.search(name):
            group = "attn"
        elif _MLP.search(name):
            group = "mlp"
        else:
            continue
        targets.append(Target(name, group, module.in_features, module.out_features))
        if group != "unembed":  # the head is applied by `Head`, in chunks
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], AdapterLinear(module, name, active))
    if not targets:
        raise ConfigurationError(
            f"{type(model).__name__}: no linear layer was found that an adapter could cover"
        )
    return targets


@torch.no_grad()
def _check_head(model: Any, head: Head) -> None:
    """Compares the chunked head with the model's own logits once, at load.

    Architectures scale, cap or shift logits in their own ways; one that ``Head`` does not know
    would train silently wrong.
    """
    device = head.weight.device
    tokens = torch.arange(1, 9, device=device)[None] % head.weight.shape[0]
    targets = tokens[0].roll(-1)
    expected = model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
    expected = expected.gather(1, targets[:, None])[:, 0]
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    difference = (head.logprobs(hidden, targets, None) - expected).abs().max().item()
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 0.2
    if not difference <= tolerance:
        raise ConfigurationError(
            f"{type(model).__name__}: log-probabilities of the engine differ from the model's own "
            f"by {difference:.2g} (expected <= {tolerance:g}); its output layer has a "
            "transformation that the engine does not know, so it would train wrongly"
        )
