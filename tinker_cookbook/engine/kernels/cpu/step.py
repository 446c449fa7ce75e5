"""The layers of a step in one C call (``step.c``): a list of operations, made once for a model.

With one sequence, four fifths of a step of SmolLM2-135M in Python were not products: 3,000 torch
operators, and threads that are woken for each product. The list computes what the modules compute,
with the same kernels, so all results are the same to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.kernels.cpu.attention import CallOfAttention, PagedAttention
from tinker_cookbook.engine.kernels.cpu.build import KernelCall, Operation, run
from tinker_cookbook.engine.kernels.cpu.elementwise import CallOfGate, CallOfNorm, CallOfRotation
from tinker_cookbook.engine.kernels.cpu.linear import (
    ONE_THREAD,
    CallOfProduct,
    FrozenWeight,
    _Panels,
    packed_term,
)
from tinker_cookbook.engine.model.attention_hook import AttentionCall
from tinker_cookbook.engine.model.low_rank import LowRank, Segments, Terms

_KINDS = (CallOfNorm, CallOfProduct, CallOfRotation, CallOfAttention, CallOfGate)
_ROWS = 64
"""Tokens for which a list is made first."""


class StepList:
    """Computes the hidden states of a step for a decoder whose layers it knows.

    ``attentions`` are the attention inputs of each layer, for their shapes and settings.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: a layer of another kind.
    """

    def __init__(
        self, decoder: Any, attentions: Sequence[AttentionCall], dtype: torch.dtype
    ) -> None:
        self._decoder, self._attentions, self._dtype = decoder, attentions, dtype
        self._half = dtype == torch.bfloat16
        # Gemma 3 has other angles in layers with a window.
        kinds: list[str] = getattr(decoder.rotary_emb, "layer_types", [])
        self._kinds: list[tuple[str, ...]] = [(kind,) for kind in dict.fromkeys(kinds)] or [()]
        self._packed: WeakKeyDictionary[LowRank, tuple[Any, ...]] = WeakKeyDictionary()
        self._build(_ROWS)

    def hidden(
        self, tokens: Tensor, positions: Tensor, runs: Sequence[Any], segments: Segments
    ) -> Tensor:
        """Returns the last hidden states [T, H] of the runs' ``tokens`` [T] at ``positions`` [T].

        Raises:
            RuntimeError: out of memory.
        """
        count = len(tokens)
        if count > self._rows:
            self._build(max(count, 2 * self._rows))
        norms, products, rotations, attentions, gates = self._calls
        self._hidden[:count].copy_(self._decoder.embed_tokens(tokens))
        out = torch.empty(count, self._hidden.shape[1], dtype=self._dtype)
        norms["rows"] = count * self._norm_rows
        norms["out"][-1] = out.data_ptr()
        gates["count"] = count * self._gate_widths
        angles = self._angles(positions)
        rotations["tokens"] = rotations["angles"] = count
        for field, tensors in zip(("cosine", "sine"), zip(*angles, strict=True), strict=True):
            rotations[field] = np.array([one.data_ptr() for one in tensors])[self._angles_of]
        step, cache = PagedAttention(runs), runs[0].table.cache
        for field in ("runs", "run_first", "run_count", "position", "first_page", "pages"):
            attentions[field] = getattr(step.call, field)
        attentions["keys"] = [pool.data_ptr() for pool in cache.keys]
        attentions["values"] = [pool.data_ptr() for pool in cache.values]
        multiplications = int(products["inputs"] @ products["outputs"]) * count // len(products)
        threads = torch.get_num_threads() if multiplications > ONE_THREAD else 1
        products["rows"], products["threads"] = count, threads
        kept = self._set_terms(segments, count)
        run(self._operations, threads)
        del kept  # C had only its address
        return out

    def _angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns cosines and sines [T, D] of each kind of layer."""
        both = [self._decoder.rotary_emb(self._hidden, positions[None], *k) for k in self._kinds]
        return [(cosine[0].contiguous(), sine[0].contiguous()) for cosine, sine in both]

    def _set_terms(self, segments: Segments, count: int) -> Any:
        """Sets the adapter terms of all products; returns the memory that the calls point to."""
        products = self._calls[1]
        parts = [
            (self._terms_of(terms), first, min(end, count))
            for terms, first, end in segments.stretches
            if terms and first < count
        ]
        products["parts"] = len(parts)
        if not parts:
            return None
        where = np.array([[first, end] for _, first, end in parts])
        terms = np.stack([packed[0] for packed, _, _ in parts], 1)  # [products, parts, 3]
        width = max(packed[1] for packed, _, _ in parts)
        low = torch.empty(self._slots.max() + 1, count, width, dtype=self._dtype)
        products["low_width"], products["part"] = width, where.ctypes.data
        products["low"] = low.data_ptr() + self._slots * (low.stride(0) * low.itemsize)
        products["term"] = terms.ctypes.data + np.arange(len(terms)) * terms.strides[0]
        return where, terms, low

    def _terms_of(self, terms: Terms) -> tuple[Any, ...]:
        """Returns ``struct LowRank`` of each product [products, 3], the largest width, and what
        they point to."""
        key = next(iter(terms.values()))
        if key not in self._packed:
            found = [packed_term(terms[n], self._half) if n in terms else None for n in self._names]
            rows = np.array([(0, 0, 0) if one is None else one[:3] for one in found])
            self._packed[key] = (
                rows,
                max((one.width for one in found if one is not None), default=0),
            )
        return self._packed[key]

    @torch.inference_mode(False)  # tensors of inference mode cannot be changed outside of it
    def _build(self, rows: int) -> None:
        """Makes the list for up to ``rows`` tokens."""
        self._rows = rows
        self._kept: list[Tensor] = []
        self._shared: dict[tuple[int, ...], list[Tensor]] = {}
        self._groups: list[list[KernelCall]] = []
        self._names: list[str] = []
        self._angles_of: list[int] = []
        decoder = self._decoder
        self._hidden = self._buffer(len(decoder.norm.function.args[0]))
        self._widths = [cosine.shape[1] for cosine, _ in self._angles(torch.zeros(1).long())]
        states, added = self._buffer(self._hidden.shape[1]), None
        for layer, attention in zip(decoder.layers, self._attentions, strict=True):
            added = self._add_layer(layer, attention, states, added)
        self._groups.append([self._norm(decoder.norm, self._hidden, states, added)])
        # Kernels read arrays of calls of one kind; a view in numpy sets a field of all of them.
        self._calls: list[Any] = []
        operations = (Operation * len(self._groups))()
        for kind in _KINDS:
            calls = [call for group in self._groups for call in group if type(call) is kind]
            array: Any = (kind * len(calls))(*calls)
            first = 0
            self._calls.append(np.frombuffer(array, np.dtype(kind)))
            for operation, group in zip(operations, self._groups, strict=True):
                if type(group[0]) is kind:
                    operation.kernel, operation.count = kind.kernel, len(group)
                    operation.calls = ctypes.addressof(array[first])
                    first += len(group)
        self._operations = operations
        # Products of one input have their ``x A^T`` at the same time.
        self._slots = np.array(
            [i for group in self._groups for i, call in enumerate(group) if call.kernel == 1]
        )
        norms, *_, gates = self._calls
        self._norm_rows, self._gate_widths = norms["rows"].copy(), gates["count"].copy()

    def _add_layer(
        self, layer: Any, of: AttentionCall, states: Tensor, added: Tensor | None
    ) -> Tensor:
        """Adds one layer, whose input is the hidden states plus ``added``; returns what is to be
        added to them after it."""
        attention, mlp, hidden = layer.self_attn, layer.mlp, self._hidden
        (_, heads, width), (_, kv_heads, value_width) = of.query.shape, of.value.shape
        widths = (heads * width, kv_heads * width, kv_heads * value_width, heads * value_width)
        widths += (hidden.shape[1], *2 * (mlp.gate_proj.out_features,))
        if widths not in self._shared:  # all layers of one shape use the same memory
            self._shared[widths] = [self._buffer(one) for one in (*widths, hidden.shape[1])]
        q, k, v, attended, out, gate, up, down = self._shared[widths]
        add = self._groups.append
        add([self._norm(layer.input_layernorm, hidden, states, added)])
        linear = ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v))
        add([self._product(one, states, result) for one, result in linear])
        if hasattr(attention, "q_norm"):
            add([self._norm(attention.q_norm, q, q), self._norm(attention.k_norm, k, k)])
        add([self._rotation(x, width) for x in (q, k)])
        kind = self._kinds.index((attention.layer_type,)) if self._kinds[0] else 0
        _require(self._widths[kind] == width)
        self._angles_of += [kind, kind]
        add([self._attend(of, q, k, v, attended)])
        add([self._product(attention.o_proj, attended, out)])
        before = layer.post_attention_layernorm
        more = hasattr(layer, "pre_feedforward_layernorm")
        if more:  # as Gemma
            add([self._norm(before, out, out)])
            before = layer.pre_feedforward_layernorm
        add([self._norm(before, hidden, states, out)])
        add([self._product(mlp.gate_proj, states, gate), self._product(mlp.up_proj, states, up)])
        add([self._gate(mlp, gate, up)])
        add([self._product(mlp.down_proj, gate, down)])
        if more:
            add([self._norm(layer.post_feedforward_layernorm, down, down)])
        return down

    def _buffer(self, width: int) -> Tensor:
        self._kept.append(torch.zeros(self._rows, width, dtype=self._dtype))
        return self._kept[-1]

    def _norm(self, module: Any, x: Tensor, out: Tensor, added: Tensor | None = None) -> KernelCall:
        """``added`` is added to ``x`` first, in place."""
        weight, eps, rounds = module.function.args  # see ``elementwise``
        rows, rest = divmod(x.shape[1], len(weight))  # of one token
        _require(rest == 0)
        call = CallOfNorm(rows, len(weight), eps=eps, rounds=rounds, half=self._half)
        call.x, call.weight, call.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        call.added = None if added is None else added.data_ptr()
        return call

    def _product(self, layer: Any, x: Tensor, out: Tensor) -> KernelCall:
        matrix: Any = layer.frozen.forward if isinstance(layer.frozen, FrozenWeight) else None
        _require(isinstance(matrix, _Panels) and matrix.dtype == self._dtype)
        _require((matrix.inputs, matrix.outputs) == (x.shape[1], out.shape[1]))
        _require(matrix.pairs is self._half)  # other panels have inputs in float32
        call = CallOfProduct(**matrix.fields, half=self._half)
        call.x, call.x_stride, call.out = x.data_ptr(), call.inputs, out.data_ptr()
        if layer.bias is not None:
            self._kept.append(layer.bias.float().contiguous())
            call.bias = self._kept[-1].data_ptr()
        self._names.append(layer.name)
        return call

    def _rotation(self, x: Tensor, width: int) -> KernelCall:
        call = CallOfRotation(heads=x.shape[1] // width, width=width, half=self._half)
        call.stride[:] = (x.shape[1], width)
        call.x = call.out = x.data_ptr()
        return call

    def _attend(
        self, of: AttentionCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> KernelCall:
        (_, heads, width), (_, kv_heads, value_width) = of.query.shape, of.value.shape
        call = CallOfAttention(heads=heads, width=width, kv_heads=kv_heads, half=self._half)
        call.value_width, call.window, call.scale = value_width, of.window or 0, of.scale
        call.cap = of.softcap or 0
        _require(of.sinks is None)
        call.query, call.key, call.value = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.query_stride[:] = (heads * width, width)
        call.key_stride[:] = (kv_heads * width, width)
        call.value_stride[:] = (kv_heads * value_width, value_width)
        call.out = out.data_ptr()
        return call

    def _gate(self, mlp: Any, gate: Tensor, up: Tensor) -> KernelCall:
        (gelu,) = mlp.forward.args[0].args  # see ``fusing`` and ``elementwise``
        call = CallOfGate(gate.shape[1], gelu=gelu, half=self._half)  # of one token
        call.gate, call.up, call.out = gate.data_ptr(), up.data_ptr(), gate.data_ptr()
        return call


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("a layer of another kind")
