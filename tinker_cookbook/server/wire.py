"""Converts requests and results: protobuf, and the JSON of older SDKs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from fastapi import HTTPException, Request
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tinker_cookbook.backends import convert
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.errors import BodyTooLargeError, drop_tracebacks
from tinker_cookbook.server.requests import Encoder

_DTYPES: dict[int, tuple[str, type]] = {
    pb.DTYPE_FLOAT32: ("float32", np.float32),
    pb.DTYPE_INT64: ("int64", np.int64),
}
_RECORD = "ArrayRecord"
# The ids in JSON. A number at the end of the bytes may be cut off.
_JSON_MODEL = re.compile(rb'"model_id"\s*:\s*"([^"\\]+)"')
_JSON_SEQ = re.compile(rb'"seq_id"\s*:\s*(\d{1,18})[\s,}]')


@dataclass
class SparseBudget:
    """Bytes that the sparse tensors of a request may still take as dense arrays.

    A small request can describe a large sparse tensor.
    """

    bytes_left: int

    def take(self, shape: list[int]) -> None:
        """Counts a tensor of this shape; raises ``DataValidationError`` if it is too large."""
        # Python's integers, because NumPy's overflow. Both dtypes take at most eight bytes.
        self.bytes_left -= math.prod(shape) * 8
        if self.bytes_left < 0:
            raise DataValidationError(
                f"sparse tensor: got the shape {shape}; the dense form of all sparse tensors must "
                "not be larger than the largest request that this server accepts "
                "(max_request_mb=); send fewer datums per request"
            )


@dataclass(frozen=True)
class ImageExample:
    """Datum with images, whose tokens are known only with the model."""

    model_input: types.ModelInput
    inputs: Mapping[str, np.ndarray]
    where: str

    def __len__(self) -> int:
        # There is a target for each position. A datum without targets is refused later.
        return len(self.inputs.get("target_tokens", ()))

    def example(self, reader: convert.MakeReader) -> Example:
        """Returns the engine's example; raises ``DataValidationError``."""
        tokens, images = convert.sequence_of(self.model_input, self.where, reader)
        return Example(tokens, self.inputs, images)


@dataclass
class PassRequest:
    """Forward pass, with or without backward."""

    model_id: str
    seq_id: int | None
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None
    backward: bool
    data: list[Example | ImageExample] = field(default_factory=list)
    error: Exception | None = None
    """Error in the data, which are then empty. The request fails in its turn, so that the
    sequence ids have no gap."""

    def read_data(self, examples: Iterable[Example | ImageExample]) -> PassRequest:
        """Sets ``data``, or ``error`` at the first invalid datum; returns the request."""
        try:
            self.data = list(examples)
        except (DataValidationError, ValueError, MemoryError, RuntimeError) as error:
            self.error = drop_tracebacks(error)
        return self

    def examples(self, reader: convert.MakeReader) -> list[Example]:
        """Returns the engine's examples, with images of ``reader``; raises
        ``DataValidationError``."""
        return [one.example(reader) if isinstance(one, ImageExample) else one for one in self.data]


async def receive_pass(request: Request, *, forward: bool) -> PassRequest:
    """Reads a pass. The error of a refused body becomes the result of the operation.

    Raises the error if the body does not contain the operation's ids.
    """
    limit = request.app.state.max_request_bytes
    content_type = request.headers.get("content-type", "")
    encoding = request.headers.get("content-encoding", "")
    part = bytearray()
    try:
        body = await bodies.read_body(request, limit, part)
        # SDKs before 0.25 write the ids at the end.
        part += body[-bodies.HEAD_BYTES :]
        read = partial(read_pass, body, content_type, encoding, limit, forward=forward)
        # Decode compressed bodies in a thread, because they may unpack to much more data.
        small = len(body) <= bodies.SMALL_BYTES and not encoding
        return read() if small else await asyncio.to_thread(read)
    except (HTTPException, ClientDisconnect):
        raise  # the body did not arrive, so the client sends it again
    except Exception as error:
        # Otherwise the sequence ids would have a gap, and the next step would not fail.
        return refused_pass(bytes(part), error, backward=not forward)


