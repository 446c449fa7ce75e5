"""Converts requests and results: protobuf messages, and prompts and tensors in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from fastapi import HTTPException, Request
from google.protobuf.message import DecodeError
from starlette.requests import ClientDisconnect
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tinker_cookbook.backends import convert
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.errors import BodyTooLargeError, drop_tracebacks

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
_RECORD = "ArrayRecord"


@dataclass
class SparseBudget:
    """Bytes that the sparse tensors of a request may still take as dense arrays.

    A small request can describe a large sparse tensor.
    """

    bytes_left: int

    def dense(
        self, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int]
    ) -> np.ndarray:
        """Returns a tensor in compressed sparse rows as a dense one; raises
        ``DataValidationError``."""
        if len(shape) != 2 or min(shape) < 0:
            raise DataValidationError(f"sparse tensor: got the shape {shape}, expected two numbers")
        # Python's integers, because NumPy's overflow. Both dtypes take at most eight bytes.
        self.bytes_left -= math.prod(shape) * 8
        if self.bytes_left < 0:
            raise DataValidationError(
                f"sparse tensor: got the shape {shape}; the dense form of all sparse tensors must "
                "not be larger than the largest request that this server accepts "
                "(max_request_mb=); send fewer datums per request"
            )
        steps, count = np.diff(rows), len(values)
        ends = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == count == len(columns)
        if not ends or (steps < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
            raise DataValidationError(
                f"sparse tensor: crow_indices must rise from 0 to {count}, the number of elements, "
                f"in {shape[0] + 1} steps, and col_indices must be {count} columns below {shape[1]}"
            )
        dense = np.zeros(shape, values.dtype)
        dense[np.repeat(np.arange(shape[0]), steps), columns] = values
        return dense


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
    seq_id: int
    loss_fn: str = ""
    loss_fn_config: dict[str, float | str] | None = None
    backward: bool = True
    data: list[Example | ImageExample] = field(default_factory=list)
    error: Exception | None = None
    """Error in the data, which are then empty. The request fails in its turn, so that the
    sequence ids have no gap."""

    def read_data(self, examples: Iterable[Example | ImageExample]) -> PassRequest:
        """Sets ``data``, or ``error`` at the first invalid datum; returns the request."""
        try:
            self.data = list(examples)
        except (ValueError, DataValidationError, MemoryError, RuntimeError) as error:
            self.error = drop_tracebacks(error)
        return self

    def examples(self, reader: convert.MakeReader) -> list[Example]:
        """Returns the engine's examples, with images of ``reader``; raises ``error`` or
        ``DataValidationError``."""
        if self.error is not None:
            raise self.error
        return [one.example(reader) if isinstance(one, ImageExample) else one for one in self.data]


async def receive_pass(request: Request) -> PassRequest:
    """Reads a pass. The error of a refused body becomes the result of the operation.

    Raises the error if the body does not begin with the operation's ids.
    """
    limit = request.app.state.max_request_bytes
    encoding = request.headers.get("content-encoding", "")
    head = bytearray()
    try:
        body = await bodies.read_body(request, limit, head)
        read = partial(read_pass, body, encoding, limit)
        # Decode compressed bodies in a thread, because they may unpack to much more data.
        small = len(body) <= bodies.SMALL_BYTES and not encoding
        return read() if small else await asyncio.to_thread(read)
    except (HTTPException, ClientDisconnect):
        raise  # the body did not arrive, so the client sends it again
    except Exception as error:
        # Otherwise the sequence ids would have a gap, and the next step would not fail.
        ids = _ids_of(bytes(head))
        if ids is None:
            raise
        return PassRequest(*ids, error=drop_tracebacks(error))


def read_pass(body: bytes, encoding: str, limit: int) -> PassRequest:
    """Decodes a ``ForwardBackwardRequest`` of at most ``limit`` bytes.

    Raises ``DataValidationError`` if the body is invalid.
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
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DataValidationError(
            f"body: {len(body)} bytes are not a ForwardBackwardRequest ({error}), which the SDK "
            "sends from version 0.25 on"
        ) from error
    # Newer SDKs send settings in a second field, for text and numbers.
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    batch = PassRequest(
        message.model_id, message.seq_id, message.loss_fn, config or None, not message.forward_only
    )
    budget = SparseBudget(limit)
    return batch.read_data(
        _example(one, f"datum {i}", budget) for i, one in enumerate(message.data)
    )


def _ids_of(head: bytes) -> tuple[str, int] | None:
    """Returns the model id and the sequence id, the first two fields of the message, or None."""
    # A prefix that cuts a field cannot be parsed.
    for end in range(len(head) + 1):
        message = pb.ForwardBackwardRequest()
        with contextlib.suppress(DecodeError):
            message.ParseFromString(head[:end])
            if message.model_id and message.seq_id:
                return message.model_id, message.seq_id
    return None


