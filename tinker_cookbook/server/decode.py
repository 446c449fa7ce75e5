"""From the protocol's bodies, binary and JSON, to what the clients of the engine take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tinker import types

from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies, wire
from tinker_cookbook.server.errors import NoRoom, TooLarge, plain
from tinker_cookbook.server.read_body import DATA_CONTAINERS, check_containers

_DTYPES = {wire.FLOAT32: ("float32", np.float32), wire.INT64: ("int64", np.int64)}


@dataclass(frozen=True)
class Pass:
    """A forward pass, with or without backward."""

    model_id: str
    seq_id: int | None
    data: list[Example]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None
    backward: bool
    error: Exception | None = None
    """What is wrong with the data, of which there is none then: the request fails in its turn, so
    that the order of the numbers has no gap."""


def read_pass(body: bytes, content_type: str, encoding: str, limit: int, *, forward: bool) -> Pass:
    """The request of a forward pass; raises ``DataValidationError`` for what is none.

    Args:
        body: As it came.
        content_type: JSON, or else protobuf.
        encoding: ``zstd`` or empty.
        limit: Bytes that it may have once unpacked.
        forward: Whether it came to the older address for passes without backward.
    """
    if encoding == "zstd":
        body = _unpacked(body, limit)
    elif encoding not in ("", "identity"):
        raise DataValidationError(f"Content-Encoding: got {encoding!r}, expected zstd or none")
    if "json" in content_type:
        return _of_json(body, forward)
    return _of_proto(body, forward)


def unread_pass(error: NoRoom) -> Pass:
    """In the place of a pass of which there is only the beginning; raises ``error`` where that does
    not say whose it is."""
    message, head = wire.ForwardBackwardRequest(), error.head
    try:
        size, at = _varint(head, 1)
        _, end = _varint(head, at + size + 1)  # the model's id comes first, then the number
        message.ParseFromString(head[:end])
    except (IndexError, DecodeError):
        raise error from None
    return Pass(message.model_id, message.seq_id, [], "", None, True, error)


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        value |= (body[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if body[at - 1] < 128:
            return value, at


def tensor_of(body: bodies.Tensor) -> types.TensorData:
    """A tensor of a JSON body; ``DataValidationError`` for numbers that can be none."""
    try:
        return _tensor_of(body)
    except OverflowError as error:
        raise DataValidationError(f"tensor: a number is beyond {body.dtype}: {error}") from error


def _tensor_of(body: bodies.Tensor) -> types.TensorData:
    if body.sparse_crow_indices is not None or body.sparse_col_indices is not None:
        _check_sparse(body)
    dtype = np.int64 if body.dtype == "int64" else np.float32
    return types.TensorData(
        data=np.asarray(body.data, dtype=dtype),
        dtype=body.dtype,
        shape=body.shape,
        sparse_crow_indices=body.sparse_crow_indices,
        sparse_col_indices=body.sparse_col_indices,
    )


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


def prompt_of(body: bodies.Prompt, where: str) -> types.ModelInput:
    """The tokens of a JSON body; refuses chunks that are no text."""
    return types.ModelInput.from_ints(_tokens_of(body, where))


def _tokens_of(body: bodies.Prompt, where: str) -> list[int]:
    tokens: list[int] = []
    for chunk in body.chunks:
        if chunk.type != "encoded_text":
            raise _not_text(where, chunk.type)
        tokens += chunk.tokens
    return tokens


def _of_json(body: bytes, forward: bool) -> Pass:
    check_containers(body, DATA_CONTAINERS)
    try:
        request = bodies.JsonPass.model_validate_json(body)
    except ValidationError as error:
        wrong = DataValidationError(f"body: {first_problem(error)}")
        try:
            head = bodies.PassHead.model_validate_json(body)
        except ValidationError:
            raise wrong from error
        return _refused(head, forward, wrong)
    given = request.forward_input if forward else request.forward_backward_input
    if given is None:
        name = "forward_input" if forward else "forward_backward_input"
        return _refused(request, forward, DataValidationError(f"body: lacks {name!r}"))
    data, wrong = _all_of(_example_of_json(d, f"datum {i}") for i, d in enumerate(given.data))
    config = given.loss_fn_config
    return Pass(request.model_id, request.seq_id, data, given.loss_fn, config, not forward, wrong)


def _refused(head: bodies.PassHead, forward: bool, why: Exception) -> Pass:
    """A pass that fails in its turn; raises ``why`` where no number says which that is."""
    if head.seq_id is None:
        raise why
    return Pass(head.model_id, head.seq_id, [], "", None, not forward, why)


def _example_of_json(datum: bodies.JsonDatum, where: str) -> Example:
    tokens = _tokens_of(datum.model_input, f"{where}: model_input")
    inputs = {name: tensor_of(t).to_numpy() for name, t in datum.loss_fn_inputs.items()}
    return Example(np.asarray(tokens, dtype=np.int64), inputs)


def _all_of(examples: Iterable[Example]) -> tuple[list[Example], Exception | None]:
    """All examples, or none and what is wrong with the first that is."""
    try:
        return list(examples), None
    except (DataValidationError, ValueError, MemoryError) as error:
        return [], plain(error)


def _of_proto(body: bytes, forward: bool) -> Pass:
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise DataValidationError(
            f"body: {len(body)} bytes that are no ForwardBackwardRequest ({error})"
        ) from error
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    data, wrong = _all_of(_example(datum, f"datum {i}") for i, datum in enumerate(request.data))
    backward = not (request.forward_only or forward)
    return Pass(
        request.model_id, request.seq_id, data, request.loss_fn, config or None, backward, wrong
    )


def _example(message: Any, where: str) -> Example:
    """Arrays as they lie in the message: as lists of the SDK's types they would take ten times the
    memory, and where that ends its checks, written in Rust, stop for good."""
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
    return data.reshape(shape or -1).copy()  # torch wants arrays that can be written


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataValidationError(
            f"{where}: {len(data)} bytes, expected a multiple of {np.dtype(dtype).itemsize}"
        )
    return np.frombuffer(data, dtype=dtype)


def _unpacked(body: bytes, limit: int) -> bytes:
    # Read piece by piece: a frame says its own size, and may say anything.
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            out = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise DataValidationError(f"body: cannot be unpacked as zstd ({error})") from error
    if len(out) > limit:
        raise TooLarge(f"body: unpacks to more than {limit >> 20} MiB; send fewer datums a request")
    return out


def first_problem(error: ValidationError) -> str:
    """Where a body is wrong first, and why."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _not_text(where: str, kind: object) -> DataValidationError:
    return DataValidationError(
        f"{where}: holds a chunk of type {kind!r}; the engine takes text tokens only (encoded_text)"
    )