def read_pass(
    body: bytes, content_type: str, encoding: str, limit: int, *, forward: bool
) -> PassRequest:
    """Decodes the request of a forward pass: JSON or protobuf, at most ``limit`` bytes.

    ``forward`` is True for the older route for passes without backward. Raises
    ``DataValidationError`` if the body is invalid.
    """
    if encoding == "zstd":
        # Decompress as a stream up to the limit, because a frame's declared size may be wrong.
        try:
            # One byte above the limit shows that the body is too large.
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                body = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise DataValidationError(f"body: cannot be unpacked as zstd ({error})") from error
        if len(body) > limit:
            raise BodyTooLargeError(
                f"body: unpacks to more than {limit >> 20} MiB; send fewer datums per request"
            )
    elif encoding not in ("", "identity"):
        raise DataValidationError(f"Content-Encoding: got {encoding!r}, expected zstd or none")
    if "json" in content_type:
        return _pass_of_json(body, forward, limit)
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DataValidationError(
            f"body: {len(body)} bytes are not a ForwardBackwardRequest ({error})"
        ) from error
    # Newer SDKs send settings in a second field, for text and numbers.
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    # Newer SDKs send both kinds of pass to one route, with a flag.
    backward = not (message.forward_only or forward)
    ids, budget = (message.model_id, message.seq_id), SparseBudget(limit)
    return PassRequest(*ids, message.loss_fn, config or None, backward).read_data(
        _example(datum, f"datum {i}", budget) for i, datum in enumerate(message.data)
    )


def refused_pass(part: bytes, error: Exception, *, backward: bool) -> PassRequest:
    """Returns a failed pass for a body that is refused with ``error``.

    ``part`` has the first bytes of the body, and may have the last ones. Raises ``error`` if it
    does not contain model id and sequence id.
    """
    ids = _ids_of(part)
    if ids is None:
        raise error
    return PassRequest(*ids, "", None, backward, error=drop_tracebacks(error))


def _ids_of(part: bytes) -> tuple[str, int] | None:
    """Returns the model id and the sequence id in a part of a body, or None."""
    model, seq = _JSON_MODEL.search(part), _JSON_SEQ.search(part)
    if model and seq:
        return model[1].decode(errors="replace"), int(seq[1])
    # The message starts with these two fields. A prefix that cuts a field cannot be parsed.
    for end in range(min(len(part), bodies.HEAD_BYTES) + 1):
        message = pb.ForwardBackwardRequest()
        with contextlib.suppress(DecodeError):
            message.ParseFromString(part[:end])
            if message.model_id and message.seq_id:
                return message.model_id, message.seq_id
    return None


def _pass_of_json(body: bytes, forward: bool, limit: int) -> PassRequest:
    bodies.check_containers(body, bodies.MAX_DATA_CONTAINERS)
    name = "forward_input" if forward else "forward_backward_input"
    try:
        request = bodies.JsonPass.model_validate_json(body)
        batch: bodies.PassInput | None = getattr(request, name)
        if batch is not None:
            budget = SparseBudget(limit)
            fields = request.model_id, request.seq_id, batch.loss_fn, batch.loss_fn_config
            return PassRequest(*fields, not forward).read_data(
                _with_inputs(
                    model_input(datum.model_input, where := f"datum {i}: model_input"),
                    where,
                    {
                        name: tensor_of(tensor, budget).to_numpy()
                        for name, tensor in datum.loss_fn_inputs.items()
                    },
                )
                for i, datum in enumerate(batch.data)
            )
        invalid = DataValidationError(f"body: lacks {name!r}")
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        invalid = DataValidationError(f"body: {where}: {problem['msg']}")
    # With valid ids, the request fails in its turn, otherwise immediately.
    try:
        ids = bodies.Operation.model_validate_json(body)
    except ValidationError:
        raise invalid from None
    if ids.seq_id is None:
        raise invalid
    return PassRequest(ids.model_id, ids.seq_id, "", None, not forward, error=invalid)


def _with_inputs(
    given: types.ModelInput, where: str, inputs: dict[str, np.ndarray]
) -> Example | ImageExample:
    if any(isinstance(chunk, types.ImageChunk) for chunk in given.chunks):
        return ImageExample(given, inputs, where)
    return Example(np.asarray(given.to_ints(), dtype=np.int64), inputs)


