"""Binary messages of the protocol, and the conversion of requests and results.

The messages are described here rather than taken from the SDK, whose names change; field numbers
have been stable since SDK 0.18.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tinker import types

from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.errors import BodyMemoryError, BodyTooLargeError, drop_tracebacks
from tinker_cookbook.server.requests import Encoder

_PACKAGE = "tinker_cookbook.wire"

# A field is "name number type": "*T" is repeated, "{T}" is a map from strings, and "|group" names
# the oneof that the field belongs to.
_MESSAGES = {
    "SparseCsr": "values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes",
    "Tensor": "dense 1 bytes |layout, sparse_csr 2 SparseCsr |layout, dtype 3 int32, "
    "shape 4 *int64",
    "EncodedText": "tokens 1 bytes",
    "Image": "data 1 bytes, format 2 string",
    "Dmel": "dmel 1 bytes",
    "Chunk": "encoded_text 1 EncodedText |chunk, image 2 Image |chunk, dmel 3 Dmel |chunk",
    "Datum": "model_input 1 *Chunk, loss_fn_inputs 2 {Tensor}",
    "LossConfigValue": "number 1 double |value, text 2 string |value",
    "ForwardBackwardRequest": "model_id 1 string, seq_id 2 int32, data 3 *Datum, "
    "loss_fn 4 string, loss_fn_config 5 {double}, forward_only 6 bool, "
    "loss_fn_config_v2 7 {LossConfigValue}",
    "BatchedTensor": "data 1 bytes, offsets 2 bytes, dtype 3 int32, trailing_shape 4 *int64",
    "ArrayRecord": "type_tag 1 string, fields 2 {BatchedTensor}, num_datums 3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type 1 string, loss_fn_outputs 2 *ArrayRecord, "
    "metrics 3 {double}",
    "TopkLogprobs": "token_ids 1 bytes, logprobs 2 bytes, k 3 int32, length 4 int32",
    "SampledSequence": "stop_reason 1 int32, tokens 2 bytes, logprobs 3 bytes, "
    "topk_sampled_logprobs 4 TopkLogprobs",
    "SampleResponse": "sequences 1 *SampledSequence, prompt_logprobs 2 bytes, "
    "topk_prompt_logprobs 3 TopkLogprobs, prompt_cache_hit_tokens 4 int32, "
    "target_prompt_logprobs 5 Tensor",
}

# Values of ``dtype``.
FLOAT32, INT64, INT32 = 1, 2, 3

# Values of ``stop_reason``.
STOP, LENGTH = 0, 1

_FIELD = descriptor_pb2.FieldDescriptorProto


def _set_type(field: Any, name: str) -> None:
    if name in _MESSAGES:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{name}"
    else:
        field.type = getattr(_FIELD, f"TYPE_{name.upper()}")


def _add_map(message: Any, field: Any, value_type: str) -> None:
    # On the wire a map is a repeated message of key and value.
    entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), value_type)
    field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_field(message: Any, text: str) -> None:
    name, number, kind, *group = text.split()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("{"):
        _add_map(message, field, kind[1:-1])
        return
    if kind.startswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    _set_type(field, kind.removeprefix("*"))
    if group:
        title = group[0].removeprefix("|")
        if all(known.name != title for known in message.oneof_decl):
            message.oneof_decl.add(name=title)
        field.oneof_index = 0


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tinker_cookbook/wire.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            _add_field(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptors = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES)
    return {one.name: message_factory.GetMessageClass(one) for one in descriptors}


_CLASSES = _message_classes()

ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]

_DTYPES = {FLOAT32: ("float32", np.float32), INT64: ("int64", np.int64)}
_RECORD = "ArrayRecord"


@dataclass(frozen=True)
class PassRequest:
    """Forward pass, with or without backward."""

    model_id: str
    seq_id: int | None
    data: list[Example]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None
    backward: bool
    error: Exception | None = None
    """Error in the data, which are empty then. The request fails in its turn, so that the order of
    sequence ids has no gap."""


def read_pass(
    body: bytes, content_type: str, encoding: str, limit: int, *, forward: bool
) -> PassRequest:
    """Decodes the request of a forward pass.

    Args:
        body: The body as received.
        content_type: JSON, or else protobuf.
        encoding: ``zstd`` or empty.
        limit: Largest size of the decompressed body in bytes.
        forward: Whether it arrived at the older address for passes without backward.

    Raises:
        DataValidationError: The body is not a request of a forward pass.
    """
    if encoding == "zstd":
        body = _decompress(body, limit)
    elif encoding not in ("", "identity"):
        raise DataValidationError(f"Content-Encoding: got {encoding!r}, expected zstd or none")
    return (_pass_of_json if "json" in content_type else _pass_of_proto)(body, forward)


def pass_without_memory(error: BodyMemoryError) -> PassRequest:
    """Returns a failed pass for a body that does not fit into memory.

    Raises ``error`` if the first bytes do not contain model id and sequence id.
    """
    # At the beginning of the message stand two fields: model_id (tag, size, text) and seq_id.
    message, head = ForwardBackwardRequest(), error.head
    try:
        size, at = _varint(head, 1)
        _, end = _varint(head, at + size + 1)  # the model id is the first field, then seq_id
        message.ParseFromString(head[:end])
    except (IndexError, DecodeError):
        raise error from None
    return PassRequest(message.model_id, message.seq_id, [], "", None, True, error)


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Returns the varint at ``at`` and where it ends."""
    value = shift = 0
    while True:
        value |= (body[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if body[at - 1] < 128:
            return value, at


def _decompress(body: bytes, limit: int) -> bytes:
    # In a stream up to the limit: the size that a frame declares may be wrong.
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            out = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise DataValidationError(f"body: cannot be unpacked as zstd ({error})") from error
    if len(out) > limit:
        raise BodyTooLargeError(
            f"body: unpacks to more than {limit >> 20} MiB; send fewer datums a request"
        )
    return out


def _pass_of_json(body: bytes, forward: bool) -> PassRequest:
    bodies.check_containers(body, bodies.MAX_DATA_CONTAINERS)
    try:
        request = bodies.JsonPass.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        invalid = DataValidationError(f"body: {where}: {problem['msg']}")
        try:
            operation = bodies.Operation.model_validate_json(body)
        except ValidationError:
            raise invalid from error
        return _failed_pass(operation, forward, invalid)
    name = "forward_input" if forward else "forward_backward_input"
    batch: bodies.PassInput | None = getattr(request, name)
    if batch is None:
        return _failed_pass(request, forward, DataValidationError(f"body: lacks {name!r}"))
    data, error = _examples(_example_of_json(d, f"datum {i}") for i, d in enumerate(batch.data))
    return PassRequest(
        request.model_id,
        request.seq_id,
        data,
        batch.loss_fn,
        batch.loss_fn_config,
        not forward,
        error,
    )


def _failed_pass(operation: bodies.Operation, forward: bool, error: Exception) -> PassRequest:
    if operation.seq_id is None:
        raise error
    return PassRequest(operation.model_id, operation.seq_id, [], "", None, not forward, error)


def _pass_of_proto(body: bytes, forward: bool) -> PassRequest:
    request = ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise DataValidationError(
            f"body: {len(body)} bytes that are no ForwardBackwardRequest ({error})"
        ) from error
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    data, error = _examples(_example(datum, f"datum {i}") for i, datum in enumerate(request.data))
    backward = not (request.forward_only or forward)
    return PassRequest(
        request.model_id, request.seq_id, data, request.loss_fn, config or None, backward, error
    )


def _examples(examples: Iterable[Example]) -> tuple[list[Example], Exception | None]:
    """Returns all examples, or none and the first error."""
    try:
        return list(examples), None
    except (DataValidationError, ValueError, MemoryError) as error:
        return [], drop_tracebacks(error)


def _example_of_json(datum: bodies.JsonDatum, where: str) -> Example:
    tokens = prompt_tokens(datum.model_input, f"{where}: model_input")
    inputs = {name: tensor_of(t).to_numpy() for name, t in datum.loss_fn_inputs.items()}
    return Example(np.asarray(tokens, dtype=np.int64), inputs)


def _example(message: Any, where: str) -> Example:
    # NumPy arrays, not lists of the SDK's types: those take ten times the memory, and their checks,
    # written in Rust, abort the process if memory runs out.
    parts = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _not_text(f"{where}: model_input", chunk.WhichOneof("chunk"))
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"{where}: model_input"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
    inputs = {name: _tensor(t, f"{where}: {name}") for name, t in message.loss_fn_inputs.items()}
    return Example(tokens, inputs)


def _tensor(message: Any, where: str) -> np.ndarray:
    if message.dtype not in _DTYPES:
        raise DataValidationError(f"{where}: dtype {message.dtype}, expected float32 or int64")
    name, dtype = _DTYPES[message.dtype]
    shape = list(message.shape) or None
    if message.WhichOneof("layout") == "sparse_csr":
        rows = message.sparse_csr
        return types.TensorData(
            data=_array(rows.values, dtype, where),
            dtype=name,
            shape=shape,
            sparse_crow_indices=_array(rows.crow_indices, np.int64, where).tolist(),
            sparse_col_indices=_array(rows.col_indices, np.int64, where).tolist(),
        ).to_numpy()
    data = _array(message.dense, dtype, where)
    if shape is not None and np.prod(shape) != data.size:
        raise DataValidationError(f"{where}: {data.size} numbers do not have the shape {shape}")
    return data.reshape(shape or -1).copy()  # torch needs writable arrays


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataValidationError(
            f"{where}: {len(data)} bytes, expected a multiple of {np.dtype(dtype).itemsize}"
        )
    return np.frombuffer(data, dtype=dtype)


def prompt_tokens(body: bodies.Prompt, where: str) -> list[int]:
    """Returns the tokens of a JSON prompt; raises ``DataValidationError`` for other chunks."""
    tokens: list[int] = []
    for chunk in body.chunks:
        if chunk.type != "encoded_text":
            raise _not_text(where, chunk.type)
        tokens += chunk.tokens
    return tokens


def tensor_of(body: bodies.Tensor) -> types.TensorData:
    """Returns the tensor of a JSON body; raises ``DataValidationError`` if it is invalid."""
    try:
        if body.sparse_crow_indices is not None or body.sparse_col_indices is not None:
            _check_sparse(body)
        data = np.asarray(body.data, dtype=np.int64 if body.dtype == "int64" else np.float32)
        return types.TensorData(**{**dict(body), "data": data})
    except OverflowError as error:
        raise DataValidationError(f"tensor: a number is beyond {body.dtype}: {error}") from error


def _check_sparse(body: bodies.Tensor) -> None:
    rows, columns, shape = body.sparse_crow_indices, body.sparse_col_indices, body.shape
    if rows is None or columns is None or shape is None or len(shape) != 2:
        raise DataValidationError(
            "sparse tensor: expected sparse_crow_indices, sparse_col_indices and a shape of two "
            "dimensions, all three"
        )
    steps = np.diff(np.asarray(rows, dtype=np.int64))
    column = np.asarray(columns, dtype=np.int64)
    count = len(body.data)
    ends = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == count == len(columns)
    if not ends or (steps < 0).any() or ((column < 0) | (column >= shape[1])).any():
        raise DataValidationError(
            f"sparse tensor: sparse_crow_indices must rise from 0 to {count}, the number of "
            f"elements, in {shape[0] + 1} steps, and sparse_col_indices name {count} columns below "
            f"{shape[1]}"
        )


def _not_text(where: str, kind: object) -> DataValidationError:
    return DataValidationError(
        f"{where}: holds a chunk of type {kind!r}; the engine takes text tokens only (encoded_text)"
    )


class PassEncoder(Encoder):
    """Encoder of ``ForwardBackwardOutput``: log-probabilities of each datum, and metrics."""

    def json(self, result: types.ForwardBackwardOutput) -> dict[str, Any]:
        """Returns the JSON form, for SDKs before 0.25."""
        return {
            "loss_fn_output_type": _RECORD,
            "loss_fn_outputs": [
                {name: _tensor_json(value) for name, value in record.items()}
                for record in result.loss_fn_outputs
            ],
            "metrics": result.metrics,
        }

    def proto(self, result: types.ForwardBackwardOutput) -> bytes:
        """Returns the message; consecutive datums are batched if they differ only in length."""
        message = ForwardBackwardOutput(loss_fn_output_type=_RECORD)
        for name, value in result.metrics.items():
            message.metrics[name] = value
        records = [
            {name: value.to_numpy() for name, value in record.items()}
            for record in result.loss_fn_outputs
        ]
        for _, group in groupby(records, lambda r: {name: a.shape[1:] for name, a in r.items()}):
            batch = list(group)
            out = message.loss_fn_outputs.add(type_tag=_RECORD, num_datums=len(batch))
            for name in batch[0]:
                _fill_batch(out.fields[name], [record[name] for record in batch])
        return message.SerializeToString()


class SampleEncoder(Encoder):
    """Encoder of ``SampleResponse``."""

    def json(self, result: types.SampleResponse) -> dict[str, Any]:
        """Returns the JSON form, for SDKs before 0.18."""
        body: dict[str, Any] = {
            "type": "sample",
            "sequences": [_sequence_json(sequence) for sequence in result.sequences],
        }
        if result.prompt_logprobs_np is not None:
            body["prompt_logprobs"] = [
                None if math.isnan(value) else float(value) for value in result.prompt_logprobs_np
            ]
        if result.topk_prompt_logprobs_np is not None:
            body["topk_prompt_logprobs"] = _topk_json(result.topk_prompt_logprobs_np)
        return body

    def proto(self, result: types.SampleResponse) -> bytes:
        """Returns the message."""
        message = SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens or 0)
        for sequence in result.sequences:
            out = message.sequences.add(
                stop_reason=STOP if sequence.stop_reason == "stop" else LENGTH,
                tokens=_bytes(sequence.tokens_np, np.int32),
            )
            if sequence.logprobs_np is not None:
                out.logprobs = _bytes(sequence.logprobs_np, np.float32)
            if sequence.topk_logprobs_np is not None:
                _fill_topk(out.topk_sampled_logprobs, sequence.topk_logprobs_np)
        if result.prompt_logprobs_np is not None:
            message.prompt_logprobs = _bytes(result.prompt_logprobs_np, np.float32)
        if result.topk_prompt_logprobs_np is not None:
            _fill_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs_np)
        if result.target_prompt_logprobs is not None:
            array = result.target_prompt_logprobs.to_numpy()
            target = message.target_prompt_logprobs
            target.dense, target.dtype = _bytes(array, np.float32), FLOAT32
            target.shape.extend(array.shape)
        return message.SerializeToString()


def _fill_batch(field: Any, arrays: Sequence[np.ndarray]) -> None:
    # Offsets of the arrays in bytes; the first dimension may differ, the others may not.
    ends = np.cumsum([0, *(array.size * 4 for array in arrays)])
    field.data, field.offsets = _bytes(np.concatenate(arrays), np.float32), _bytes(ends, np.int64)
    field.dtype = FLOAT32
    field.trailing_shape.extend(arrays[0].shape[1:])


def _fill_topk(field: Any, topk: Any) -> None:
    field.length, field.k = topk.token_ids.shape
    field.token_ids = _bytes(topk.token_ids, np.int32)
    field.logprobs = _bytes(topk.logprobs, np.float32)


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
    # The first token of a prompt has no log-probability.
    return [None if not i else list(zip(*row, strict=True)) for i, row in enumerate(rows)]