def _example(datum: pb.Datum, where: str, budget: SparseBudget) -> Example | ImageExample:
    place = f"{where}: model_input"
    inputs = {
        name: _tensor(tensor, f"{where}: {name}", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
        chunks = [_chunk(chunk, place) for chunk in datum.model_input]
        return ImageExample(model_input(chunks, place), inputs, place)
    # Use NumPy arrays, not the SDK's types: those need ten times the memory, and their checks,
    # written in Rust, abort the process if memory runs out.
    tokens = [_array(chunk.encoded_text.tokens, np.int32, place) for chunk in datum.model_input]
    return Example(np.concatenate([np.empty(0, np.int64), *tokens]), inputs)


def _tensor(message: pb.Tensor, where: str, budget: SparseBudget) -> np.ndarray:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise DataValidationError(f"{where}: dtype {message.dtype}, expected float32 or int64")
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        rows, columns = (
            _array(one, np.int64, where) for one in (csr.crow_indices, csr.col_indices)
        )
        return budget.dense(_array(csr.values, dtype, where), rows, columns, list(message.shape))
    data = _array(message.dense, dtype, where)
    shape = list(message.shape)
    if shape and np.prod(shape) != data.size:
        raise DataValidationError(f"{where}: {data.size} numbers do not have the shape {shape}")
    return data.reshape(shape or -1).copy()  # torch needs writable arrays


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataValidationError(
            f"{where}: {len(data)} bytes, expected a multiple of {np.dtype(dtype).itemsize}"
        )
    return np.frombuffer(data, dtype=dtype)


def _chunk(message: pb.Chunk, where: str) -> bodies.Chunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = _array(message.encoded_text.tokens, np.int32, where).tolist()
        return bodies.Chunk(type=kind, tokens=tokens)
    image = message.image
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return bodies.Chunk.model_construct(
        type=kind, data=image.data, format=image.format, expected_tokens=expected
    )


def model_input(chunks: Sequence[bodies.Chunk], where: str) -> types.ModelInput:
    """Returns a prompt in the SDK's type; raises ``DataValidationError`` for chunks other than
    text and images."""
    converted: list[types.ModelInputChunk] = []
    for i, chunk in enumerate(chunks):
        if chunk.type == "encoded_text":
            converted.append(types.EncodedTextChunk(tokens=chunk.tokens))
        elif chunk.type == "image" and chunk.data:
            form: Any = chunk.format
            image = types.ImageChunk(
                data=chunk.data, format=form, expected_tokens=chunk.expected_tokens
            )
            converted.append(image)
        else:
            # The SDK's messages for training have no pointers to images.
            raise DataValidationError(
                f"{where}: chunk {i} is of type {chunk.type!r}, expected text tokens "
                "(encoded_text) or an image with data"
            )
    return types.ModelInput(chunks=converted)


def count_image_tokens(chunks: Sequence[bodies.Chunk], reader: convert.MakeReader) -> None:
    """Sets ``expected_tokens`` of the images of a prompt; raises ``DataValidationError``."""
    for i, chunk in enumerate(chunks):
        if chunk.type == "image":
            # The reader keeps the image, so it is read once.
            found = reader().read(chunk.data, chunk.expected_tokens, f"prompt: chunk {i}")
            chunk.expected_tokens = len(found)


def tensor_of(body: bodies.Tensor, limit: int) -> types.TensorData:
    """Returns the tensor of a JSON body; raises ``DataValidationError`` if it is invalid.

    The dense form of a sparse tensor has at most ``limit`` bytes.
    """
    try:
        data = np.asarray(body.data, dtype=body.dtype)
        if body.sparse_crow_indices is None:
            return types.TensorData(data=data, dtype=body.dtype, shape=body.shape)
        indices = body.sparse_crow_indices, body.sparse_col_indices or []
        rows, columns = (np.asarray(one, dtype=np.int64) for one in indices)
        return types.TensorData.from_numpy(
            SparseBudget(limit).dense(data, rows, columns, body.shape or [])
        )
    except OverflowError as error:
        raise DataValidationError(f"tensor: a number is beyond {body.dtype}: {error}") from error


def pass_message(result: types.ForwardBackwardOutput) -> bytes:
    """Encodes the log-probabilities of each datum, and the metrics.

    Consecutive datums that differ only in length are one batch.
    """
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


def sample_message(result: types.SampleResponse) -> bytes:
    """Encodes samples and the log-probabilities of the prompt."""
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