def _example(datum: pb.Datum, where: str, budget: SparseBudget) -> Example | ImageExample:
    place = f"{where}: model_input"
    inputs = {
        name: _tensor(tensor, f"{where}: {name}", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if any(chunk.HasField("image") for chunk in datum.model_input):
        return ImageExample(_message_input(datum, place), inputs, place)
    # Use NumPy arrays, not the SDK's types: those need ten times the memory, and their checks,
    # written in Rust, abort the process if memory runs out.
    # Never an empty list, because np.concatenate would fail.
    tokens = [np.empty(0, dtype=np.int64)]
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise _unknown_chunk(place, chunk.WhichOneof("chunk"))
        tokens.append(_array(chunk.encoded_text.tokens, np.int32, place))
    return Example(np.concatenate(tokens), inputs)


def _tensor(message: pb.Tensor, where: str, budget: SparseBudget) -> np.ndarray:
    if message.dtype not in _DTYPES:
        raise DataValidationError(f"{where}: dtype {message.dtype}, expected float32 or int64")
    name, dtype = _DTYPES[message.dtype]
    shape = list(message.shape) or None
    if message.HasField("sparse_csr"):
        rows = message.sparse_csr
        # Skip validation, which would convert each array to a list.
        sparse = bodies.Tensor.model_construct(
            data=_array(rows.values, dtype, where),
            dtype=name,
            shape=shape,
            sparse_crow_indices=_array(rows.crow_indices, np.int64, where),
            sparse_col_indices=_array(rows.col_indices, np.int64, where),
        )
        return tensor_of(sparse, budget).to_numpy()
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


def _message_input(datum: pb.Datum, where: str) -> types.ModelInput:
    """Returns the input of a datum that has an image."""
    chunks: list[types.ModelInputChunk] = []
    for i, chunk in enumerate(datum.model_input):
        if chunk.HasField("image"):
            expected = (
                chunk.image.expected_tokens if chunk.image.HasField("expected_tokens") else None
            )
            data, form = chunk.image.data, chunk.image.format
            chunks.append(_image(data, form, expected, f"{where}: chunk {i}"))
        elif chunk.HasField("encoded_text"):
            tokens = _array(chunk.encoded_text.tokens, np.int32, where)
            chunks.append(types.EncodedTextChunk(tokens=tokens.tolist()))
        else:
            raise _unknown_chunk(where, chunk.WhichOneof("chunk"))
    return types.ModelInput(chunks=chunks)


def model_input(body: bodies.Prompt, where: str) -> types.ModelInput:
    """Returns a JSON prompt in the SDK's type; raises ``DataValidationError`` for chunks other
    than text and images."""
    chunks: list[types.ModelInputChunk] = []
    for i, chunk in enumerate(body.chunks):
        if chunk.type == "encoded_text":
            chunks.append(types.EncodedTextChunk(tokens=chunk.tokens))
        elif chunk.type == "image":
            place = f"{where}: chunk {i}"
            chunks.append(_image(chunk.data, chunk.format, chunk.expected_tokens, place))
        else:
            raise _unknown_chunk(where, chunk.type)
    return types.ModelInput(chunks=chunks)


def count_image_tokens(body: bodies.Prompt, where: str, reader: convert.MakeReader) -> None:
    """Sets ``expected_tokens`` of the images of a prompt; raises ``DataValidationError``."""
    for i, chunk in enumerate(body.chunks):
        if chunk.type == "image":
            # The reader keeps the image, so it is read once.
            found = reader().read(chunk.data, chunk.expected_tokens, f"{where}: chunk {i}")
            chunk.expected_tokens = len(found)


def _image(data: bytes, form: str, expected_tokens: int | None, where: str) -> types.ImageChunk:
    if form not in ("png", "jpeg"):
        raise DataValidationError(f"{where}: format: got {form!r}, expected 'png' or 'jpeg'")
    if not data:
        raise DataValidationError(f"{where}: data: got none, expected the bytes of an image")
    return types.ImageChunk(data=data, format=form, expected_tokens=expected_tokens)


def _unknown_chunk(where: str, kind: object) -> DataValidationError:
    # The SDK's messages for training have no pointers to images.
    return DataValidationError(
        f"{where}: has a chunk of type {kind!r}, expected text tokens (encoded_text) or an image"
    )


def tensor_of(body: bodies.Tensor, budget: SparseBudget) -> types.TensorData:
    """Returns the tensor of a JSON body; raises ``DataValidationError`` if it is invalid."""
    rows, columns, shape = body.sparse_crow_indices, body.sparse_col_indices, body.shape
    try:
        if rows is not None or columns is not None:
            # The shape in a protobuf message may be negative.
            shape = shape if shape and min(shape) >= 0 else []
            if rows is None or columns is None or len(shape) != 2:
                raise DataValidationError(
                    "sparse tensor: expected sparse_crow_indices, sparse_col_indices and a shape "
                    "of two dimensions, all three"
                )
            budget.take(shape)
            # Check the indices before they are used to create a dense tensor.
            steps = np.diff(np.asarray(rows, dtype=np.int64))
            column = np.asarray(columns, dtype=np.int64)
            count = len(body.data)
            ends = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == count == len(columns)
            if not ends or (steps < 0).any() or ((column < 0) | (column >= shape[1])).any():
                raise DataValidationError(
                    f"sparse tensor: sparse_crow_indices must rise from 0 to {count}, the number "
                    f"of elements, in {shape[0] + 1} steps, and sparse_col_indices must be {count} "
                    f"columns below {shape[1]}"
                )
            # torch requires rising columns within each row.
            place = np.repeat(np.arange(shape[0]), steps) * shape[1] + column
            if (np.diff(place) <= 0).any():
                raise DataValidationError(
                    "sparse tensor: sparse_col_indices must rise within each row"
                )
        data = np.asarray(body.data, dtype=np.int64 if body.dtype == "int64" else np.float32)
        return types.TensorData(**{**dict(body), "data": data})
    except OverflowError as error:
        raise DataValidationError(f"tensor: a number is beyond {body.dtype}: {error}") from error


class PassEncoder(Encoder):
    """Encoder of ``ForwardBackwardOutput``: log-probabilities of each datum, and metrics."""

    def json(self, result: types.ForwardBackwardOutput) -> Json:
        """Returns the JSON form, for SDKs before 0.25."""

        def tensor(value: types.TensorData) -> Json:
            shape = list(value.to_numpy().shape)
            return {"data": value.data, "dtype": value.dtype, "shape": shape}

        return {
            "loss_fn_output_type": _RECORD,
            "loss_fn_outputs": [
                {name: tensor(value) for name, value in record.items()}
                for record in result.loss_fn_outputs
            ],
            "metrics": result.metrics,
        }

    def proto(self, result: types.ForwardBackwardOutput) -> bytes:
        """Returns the message; batches consecutive datums that differ only in length."""
        message = pb.ForwardBackwardOutput(loss_fn_output_type=_RECORD, metrics=result.metrics)
        records = [
            {name: value.to_numpy() for name, value in record.items()}
            for record in result.loss_fn_outputs
        ]
        # A batch has one trailing shape: only the first dimension may differ.
        for _, group in groupby(records, lambda r: {name: a.shape[1:] for name, a in r.items()}):
            batch = list(group)
            out = message.loss_fn_outputs.add(type_tag=_RECORD, num_datums=len(batch))
            for name, first in batch[0].items():
                arrays = [record[name] for record in batch]
                ends = np.cumsum([0, *(array.size * 4 for array in arrays)])  # in bytes
                fields = out.fields[name]
                fields.data = _bytes(np.concatenate(arrays), np.float32)
                fields.offsets, fields.dtype = _bytes(ends, np.int64), pb.DTYPE_FLOAT32
                fields.trailing_shape.extend(first.shape[1:])
        return message.SerializeToString()


class SampleEncoder(Encoder):
    """Encoder of ``SampleResponse``."""

    def json(self, result: types.SampleResponse) -> Json:
        """Returns the JSON form, for SDKs before 0.18."""
        body: Json = {
            "type": "sample",
            "sequences": [
                {"stop_reason": one.stop_reason, "tokens": one.tokens, "logprobs": one.logprobs}
                for one in result.sequences
            ],
        }
        for name in ("prompt_logprobs", "topk_prompt_logprobs"):
            if (values := getattr(result, name)) is not None:
                body[name] = values
        return body

    def proto(self, result: types.SampleResponse) -> bytes:
        """Returns the message."""
        message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens or 0)
        for sequence in result.sequences:
            stopped = sequence.stop_reason == "stop"
            out = message.sequences.add(
                stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
                tokens=_bytes(sequence.tokens_np, np.int32),
            )
            if sequence.logprobs_np is not None:
                out.logprobs = _bytes(sequence.logprobs_np, np.float32)
            _fill_topk(out.topk_sampled_logprobs, sequence.topk_logprobs_np)
        if result.prompt_logprobs_np is not None:
            message.prompt_logprobs = _bytes(result.prompt_logprobs_np, np.float32)
        _fill_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs_np)
        if result.target_prompt_logprobs is not None:
            array = result.target_prompt_logprobs.to_numpy()
            target = message.target_prompt_logprobs
            target.dense, target.dtype = _bytes(array, np.float32), pb.DTYPE_FLOAT32
            target.shape.extend(array.shape)
        return message.SerializeToString()


def _fill_topk(message: pb.TopkLogprobs, topk: Any) -> None:
    if topk is not None:
        message.length, message.k = topk.token_ids.shape
        message.token_ids = _bytes(topk.token_ids, np.int32)
        message.logprobs = _bytes(topk.logprobs, np.float32)


def _bytes(array: Any, dtype: Any) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()
