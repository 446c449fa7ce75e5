"""The layers of a step in one C call (``step.c``): a list of operations, made once for a model.

With one sequence, four fifths of a step of SmolLM2-135M in Python were not products: 3,000 torch
operators, and threads that are woken for each product. The list computes what the modules compute,
with the same kernels, so all results are the same to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.kernels.cpu.attention import AttentionStruct, PagedAttention
from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.kernels.cpu.elementwise import (
    Gate,
    GateStruct,
    Norm,
    NormStruct,
    RotationStruct,
)
from tinker_cookbook.engine.kernels.cpu.linear import (
    ONE_THREAD,
    FrozenWeight,
    ProductStruct,
    _Pairs,
    _Panels,
    packed_term,
)
from tinker_cookbook.engine.model.low_rank import LowRank, Segments, Terms

if TYPE_CHECKING:
    from tinker_cookbook.engine.model.attention_hook import AttentionCall
    from tinker_cookbook.engine.sampling.paged_cache import Run

_STRUCTS = (NormStruct, ProductStruct, RotationStruct, AttentionStruct, GateStruct)
"""By the kind of an operation in step.c."""

_NORMS = {"input_layernorm", "post_attention_layernorm"}
_MORE_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_LENGTHENS = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sequence."""

_ROWS = 64
_ANGLES = 512


class _Unknown(Exception):  # noqa: N818
    """Raised for a layer that the list cannot compute."""


def _need(condition: bool) -> None:
    if not condition:
        raise _Unknown


