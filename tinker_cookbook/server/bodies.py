"""Request bodies of the protocol: their fields, and how routes read them within limits.

Unknown fields are ignored: newer SDKs send more. Parsing JSON holds Python's global lock, in a
thread too, and its time depends on the number of lists and objects rather than on the bytes. So
that number is bounded as well, and counted before the body is parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinker_cookbook.engine.devices import free_memory_bytes
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server.errors import BodyMemoryError, BodyTooLargeError, body_too_large

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

# Bodies up to this size are parsed on the event loop: a thread would take longer.
SMALL_BYTES = 1 << 16
# Largest body without tokens: ids, names, settings, metadata.
MAX_CONTROL_BYTES = 1 << 20
# Most lists and objects in a body without and with tokens. A datum has about ten.
MAX_CONTROL_CONTAINERS = 20_000
MAX_DATA_CONTAINERS = 200_000
# Deepest nesting of lists and objects in bodies that are stored and returned.
MAX_DEPTH = 100
# Peak memory of a request by its body's size: the pieces, the body, a message, arrays.
_MEMORY_FACTOR = 6
# Bytes that are kept of a body that does not fit into memory.
_HEAD_BYTES = 1024

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REF = "#/components/schemas/{model}"

Id = Annotated[str, Field(min_length=1, max_length=300)]
# The copy of a sampling client in another process counts from a random multiple of 10^9.
Number = Annotated[int, Field(ge=0, lt=2**63)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Metadata = dict[str, Any] | None


class Body(BaseModel):
    """Base class of all bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(Body):
    """Start of a session."""

    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionId(Body):
    """Session id."""

    session_id: Id


class FinishSession(Body):
    """Reason why a session ends."""

    reason: dict[str, Any] | None = None
    detail: str | None = None


class Lora(Body):
    """LoRA configuration."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """New model."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] | None = None


class ModelId(Body):
    """Model id."""

    model_id: Id


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
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class Operation(Body):
    """Model id and sequence id, which all operations of a model have."""

    model_id: Id
    seq_id: Number | None = None


class OptimStep(Operation):
    """Optimizer step."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveExternal(Operation):
    """Adapter to save for download."""

    path: str | None = None
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: list[str] | None = None


class SaveWeights(Operation):
    """Training checkpoint to save."""

    path: str | None = None
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SaveForSampler(Operation):
    """Checkpoint to save for sampling, or a sampler of the current weights."""

    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: Int64 | None = None
    user_metadata: Metadata = None


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
    """Chunk of a prompt; only text is supported."""

    type: str = "encoded_text"
    tokens: list[Int64] = []


class Prompt(Body):
    """Prompt as chunks of token ids."""

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
    base_model: Id | None = None
    model_path: Id | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=0)] | None = None
    record_stability_info: bool = False


class RequestId(Body):
    """Request id."""

    request_id: Id


class JsonDatum(Body):
    """Training datum."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Tensor]


class PassInput(Body):
    """Input of a forward pass."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonPass(Operation):
    """Forward pass in JSON, which SDKs before 0.25 send."""

    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None


class WeightsPath(Body):
    """Path of a checkpoint."""

    tinker_path: Id


class Ttl(Body):
    """Time to live of a checkpoint; None keeps it until it is deleted."""

    ttl_seconds: Int64 | None = None


class JsonRoute(APIRoute):
    """Route with a small JSON body, which FastAPI parses on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler over a request with a bounded body."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    """Request with a bounded body. FastAPI passes on only errors that are ``HTTPException``."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = min(MAX_CONTROL_BYTES, self.app.state.max_request_bytes)
            try:
                self._body = await read_body(self, limit)
            except BodyTooLargeError:
                raise HTTPException(
                    413, f"body: got more than {limit >> 10} KiB, the most for this address"
                ) from None
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                check_containers(body, MAX_CONTROL_CONTAINERS)
                self._json = json.loads(body)
                _check_depth(self._json)
            except json.JSONDecodeError:  # FastAPI has a message for these
                raise
            except RecursionError:
                raise HTTPException(
                    400, f"body: lists and objects are nested more than {MAX_DEPTH} deep"
                ) from None
            except (DataValidationError, UnicodeDecodeError) as error:
                raise HTTPException(400, f"body: {error}".replace("body: body:", "body:")) from None
        return self._json


