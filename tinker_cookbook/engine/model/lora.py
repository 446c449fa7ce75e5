"""LoRA adapters, applied unmerged: ``y = W x + (alpha / r) * B (A x)``.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).
The base weights never change, so any number of adapters share one base model, sampling computes
what training computes, and a snapshot for a sampler is a reference. Names and files follow
peft, so ``PeftModel.from_pretrained`` loads saved adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tinker_cookbook.engine.kernels import FrozenWeight
from tinker_cookbook.engine.model.low_rank import LowRank, Segments, Terms
from tinker_cookbook.engine.model.placement import Frozen, Placement
from tinker_cookbook.engine.model.resolve import check_rank
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError

ALPHA = 32
_AFTER_LAYER = re.compile(r"^.*?\.\d+\.")
_OF_PART = re.compile(r"(model\.\w+)\.layers\.\d+\.")
_OF_TEXT_MODEL = re.compile(r"^(base_model\.model\.)?model(?=\.layers\.\d+\.)")

T = TypeVar("T")
TermGradients = dict[str, tuple[Tensor, Tensor]]
"""Target name -> gradients of A [r, in] and of B [out, r]."""


@dataclass(frozen=True)
class Target:
    """One linear layer that can carry an adapter; ``group`` is attn, mlp, unembed or vision.

    In a stacked parameter, each of the ``experts`` has an adapter of the full rank, and
    ``saved_as`` is the module name that peft uses for the tensors.
    """

    name: str
    group: str
    in_features: int
    out_features: int
    experts: int = 0
    saved_as: str = ""

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of ``A`` and ``B``."""
        stacked = rank * max(1, self.experts)
        return (stacked, self.in_features), (self.out_features, stacked)

    def peft_name(self, side: str) -> str:
        """Returns the name of tensor ``A`` or ``B`` in peft's files."""
        return f"base_model.model.{self.saved_as or self.name}.lora_{side}.weight"


@dataclass(frozen=True)
class AdapterSpec:
    """Shape of an adapter: rank, and which of the groups of linear layers it covers.

    ``train_vision`` is the vision tower with the connector to the language model.
    """

    rank: int = 32
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    train_vision: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"rank: got {self.rank}, expected a whole number >= 1")
        if not (self.train_attn or self.train_mlp or self.train_unembed or self.train_vision):
            raise ConfigurationError(
                "train_attn, train_mlp, train_unembed: all are false, so nothing would be "
                "trained; set at least one of them to true"
            )

    @property
    def scaling(self) -> float:
        """alpha / r; alpha is 32 at every rank, so the learning rate does not depend on rank."""
        return ALPHA / self.rank

    def covered(self, targets: list[Target]) -> list[Target]:
        """Returns the targets that an adapter covers; raises for a flag that matches no layer."""
        groups = [g for g in ("attn", "mlp", "unembed", "vision") if getattr(self, f"train_{g}")]
        for group in groups:
            if not any(target.group == group for target in targets):
                raise ConfigurationError(
                    f"train_{group}=true, but this model has no {group} layer of type nn.Linear "
                    "or stacked experts that an adapter could cover; set "
                    f"train_{group}=false"
                )
        return [target for target in targets if target.group in groups]


