"""From the protocol's bodies, binary and JSON, to what the clients of the engine take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import zstandard
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from tinker import types

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies, wire
from tinker_cookbook.server.errors import TooLarge

_DTYPES = {wire.FLOAT32: ("float32", np.float32), wire.INT64: ("int64", np.int64)}


@dataclass(frozen=True)
class Pass:
    """A forward pass, with or without backward."""

    model_id: str
    seq_id: int | None
    data: list[tinker.Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None
    backward: bool


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


def tensor_of(body: bodies.Tensor) -> types.TensorData:
    """A tensor of a JSON body."""
    dtype = np.int64 if body.dtype == "int64" else np.float32
    return types.TensorData(
        data=np.asarray(body.data, dtype=dtype),
        dtype=body.dtype,
        shape=body.shape,
        sparse_crow_indices=body.sparse_crow_indices,
        sparse_col_indices=body.sparse_col_indices,
    )


def prompt_of(body: bodies.Prompt, where: str) -> types.ModelInput:
    """The tokens of a JSON body; refuses chunks that are no text."""
    tokens: list[int] = []
    for chunk in body.chunks:
        if chunk.type != "encoded_text":
            raise _not_text(where, chunk.type)
        tokens += chunk.tokens
    return types.ModelInput.from_ints(tokens)


def _of_json(body: bytes, forward: bool) -> Pass:
    try:
        request = bodies.JsonPass.model_validate_json(body)
    except ValidationError as error:
        raise DataValidationError(f"body: {first_problem(error)}") from error
    given = request.forward_input if forward else request.forward_backward_input
    if given is None:
        name = "forward_input" if forward else "forward_backward_input"
        raise DataValidationError(f"body: lacks {name!r}")
    data = [
        tinker.Datum(
            model_input=prompt_of(datum.model_input, f"datum {i}: model_input"),
            loss_fn_inputs={name: tensor_of(t) for name, t in datum.loss_fn_inputs.items()},
        )
        for i, datum in enumerate(given.data)
    ]
    return Pass(
        request.model_id, request.seq_id, data, given.loss_fn, given.loss_fn_config, not forward
    )


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
    return Pass(
        request.model_id,
        request.seq_id,
        [_datum(datum, f"datum {i}") for i, datum in enumerate(request.data)],
        request.loss_fn,
        config or None,
        not (request.forward_only or forward),
    )


def _datum(message: Any, where: str) -> tinker.Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _not_text(f"{where}: model_input", chunk.WhichOneof("chunk"))
        tokens += _array(chunk.encoded_text.tokens, np.int32, f"{where}: model_input").tolist()
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            name: _tensor(tensor, f"{where}: {name}")
            for name, tensor in message.loss_fn_inputs.items()
        },
    )


def _tensor(message: Any, where: str) -> types.TensorData:
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
        )
    data = _array(message.dense, dtype, where)
    if shape is not None and np.prod(shape) != data.size:
        raise DataValidationError(f"{where}: {data.size} numbers do not have the shape {shape}")
    return types.TensorData(data=data, dtype=name, shape=shape)


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