class _Operation(ctypes.Structure):
    """Mirrors ``struct Operation`` of step.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "count")),
        ("calls", ctypes.c_void_p),
    )


class _Calls:
    """Calls of kernels in order, for up to ``rows`` tokens.

    ``each`` has the rows (or numbers) of a call for one token.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self._operations: list[tuple[int, int, int]] = []
        self._calls: dict[Any, list[Any]] = {kind: [] for kind in _STRUCTS}
        self._each: dict[Any, list[int]] = {kind: [] for kind in _STRUCTS}
        self.layers: list[Any] = []
        """The linear layer of each product."""
        self.slots: list[int] = []
        """The index of each product among those of the same input."""
        self.shared: dict[tuple[int, ...], list[Tensor]] = {}
        """Memory for the results of layers, by its widths."""
        self._kept: list[Tensor] = []

    def buffer(self, width: int) -> Tensor:
        """Returns memory [rows, width] that lives as long as the calls."""
        self._kept.append(torch.zeros(self.rows, width, dtype=self.dtype))
        return self._kept[-1]

    def norms(
        self,
        *pairs: tuple[Any, Tensor],
        added: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Adds norms in one operation, in place or to ``out``; ``added`` is added to the input
        first."""
        calls, each = [], []
        for module, x in pairs:
            norm = getattr(module, "function", None)
            if not isinstance(norm, Norm):
                raise _Unknown
            width = len(norm.weight)
            call = NormStruct(width=width, eps=norm.eps, rounds=norm.rounds, half=self._half)
            call.x, call.weight = x.data_ptr(), norm.weight.data_ptr()
            call.added = None if added is None else added.data_ptr()
            call.out = (x if out is None else out).data_ptr()
            calls.append(call)
            each.append(x.shape[1] // width)
        self._add(calls, each)

    def products(self, x: Tensor, outputs: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds products of ``x`` with the matrices of linear layers."""
        calls = []
        for slot, (layer, out) in enumerate(outputs):
            frozen = getattr(layer, "frozen", None)
            matrix = frozen.forward if isinstance(frozen, FrozenWeight) else None
            kind = _Pairs if self._half else _Panels
            _need(isinstance(matrix, kind) and matrix.dtype == self.dtype)
            assert isinstance(matrix, _Panels)
            _need(matrix.inputs == x.shape[1] and matrix.outputs == out.shape[1])
            call = ProductStruct(inputs=matrix.inputs, x_stride=x.stride(0), kind=matrix.kind)
            call.outputs, call.half, call.codes = matrix.outputs, self._half, matrix.codes
            call.x, call.out = x.data_ptr(), out.data_ptr()
            call.panels = matrix.panels.data_ptr()
            if layer.bias is not None:
                self._kept.append(layer.bias.float().contiguous())
                call.bias = self._kept[-1].data_ptr()
            calls.append(call)
            self.layers.append(layer)
            self.slots.append(slot)
        self._add(calls, [1] * len(calls))

    def rotations(self, xs: Sequence[Tensor], angles: tuple[Tensor, Tensor]) -> None:
        """Adds rotary embeddings, in place."""
        calls, width = [], angles[0].shape[1]
        for x in xs:
            call = RotationStruct(heads=x.shape[1] // width, width=width, half=self._half)
            call.stride[:] = (x.shape[1], width)
            call.x = call.out = x.data_ptr()
            call.cosine, call.sine = (side.data_ptr() for side in angles)
            calls.append(call)
        self._add(calls, [1] * len(calls))

    def attention(self, of: AttentionCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Adds the attention of one layer."""
        (_, heads, width), (_, kv_heads, value_width) = of.query.shape, of.value.shape
        call = AttentionStruct(heads=heads, width=width, kv_heads=kv_heads)
        call.value_width, call.window, call.scale = value_width, of.window or 0, of.scale
        call.half, call.out = self._half, out.data_ptr()
        call.query, call.key, call.value = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.query_stride[:] = (heads * width, width)
        call.key_stride[:] = (kv_heads * width, width)
        call.value_stride[:] = (kv_heads * value_width, value_width)
        self._add([call], [1])

    def gate(self, mlp: Any, gate: Tensor, up: Tensor) -> None:
        """Adds the gate of an MLP, to ``gate``."""
        function = next(iter(getattr(mlp.forward, "args", ())), None)
        if not isinstance(function, Gate):
            raise _Unknown
        call = GateStruct(gelu=function.gelu, half=self._half)
        call.gate, call.up, call.out = gate.data_ptr(), up.data_ptr(), gate.data_ptr()
        self._add([call], [gate.shape[1]])

    @property
    def _half(self) -> bool:
        return self.dtype == torch.bfloat16

    def _add(self, calls: Sequence[Any], each: Sequence[int]) -> None:
        kind = type(calls[0])
        self._operations.append((_STRUCTS.index(kind), len(calls), len(self._calls[kind])))
        self._calls[kind] += calls
        self._each[kind] += each

    def finish(self) -> None:
        """Lays the calls out for C; afterwards none can be added."""
        arrays = {kind: (kind * len(calls))(*calls) for kind, calls in self._calls.items()}
        self.operations = (_Operation * len(self._operations))(
            *(
                (kind, count, ctypes.addressof(arrays[_STRUCTS[kind]][first]))
                for kind, count, first in self._operations
            )
        )
        # Views of the same memory, to set a field of all calls at once.
        views: dict[type, Any] = {
            kind: np.frombuffer(array, np.dtype(kind)) for kind, array in arrays.items()
        }
        self.norm_calls, self.product_calls = views[NormStruct], views[ProductStruct]
        self.rotation_calls, self.gate_calls = views[RotationStruct], views[GateStruct]
        self.attention_calls = views[AttentionStruct]
        self.norm_rows, self.gate_numbers = (
            np.array(self._each[kind]) for kind in (NormStruct, GateStruct)
        )


class StepList:
    """Computes the hidden states of a step for a decoder whose layers it knows.

    ``attentions`` are the attention inputs of each layer, for their shapes and settings.
    """

    def __init__(
        self, decoder: Any, attentions: Sequence[AttentionCall], dtype: torch.dtype
    ) -> None:
        self._decoder, self._attentions, self._dtype = decoder, attentions, dtype
        self._known: WeakKeyDictionary[LowRank, tuple[np.ndarray, int, list[Any]]]
        self._known = WeakKeyDictionary()
        self._rotary = decoder.rotary_emb
        types = getattr(self._rotary, "rope_type", "default")
        types = types.values() if isinstance(types, Mapping) else [types]
        _need(not any(one in _LENGTHENS for one in types))
        self._kinds: list[str | None] = list(getattr(self._rotary, "layer_types", [None]))
        self._tables = self._made_tables(_ANGLES)
        self._build(_ROWS)
        weights = self._calls.product_calls
        self._average = int((weights["inputs"] * weights["outputs"]).mean())

    @classmethod
    def of(
        cls, decoder: Any, attentions: Sequence[AttentionCall], dtype: torch.dtype
    ) -> StepList | None:
        """Returns the list of a decoder; ``None`` if it has a layer of another kind."""
        try:
            return cls(decoder, attentions, dtype)
        except (_Unknown, AttributeError, TypeError):  # another architecture's attributes
            return None

    def hidden(
        self, tokens: Tensor, positions: Tensor, runs: Sequence[Run], segments: Segments
    ) -> Tensor:
        """Returns the last hidden states [T, H] of ``tokens`` [T] at ``positions`` [T].

        Raises:
            RuntimeError: out of memory.
        """
        count = len(tokens)
        if count > self._calls.rows:
            self._build(max(count, 2 * self._calls.rows))
        self._hidden[:count].copy_(self._decoder.embed_tokens(tokens))
        longest = int(positions.max()) + 1
        if longest > len(self._tables[0][0]):
            self._tables = self._made_tables(max(longest, 2 * len(self._tables[0][0])))
        for table, angles in zip(self._tables, self._angles, strict=True):
            for all_, some in zip(table, angles, strict=True):
                torch.index_select(all_, 0, positions, out=some[:count])
        calls, out = self._calls, torch.empty(count, self._hidden.shape[1], dtype=self._dtype)
        calls.norm_calls["rows"] = count * calls.norm_rows
        calls.norm_calls["out"][-1] = out.data_ptr()
        calls.gate_calls["count"] = count * calls.gate_numbers
        calls.rotation_calls["tokens"] = calls.rotation_calls["angles"] = count
        step, cache = PagedAttention(runs), runs[0].table.cache
        for field in ("runs", "run_first", "run_count", "position", "first_page", "pages"):
            calls.attention_calls[field] = getattr(step.call, field)
        calls.attention_calls["keys"] = [pool.data_ptr() for pool in cache.keys]
        calls.attention_calls["values"] = [pool.data_ptr() for pool in cache.values]
        threads = torch.get_num_threads() if count * self._average > ONE_THREAD else 1
        calls.product_calls["rows"], calls.product_calls["threads"] = count, threads
        kept = self._set_terms(segments, count)
        numbers = (ctypes.c_int64(len(calls.operations)), ctypes.c_int64(threads))
        if library().tinker_step(calls.operations, *numbers):  # type: ignore[union-attr]
            raise RuntimeError("out of memory: the sums of attention did not fit")
        del kept  # C had only its address
        return out

    def _set_terms(self, segments: Segments, count: int) -> Any:
        """Sets the adapter terms of all products; returns the memory that the calls point to."""
        calls = self._calls.product_calls
        found = [
            (self._packed(terms), first, min(end, count))
            for terms, first, end in segments.stretches
            if terms and first < count
        ]
        calls["parts"] = len(found)
        if not found:
            return None
        where = np.array([[first, end] for _, first, end in found])
        terms = np.stack([packed[0] for packed, _, _ in found], 1)  # [products, parts, 3]
        width = max(packed[1] for packed, _, _ in found)
        low = torch.empty(max(self._calls.slots) + 1, count, width, dtype=self._dtype)
        slots = np.array(self._calls.slots)
        calls["low_width"], calls["part"] = width, where.ctypes.data
        calls["low"] = low.data_ptr() + slots * low.stride(0) * low.itemsize
        calls["term"] = terms.ctypes.data + np.arange(len(terms)) * terms.strides[0]
        return where, terms, low

    def _packed(self, terms: Terms) -> tuple[np.ndarray, int, list[Any]]:
        """Returns ``struct LowRank`` of each product [products, 3], and the largest width."""
        key = next(iter(terms.values()))
        if key not in self._known:
            names = [layer.name for layer in self._calls.layers]
            pairs = self._dtype == torch.bfloat16
            found = [packed_term(terms[n], pairs) if n in terms else None for n in names]
            rows = np.array([(0, 0, 0) if one is None else one[:3] for one in found])
            width = max((one.width for one in found if one is not None), default=0)
            self._known[key] = rows, width, found
        return self._known[key]

    @torch.inference_mode(False)  # tensors of inference mode cannot be changed outside of it
    def _made_tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Returns cosines and sines [length, D] of each kind of layer."""
        at, like = torch.arange(length)[None], torch.zeros(1, dtype=self._dtype)
        angles = [self._rotary(like, at, *([] if kind is None else [kind])) for kind in self._kinds]
        return [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in angles]

    @torch.inference_mode(False)
    def _build(self, rows: int) -> None:
        """Makes the calls for up to ``rows`` tokens."""
        decoder, calls = self._decoder, _Calls(rows, self._dtype)
        children = {"embed_tokens", "layers", "norm", "rotary_emb"}
        _need(set(dict(decoder.named_children())) == children)
        self._angles = [
            (calls.buffer(cosine.shape[1]), calls.buffer(cosine.shape[1]))
            for cosine, _ in self._tables
        ]
        self._hidden = calls.buffer(decoder.embed_tokens.weight.shape[1])
        states, added = calls.buffer(self._hidden.shape[1]), None
        _need(len(decoder.layers) == len(self._attentions))
        for layer, attention in zip(decoder.layers, self._attentions, strict=True):
            added = self._add_layer(calls, layer, attention, states, added)
        calls.norms((decoder.norm, self._hidden), added=added, out=states)
        calls.finish()
        self._calls = calls

    def _add_layer(
        self, calls: _Calls, layer: Any, of: AttentionCall, states: Tensor, added: Tensor | None
    ) -> Tensor:
        """Adds one layer, whose input is the hidden states plus ``added``; returns what is to be
        added to them after it."""
        parts, attention, mlp = set(dict(layer.named_children())), layer.self_attn, layer.mlp
        _need(parts - _MORE_NORMS == {"self_attn", "mlp"} | _NORMS)
        more = parts > {"self_attn", "mlp"} | _NORMS
        normed = set(dict(attention.named_children())) - _ATTENTION
        _need(normed in (set(), {"q_norm", "k_norm"}))
        buffers = self._buffers(calls, of, mlp.gate_proj.out_features)
        q, k, v, attended, out, gate, up, down = buffers
        calls.norms((layer.input_layernorm, self._hidden), added=added, out=states)
        linear = (attention.q_proj, attention.k_proj, attention.v_proj)
        calls.products(states, list(zip(linear, (q, k, v), strict=True)))
        if normed:
            calls.norms((attention.q_norm, q), (attention.k_norm, k))
        kind = getattr(attention, "layer_type", None) if len(self._kinds) > 1 else self._kinds[0]
        angles = self._angles[self._kinds.index(kind)]
        _need(angles[0].shape[1] == of.query.shape[2])
        calls.rotations([q, k], angles)
        calls.attention(of, q, k, v, attended)
        calls.products(attended, [(attention.o_proj, out)])
        before = layer.pre_feedforward_layernorm if more else layer.post_attention_layernorm
        if more:
            calls.norms((layer.post_attention_layernorm, out))
        calls.norms((before, self._hidden), added=out, out=states)
        calls.products(states, [(mlp.gate_proj, gate), (mlp.up_proj, up)])
        calls.gate(mlp, gate, up)
        calls.products(gate, [(mlp.down_proj, down)])
        if more:
            calls.norms((layer.post_feedforward_layernorm, down))
        return down

    def _buffers(self, calls: _Calls, of: AttentionCall, inner: int) -> list[Tensor]:
        """Returns memory for the results of a layer; all layers of one shape share it."""
        (_, heads, width), (_, kv_heads, value_width) = of.query.shape, of.value.shape
        hidden = self._hidden.shape[1]
        widths = (heads * width, kv_heads * width, kv_heads * value_width, heads * value_width)
        widths += (hidden, inner, inner, hidden)
        if widths not in calls.shared:
            calls.shared[widths] = [calls.buffer(one) for one in widths]
        return calls.shared[widths]