@dataclass
class ActiveTerms:
    """The adapter of the next forward pass, shared by all hooked layers of a model: ``terms``,
    or ``segments`` while a batch with several adapters is sampled.

    ``recorded`` receives each layer's choice of experts [T, k], if it is a list; ``replayed``
    [T, layers, k] are choices for the layers to follow.
    """

    terms: Terms = field(default_factory=dict)
    segments: Segments | None = None
    recorded: list[Tensor] | None = None
    replayed: Tensor | None = None

    @contextmanager
    def use(self, **fields: Any) -> Iterator[None]:
        """Sets some fields inside the block."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)


class AdapterLinear(nn.Module):
    """A frozen linear layer that adds the active adapter's low-rank term."""

    def __init__(
        self, base: nn.Linear, name: str, active: ActiveTerms, placement: Placement
    ) -> None:
        super().__init__()
        self.frozen: Frozen
        if placement.sharding is not None:
            # A submodule, whose parameters FSDP finds.
            self.sharded = placement.sharding.matrix(base.weight, placement.device)
            self.frozen = self.sharded.frozen
        else:
            self.frozen = FrozenWeight(base.weight.to(placement.device), placement.layout)
        self.bias = base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.name = name
        self._active = active

    @property
    def weight(self) -> Tensor:
        """The frozen matrix [out, in]. Some architectures read its dtype."""
        return self.frozen.forward.dense()

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out] for ``x`` [..., in]."""
        rows = x.reshape(-1, self.in_features)
        # Sampling applies several adapters in one call and needs no autograd graph.
        segments = self._active.segments
        if segments is not None:
            layout = self.frozen.forward
            out = segments.apply(self.name, rows, lambda x, p: layout.adapted(x, self.bias, p))
        else:
            term = self._active.terms.get(self.name)
            a, b = (None, None) if term is None else (term.a, term.b)
            out = _AdaptedProduct.apply(rows, self.frozen, self.bias, term, a, b)
        return out.view(*x.shape[:-1], self.out_features)


class _AdaptedProduct(torch.autograd.Function):
    """``x W^T + bias + (x A^T) B^T`` with gradients for ``x``, ``A`` and ``B``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Frozen,
        bias: Tensor | None,
        term: LowRank | None,
        a: Tensor | None,
        b: Tensor | None,
    ) -> Tensor:
        # ``a`` and ``b`` are the tensors of ``term``; autograd tracks only tensor arguments.
        ctx.weight, ctx.term = weight, term
        if term is None:
            return weight.forward.product(x, bias)
        out, low = weight.forward.trained(x, bias, term)
        ctx.save_for_backward(x, low)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, term = upstream[0].contiguous(), ctx.term
        if term is None:
            # No adapter on this layer: the gradient only passes through.
            d_x = ctx.weight.backward.product(gradient) if ctx.needs_input_grad[0] else None
            return d_x, None, None, None, None, None
        x, low = ctx.saved_tensors  # read only once, as activation checkpointing requires
        if ctx.needs_input_grad[0]:
            # ``d_x = g W + (g B) A`` in one call; ``g B`` is also what the gradient of ``A`` needs.
            d_x, d_low = ctx.weight.backward.trained(gradient, None, term.back)
        else:  # the first layer: nothing before it is trained
            d_x, d_low = None, term.back.low(gradient)
        return d_x, None, None, None, *term.gradients(x, low, gradient, d_low)