def _check_depth(value: Any) -> None:
    """Raises ``RecursionError`` above ``MAX_DEPTH``."""
    # Level by level: recursion would itself overflow the stack.
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [item for c in containers for item in (c.values() if isinstance(c, dict) else c)]


async def read_model(request: Request, model: type[M]) -> M:
    """Reads a body with tokens as ``model``; raises ``RequestValidationError`` (422)."""
    body = await read_body(request, request.app.state.max_request_bytes)
    try:
        # From the bytes: three times as fast as parsing first and validating then.
        return await parse_json(body, lambda: model.model_validate_json(body))
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(problems) from error


async def parse_json(body: bytes, parse: Callable[[], T]) -> T:
    """Returns ``parse()`` of a JSON body with tokens; a large one is parsed in a thread.

    Raises ``DataValidationError`` if the body has too many lists and objects.
    """
    if len(body) <= SMALL_BYTES:
        return parse()

    def work() -> T:
        check_containers(body, MAX_DATA_CONTAINERS)
        return parse()

    return await asyncio.to_thread(work)


def check_containers(body: bytes, most: int) -> None:
    """Raises ``DataValidationError`` for JSON of more than ``most`` lists and objects."""
    if len(body) <= most:
        return
    count = body.count(b"[") + body.count(b"{")
    if count > most:  # only then without the brackets in strings, which takes longer
        bare = _STRING.sub(b"", body)
        count = bare.count(b"[") + bare.count(b"{")
    if count > most:
        raise DataValidationError(
            f"body: got {count} lists and objects, expected at most {most} in one request"
        )


async def read_body(request: Request, limit: int) -> bytes:
    """Reads the body of a request in pieces.

    Args:
        request: The request.
        limit: Largest size in bytes.

    Raises:
        BodyTooLargeError: The body is larger than ``limit``; the rest is not read.
        BodyMemoryError: The body does not fit into memory. It is read to its end nevertheless:
            clients that get a response before would send it again and again.
    """
    declared = request.headers.get("content-length", "")
    pieces, size = [], int(declared) if declared.isdecimal() else 0
    # Allocated in one piece and checked first, before other requests run out of memory.
    shortage = _memory_shortage(_MEMORY_FACTOR * size) if MAX_CONTROL_BYTES < size <= limit else ""
    if size <= limit:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                break
            if not shortage or not pieces:
                pieces.append(piece)
    if size > limit:
        raise body_too_large(limit)
    # The first bytes of a pass name its model and sequence id.
    if shortage:
        raise BodyMemoryError(shortage, bytes(pieces[0][:_HEAD_BYTES]))
    return b"".join(pieces)


def _memory_shortage(size: int) -> str:
    """Returns why ``size`` bytes are not available; empty if they are."""
    needed = f"reading the request takes up to {size >> 20} MiB"
    free = free_memory_bytes(torch.device("cpu"))
    if size > free:
        return f"{needed}, and {free >> 20} are free"
    try:
        np.empty(size, dtype=np.uint8)  # only the allocator knows the limits of the process
    except MemoryError:
        return f"{needed}, more than this process may allocate"
    return ""


def json_body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns ``openapi_extra`` for a route that reads ``model`` itself; see ``add_schemas``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Adds the models that :func:`json_body_schema` refers to to the app's OpenAPI document."""
    original = app.openapi

    # FastAPI documents only the bodies that it parses itself.
    def openapi() -> dict[str, Any]:
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in models:
            schema = model.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        return document

    app.openapi = openapi
