"""From results to the protocol's answers, binary and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker import types

from tinker_cookbook.server import wire

_RECORD = "ArrayRecord"


class PassEncoder:
    """Of ``ForwardBackwardOutput``: log-probabilities of each datum's targets, and metrics."""

    def json(self, result: types.ForwardBackwardOutput) -> dict[str, Any]:
        """As SDKs before 0.25 read it."""
        return {
            "loss_fn_output_type": _RECORD,
            "loss_fn_outputs": [
                {name: _tensor_json(value) for name, value in record.items()}
                for record in result.loss_fn_outputs
            ],
            "metrics": result.metrics,
        }

    def proto(self, result: types.ForwardBackwardOutput) -> bytes:
        """Datums of one shape but for their length lie one behind the other in a record."""
        message = wire.ForwardBackwardOutput(loss_fn_output_type=_RECORD)
        for name, value in result.metrics.items():
            message.metrics[name] = value
        for records in _alike(result.loss_fn_outputs):
            batch = message.loss_fn_outputs.add(type_tag=_RECORD, num_datums=len(records))
            for name in records[0]:
                arrays = [record[name].to_numpy() for record in records]
                _fill(batch.fields[name], arrays)
        return message.SerializeToString()


class SampleEncoder:
    """Of ``SampleResponse``."""

    def json(self, result: types.SampleResponse) -> dict[str, Any]:
        """As SDKs before 0.18 read it."""
        answer: dict[str, Any] = {
            "type": "sample",
            "sequences": [_sequence_json(one) for one in result.sequences],
        }
        if result.prompt_logprobs_np is not None:
            answer["prompt_logprobs"] = [
                None if math.isnan(value) else float(value) for value in result.prompt_logprobs_np
            ]
        if result.topk_prompt_logprobs_np is not None:
            answer["topk_prompt_logprobs"] = _topk_json(result.topk_prompt_logprobs_np)
        return answer

    def proto(self, result: types.SampleResponse) -> bytes:
        """All that was asked for."""
        message = wire.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens or 0)
        for sequence in result.sequences:
            one = message.sequences.add(
                stop_reason=wire.STOP if sequence.stop_reason == "stop" else wire.LENGTH,
                tokens=_bytes(sequence.tokens_np, np.int32),
            )
            if sequence.logprobs_np is not None:
                one.logprobs = _bytes(sequence.logprobs_np, np.float32)
            if sequence.topk_logprobs_np is not None:
                _fill_topk(one.topk_sampled_logprobs, sequence.topk_logprobs_np)
        if result.prompt_logprobs_np is not None:
            message.prompt_logprobs = _bytes(result.prompt_logprobs_np, np.float32)
        if result.topk_prompt_logprobs_np is not None:
            _fill_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs_np)
        if result.target_prompt_logprobs is not None:
            array = result.target_prompt_logprobs.to_numpy()
            target = message.target_prompt_logprobs
            target.dense, target.dtype = _bytes(array, np.float32), wire.FLOAT32
            target.shape.extend(array.shape)
        return message.SerializeToString()


def _alike(
    records: Sequence[dict[str, types.TensorData]],
) -> list[list[dict[str, types.TensorData]]]:
    """Neighbours whose arrays differ in their length alone."""
    groups: list[list[dict[str, types.TensorData]]] = []
    last = None
    for record in records:
        shape = {name: value.to_numpy().shape[1:] for name, value in record.items()}
        if shape != last:
            groups.append([])
            last = shape
        groups[-1].append(record)
    return groups


def _fill(field: Any, arrays: Sequence[np.ndarray]) -> None:
    whole = np.concatenate(arrays).astype(np.float32, copy=False)
    ends = np.cumsum([0, *(array.size * 4 for array in arrays)])
    field.data, field.offsets = whole.tobytes(), ends.astype(np.int64).tobytes()
    field.dtype = wire.FLOAT32
    field.trailing_shape.extend(arrays[0].shape[1:])


def _fill_topk(field: Any, topk: Any) -> None:
    length, k = topk.token_ids.shape
    field.token_ids = _bytes(topk.token_ids, np.int32)
    field.logprobs = _bytes(topk.logprobs, np.float32)
    field.k, field.length = k, length


def _bytes(array: Any, dtype: Any) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _tensor_json(value: types.TensorData) -> dict[str, Any]:
    array = value.to_numpy()
    return {"data": array.ravel().tolist(), "dtype": value.dtype, "shape": list(array.shape)}


def _sequence_json(sequence: types.SampledSequence) -> dict[str, Any]:
    logprobs = sequence.logprobs_np
    return {
        "stop_reason": sequence.stop_reason,
        "tokens": np.asarray(sequence.tokens_np).tolist(),
        "logprobs": None if logprobs is None else np.asarray(logprobs).tolist(),
    }


def _topk_json(topk: Any) -> list[list[tuple[int, float]] | None]:
    rows = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    return [None if not i else list(zip(*row, strict=True)) for i, row in enumerate(rows)]