@dataclass(eq=False)
class Adapter:
    """The fp32 tensors of one adapter: ``A`` [r, in] and ``B`` [out, r] for each target; or
    [E * r, in] and [out, r * E] for E stacked experts."""

    spec: AdapterSpec
    targets: list[Target]
    tensors: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def create(
        cls, spec: AdapterSpec, targets: list[Target], seed: int, device: torch.device
    ) -> Adapter:
        """Creates an adapter that changes nothing yet: ``A`` uniform as in ``nn.Linear``, ``B``
        zero."""
        covered = spec.covered(targets)
        # Check before allocating: a rank of several thousand would take minutes and all memory.
        check_rank(spec.rank, max(min(t.in_features, t.out_features) for t in covered))
        # Use the CPU's generator: a seed gives the same adapter on every device.
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for target in covered:
            bound = 1 / math.sqrt(target.in_features)  # kaiming_uniform with a = sqrt(5)
            shape_a, shape_b = target.shapes(spec.rank)
            a = torch.empty(shape_a).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(shape_b)
            tensors[target.name] = (a.to(device), b.to(device))
        return cls(spec, targets, tensors)

    @classmethod
    def load(
        cls,
        spec: AdapterSpec,
        targets: list[Target],
        saved: Mapping[str, Tensor],
        device: torch.device,
        source: str,
    ) -> Adapter:
        """Builds the adapter from saved tensors; raises if they do not fit the model."""
        tensors, expected = {}, set()
        for target in spec.covered(targets):
            loaded = []
            for side, shape in zip("AB", target.shapes(spec.rank), strict=True):
                key = target.peft_name(side)
                expected.add(key)
                if key not in saved:
                    raise CheckpointError(
                        f"{source}: tensor {key!r} is missing; the checkpoint is for another model "
                        "or other LoRA flags: load it with the base model it was trained on"
                    )
                if tuple(saved[key].shape) != shape:
                    raise CheckpointError(
                        f"{source}: tensor {key!r} has shape {tuple(saved[key].shape)}, expected "
                        f"{shape}; the checkpoint is for another model"
                    )
                # Copy: training changes the tensor in place, and the source may be shared.
                loaded.append(saved[key].to(device=device, dtype=torch.float32, copy=True))
            tensors[target.name] = (loaded[0], loaded[1])
        # Ignoring tensors would load an adapter that differs from the trained one.
        if surplus := sorted(set(saved) - expected):
            raise CheckpointError(
                f"{source}: {len(surplus)} tensors match no layer of the model, the first is "
                f"{surplus[0]!r}; the checkpoint is for another model"
            )
        return cls(spec, targets, tensors)

    def parameters(self) -> dict[str, Tensor]:
        """Returns all tensors by their peft name, in a fixed order."""
        return self._by_peft_name(self.tensors)

    def requires_grad_(self, on: bool = True) -> Adapter:
        """Marks all tensors as leaves that need a gradient."""
        for tensor in self.parameters().values():
            tensor.requires_grad_(on)
        return self

    def terms(self, dtype: torch.dtype, *, requires_grad: bool = False) -> Terms:
        """Returns the terms that the layers apply, cast to the compute dtype once per batch."""
        # They are leaves of autograd; ``parameter_gradients`` converts their gradients.
        pairs = self.tensors.values()
        all_a = cast([a.detach() for a, _ in pairs], dtype)
        all_b = torch._foreach_mul([b.detach() for _, b in pairs], self.spec.scaling)  # pyright: ignore[reportPrivateImportUsage]
        all_b = cast(all_b, dtype)
        for side in (*all_a, *all_b):
            side.requires_grad_(requires_grad)
        return dict(zip(self.tensors, map(LowRank, all_a, all_b), strict=True))

    def parameter_gradients(self, of_terms: TermGradients) -> dict[str, Tensor]:
        """Converts gradients of ``terms`` (fp32, overwritten) to gradients by peft name."""
        # ``terms`` holds B times the scaling, so the chain rule multiplies its gradient with it.
        all_b = [b for _, b in of_terms.values()]
        if all_b:
            torch._foreach_mul_(all_b, self.spec.scaling)  # pyright: ignore[reportPrivateImportUsage]
        return self._by_peft_name(of_terms)

    def peft_config(self, base_model: str) -> dict[str, Any]:
        """Returns the content of ``adapter_config.json`` for peft."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.spec.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
            **self._peft_targets(),
        }

    def _peft_targets(self) -> dict[str, Any]:
        """Returns the suffixes of the layers' names, as peft's config lists them."""
        covered = [target for target in self.targets if target.name in self.tensors]
        # Names in a vision tower may be numbers, which are no suffix of one layer alone.
        names: dict[str, Any] = self._suffixes([t for t in covered if t.group != "vision"])
        names["target_modules"] += sorted(t.name for t in covered if t.group == "vision")
        # A vision tower may have layers of the same names, for which peft would make new adapters.
        others = [t for t in self.targets if t.group == "vision" and t.name not in self.tensors]
        given = names["target_modules"]
        if any(target.name.rpartition(".")[2] in given for target in others):
            parts = sorted({re.escape(".".join(t.name.split(".")[:2])) for t in others})
            names["exclude_modules"] = rf"({'|'.join(parts)})\..*"
        return names

    @staticmethod
    def _suffixes(covered: Sequence[Target]) -> dict[str, list[str]]:
        if not any(target.experts for target in covered):
            return {"target_modules": sorted({t.name.rpartition(".")[2] for t in covered})}
        # In a model with experts, peft treats an MLP's module names as experts. Naming the
        # matrices as parameters avoids that and gives the same tensors.
        modules, parameters = set(), set()
        for target in covered:
            if target.group == "mlp":
                name = target.name if target.experts else f"{target.name}.weight"
                parameters.add(_AFTER_LAYER.sub("", name))
            else:
                modules.add(target.name.rpartition(".")[2])
        return {"target_modules": sorted(modules), "target_parameters": sorted(parameters)}

    @cached_property
    def _peft_names(self) -> dict[str, tuple[str, str]]:
        return {one.name: (one.peft_name("A"), one.peft_name("B")) for one in self.targets}

    def _by_peft_name(self, pairs: TermGradients) -> dict[str, Tensor]:
        return {
            side: tensor
            for name, pair in pairs.items()
            for side, tensor in zip(self._peft_names[name], pair, strict=True)
        }


def in_multimodal_model(saved: Mapping[str, T], layers: Iterable[str]) -> dict[str, T]:
    """Returns values by the names of a multimodal model, if they are by those of its language model
    alone (``model.layers.0…`` for ``model.language_model.layers.0…``): Tinker names adapters so,
    and so did runs on a model that was loaded without its vision tower.

    ``layers`` are the names of the language model's linear layers.
    """
    parts = {found[1] for name in layers if (found := _OF_PART.match(name))}
    if len(parts) != 1:
        return dict(saved)
    (part,) = parts
    return {_OF_TEXT_MODEL.sub(rf"\g<1>{part}", key): value for key, value in saved.items()}


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Returns the tensors in ``dtype`` and contiguous, without a copy if all already are. On a GPU,
    a few kernels cast all of them."""
    if all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors):
        return tensors
    out = [torch.empty(tensor.shape, dtype=dtype, device=tensor.device) for tensor in tensors]
    torch._foreach_copy_(out, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return out
