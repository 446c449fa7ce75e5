"""Request bodies of the protocol: their fields, and functions that read them within limits.

Unknown fields are ignored, because newer SDKs send more. Parsing JSON holds the GIL, even in a
thread, and its time depends on the number of lists and objects rather than on the bytes. So
that number is limited too in large bodies, and counted before the body is parsed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import torch
from fastapi import Body as BodyField
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server.errors import body_too_large

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]

# Bodies up to this size are parsed on the event loop: a thread would take longer.
SMALL_BYTES = 1 << 16
# Maximum size of a body without tokens: ids, names, settings, metadata.
MAX_CONTROL_BYTES = 1 << 20
# Maximum number of lists and objects in a body with tokens.
MAX_CONTAINERS = 200_000
# Bytes at the start of a pass that contain its model and sequence id.
HEAD_BYTES = 1024
# Peak memory of a request as a multiple of its body's size: pieces, body, message, arrays.
_MEMORY_FACTOR = 6

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REF = "#/components/schemas/{model}"

Id = Annotated[str, Field(min_length=1, max_length=300)]
# For bodies with one field.
IdField = Annotated[str, BodyField(embed=True, min_length=1, max_length=300)]
# A copy of a sampling client in another process starts counting at a random multiple of 10^9.
Number = Annotated[int, Field(ge=0, lt=2**63)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Token ids of a request. From 2**62 on, the engine has the ids of images, of all clients.
Token = Annotated[int, Field(ge=-(2**63), lt=2**62)]
Metadata = Json | None


class Body(BaseModel):
    """Base class of all bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(Body):
    """Start of a session."""

    user_metadata: Metadata = None
    project_id: str | None = None
    display_name: str | None = None


class Lora(Body):
    """LoRA configuration."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    train_vision: bool = False  # not sent by the SDK


class CreateModel(Body):
    """New model."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: Json | None = None


class LoadWeights(Body):
    """Checkpoint to load, into an existing model or a new one."""

    path: Id
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Id | None = None
    user_metadata: Metadata = None
    optimizer_config: Json | None = None
    weights_access_token: str | None = None


class Operation(Body):
    """Model id and sequence id, common to all operations of a model."""

    model_id: Id
    seq_id: Number | None = None


class OptimStep(Operation):
    """Optimizer step."""

    adam_params: Json | None = None
    optimizer_params: Json | None = None


class Save(Operation):
    """Checkpoint to save: for training, for sampling or for download.

    Without a path, creates a sampler of the current weights. Other fields have an effect if the
    SDK's method has that argument.
    """

    path: str | None = None
    ttl_seconds: Int64 | None = None
    user_metadata: Metadata = None
    overwrite: bool = False
    age_encryption_recipients: list[str] | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"


class CreateSampler(Body):
    """New sampler of a base model or a checkpoint."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: Id | None = None


class Tensor(Body):
    """Tensor, dense or in compressed sparse rows."""

    data: list[float]
    dtype: Literal["float32", "int64"] = "float32"
    shape: list[Annotated[int, Field(ge=0)]] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Chunk(Body):
    """Chunk of a prompt: tokens of text, an image, or the address of an image."""

    model_config = ConfigDict(val_json_bytes="base64")

    type: str = "encoded_text"
    tokens: list[Token] = []
    data: bytes = b""
    format: Literal["png", "jpeg"] = "png"
    location: str = ""
    expected_tokens: Number | None = None


class Prompt(Body):
    """Prompt as chunks of token ids and images."""

    chunks: list[Chunk]


class Sampling(Body):
    """Sampling parameters."""

    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    stop: str | list[str] | list[Int64] | None = None
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0


class SampleBody(Body):
    """Sampling request."""

    prompt: Prompt
    sampling_params: Sampling
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=0)] | None = None


class JsonRoute(APIRoute):
    """Route with a small JSON body, read here within limits and parsed by FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns a handler that reads the body and then calls FastAPI's handler."""
        handler = super().get_route_handler()
        if self.body_field is None:  # the route has no body, or reads it itself
            return handler

        async def handle(request: Request) -> Response:
            # Ids, names and settings are small; only bodies with tokens need the larger limit.
            limit = min(MAX_CONTROL_BYTES, request.app.state.max_request_bytes)
            # Starlette's caches, which FastAPI reads.
            request._body = await read_body(request, limit)
            try:
                # Limits the depth, and refuses halves of characters, which could be stored but not
                # sent.
                request._json = from_json(request._body or b"null")
            except ValueError as error:
                problem = {"type": "json_invalid", "loc": ("body",), "msg": f"JSON: {error}"}
                raise RequestValidationError([problem]) from error
            return await handler(request)

        return handle


async def read_json(request: Request, parse: Callable[[bytes], T]) -> T:
    """Reads a JSON body with tokens; a large one is parsed in a thread.

    Raises ``DataValidationError`` if the body has too many lists and objects.
    """
    body = await read_body(request, request.app.state.max_request_bytes)
    # A small body has fewer bytes than the limit of lists and objects, so no count is needed.
    if len(body) <= SMALL_BYTES:
        return parse(body)

    def work() -> T:
        # Excluding brackets in strings is slower, so only where they would exceed the limit.
        if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
            bare = _STRING.sub(b"", body)
            if (count := bare.count(b"[") + bare.count(b"{")) > MAX_CONTAINERS:
                raise DataValidationError(
                    f"body: got {count} lists and objects, expected at most {MAX_CONTAINERS}"
                )
        return parse(body)

    return await asyncio.to_thread(work)


async def read_body(request: Request, limit: int, head: bytearray | None = None) -> bytes:
    """Reads the body of a request in pieces.

    ``head`` receives the first bytes, also of a body that is refused.

    Raises:
        BodyTooLargeError: The body is larger than ``limit``; the rest is not read.
        MemoryError: The body does not fit into memory. It is still read to its end, because
            clients that get an early response would send it again and again.
    """
    # Twenty digits are enough for any size; Python refuses to parse very long numbers.
    header = request.headers.get("content-length", "")[:20]
    declared = int(header) if header.isdecimal() else 0
    # With a declared size, a client gets the error before it has sent the body.
    if declared > limit and head is None:
        raise body_too_large(limit)
    pieces, size, shortage = [], 0, ""
    # Before the body takes the memory that other requests need.
    if declared > MAX_CONTROL_BYTES:
        needed, free = _MEMORY_FACTOR * declared, free_memory_bytes(torch.device("cpu"))
        if needed > free:
            shortage = f"reading it takes up to {needed >> 20} MiB, and {free >> 20} are free"
    async for piece in request.stream():
        size += len(piece)
        if head is not None:
            head += piece[: HEAD_BYTES - len(head)]
            if declared > limit and len(head) == HEAD_BYTES:
                raise body_too_large(limit)
        if size > limit:
            raise body_too_large(limit)
        if not shortage:
            pieces.append(piece)
    if shortage:
        raise MemoryError(shortage)
    return b"".join(pieces)


def json_body_schema(model: type[BaseModel]) -> Json:
    """Returns ``openapi_extra`` for a route that parses ``model`` itself; see ``add_schemas``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Adds the models of :func:`json_body_schema` to the app's OpenAPI document."""
    # FastAPI documents only the bodies that it parses itself, and keeps the document.
    _, found = models_json_schema([(one, "validation") for one in models], ref_template=_REF)
    app.openapi()["components"]["schemas"].update(found["$defs"])
