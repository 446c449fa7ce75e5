"""Routes for training, saving and sampling; results are fetched by a second request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from tinker import types

from tinker_cookbook.backends.futures import chain, done_future
from tinker_cookbook.backends.local_training import LocalTrainingClient
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.exceptions import BackendError, DataValidationError
from tinker_cookbook.server import bodies, wire
from tinker_cookbook.server.access import ApiUserDep, StateDep, is_same_machine, owner_of, state_of
from tinker_cookbook.server.bodies import Json, JsonRoute
from tinker_cookbook.server.errors import NotFoundError, SessionEndedError
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.metrics import TRAINING_TOKENS, count_operation
from tinker_cookbook.server.requests import (
    FIRST_SEQ_ID,
    Encode,
    OrderedDispatcher,
    PendingRequest,
    Usage,
    error_body,
)
from tinker_cookbook.server.state import Model, OpenSampler, ServerState, Session

# Seconds that a response waits for the result; clients time out after 45.
LONG_POLL_SECONDS = 35.0

PROTOBUF = "application/x-protobuf"

router = APIRouter(prefix="/api/v1", tags=["operations"], route_class=JsonRoute)


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(
    request_id: bodies.IdField, request: Request, owner: ApiUserDep, state: StateDep
) -> Response:
    """Returns the result or the error of a request; 408 if it is not done."""
    pending = state.request(owner, request_id)
    if pending is None:
        raise SessionEndedError(
            f"request {request_id!r}: unknown; its session ended, its result was "
            "fetched long ago, or the server restarted"
        )
    state.session(owner, pending.session_id)  # counts as a heartbeat
    if not pending.future.done():
        await _wait(pending, state)
    if not pending.future.done():
        # The SDK repeats the request at once after a 408 with this body.
        later = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return JSONResponse(later, status_code=408)
    request.state.usage = pending.usage
    # Keep the result for a limited time from now on, because this response may be lost.
    pending.fetched_at = time.monotonic()
    try:
        answer = pending.encode(pending.future.result())
        if isinstance(answer, bytes):
            return Response(answer, media_type=PROTOBUF)
        # Not a JSONResponse, because a metric may be NaN.
        return Response(json.dumps(answer), media_type="application/json")
    except (Exception, CancelledError) as error:
        # An operation's error is a result with status 200: the SDK would retry a status 5xx.
        return JSONResponse(error_body(error))


@router.post("/cancel_future")
async def cancel_future(body: Json, owner: ApiUserDep, state: StateDep) -> Json:
    """Cancels requests."""
    ids = body.get("request_ids") or [body.get("request_id")]
    for request_id in ids if isinstance(ids, list) else []:
        if (pending := state.request(owner, str(request_id))) is not None:
            pending.cancel()
    return {}


async def _wait(pending: PendingRequest, state: ServerState) -> None:
    """Waits up to ``LONG_POLL_SECONDS`` for a request to end, or for the server to stop."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    # The engine's thread ends the future, and an asyncio.Event is not thread-safe.
    pending.future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    deadline = loop.time() + LONG_POLL_SECONDS
    waits = [asyncio.ensure_future(event.wait()) for event in (done, state.stopping)]
    await asyncio.wait(waits, timeout=LONG_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    # While the server stops, the client still gets the result of a running request.
    if (work := pending.work) is not None and work.running():
        await asyncio.wait(waits[:1], timeout=deadline - loop.time())
    # Otherwise waiting tasks would remain as long as the server runs.
    for wait in waits:
        wait.cancel()


async def skip_refused(request: Request, error: Exception) -> Response:
    """Returns 422 for a malformed body, and skips the sequence id of a refused operation.

    Otherwise later operations would wait for it.
    """
    assert isinstance(error, RequestValidationError)
    # Without a valid key, model id and sequence id, there is nothing to skip.
    with contextlib.suppress(ValidationError, NotFoundError, HTTPException):
        operation = bodies.Operation.model_validate(error.body)
        # The model must belong to this owner, or an owner could skip another owner's operations.
        if operation.seq_id is not None:
            state, owner = await state_of(request), await owner_of(request)
            _, model = state.model(owner, operation.model_id)
            model.dispatcher.skip(operation.seq_id)
    return await request_validation_exception_handler(request, error)


@router.post("/create_model")
async def create_model(body: bodies.CreateModel, owner: ApiUserDep, state: StateDep) -> Json:
    """Creates a LoRA adapter on a base model."""
    session = state.session(owner, body.session_id)
    _require_adam(body.optimizer_config)
    # The model does not exist yet, so an error raised here leaves no gap in its sequence ids.
    state.require_model(body.base_model)
    lora = body.lora_config or bodies.Lora()
    flags = lora.train_attn, lora.train_mlp, lora.train_unembed, lora.train_vision
    spec = AdapterSpec(lora.rank, *flags)
    model_id = session.model_id(body.model_seq_id)
    metadata = _as_strings(body.user_metadata)

    def create() -> LocalTrainingClient:
        return session.service.start_run(model_id, body.base_model, spec, lora.seed, metadata)

    return _create(state, session, model_id, create, type="create_model")


@router.post("/load_weights")
async def load_weights(body: bodies.LoadWeights, owner: ApiUserDep, state: StateDep) -> Json:
    """Loads a checkpoint into a model, or creates a model from it."""

    # For an existing model, this runs within the operation, so that an error leaves no gap.
    def check() -> None:
        _require_adam(body.optimizer_config)
        if body.weights_access_token is not None:
            raise BackendError(
                "weights_access_token: this server does not support it; leave it out"
            )

    if body.model_id is not None:

        def load(client: LocalTrainingClient) -> Future[Any]:
            check()
            load_state = client.load_state_with_optimizer if body.optimizer else client.load_state
            return load_state(body.path).future()

        target = bodies.Operation(model_id=body.model_id, seq_id=body.seq_id)
        return _submit(state, owner, target, load, "load_weights", blocks=True)
    if body.session_id is None or body.model_seq_id is None:
        raise DataValidationError(
            "load_weights: got neither model_id nor session_id and model_seq_id; expected one"
        )
    check()
    session = state.session(owner, body.session_id)
    model_id = session.model_id(body.model_seq_id)

    def create() -> LocalTrainingClient:
        if body.base_model is None:
            state.require_model_of(owner, body.path)
        else:
            state.require_model(body.base_model)
        metadata = _as_strings(body.user_metadata)
        return session.service.continue_run(
            model_id, body.path, body.base_model, metadata, with_optimizer=body.optimizer
        )

    return _create(state, session, model_id, create, type="load_weights", path=body.path)


@router.post("/get_info")
async def get_info(
    model_id: bodies.IdField, request: Request, owner: ApiUserDep, state: StateDep
) -> Json:
    """Returns a model's name, rank and tokenizer."""
    _, model = state.model(owner, model_id)
    # The client sends this right after create_model, which may still run.
    pending = state.requests.get(f"{model_id}:create")
    if pending is not None:
        try:
            # Shielded, because a disconnecting client must not cancel the creation.
            await asyncio.shield(asyncio.wrap_future(pending.future))
        except asyncio.CancelledError:
            if not pending.future.cancelled():
                raise  # this request was cancelled
            raise BackendError(f"model {model_id}: its creation was cancelled") from None
    info = _client(model, state).get_info().model_dump(mode="json", exclude_none=True)
    if not is_same_machine(request):
        # A local folder is useless to a remote client and would reveal this machine's layout. With
        # the model's name the client finds its own copy of the tokenizer.
        info["model_data"]["tokenizer_id"] = info["model_name"]
    return info


@router.post("/forward_backward")
async def forward_backward(request: Request, owner: ApiUserDep, state: StateDep) -> Json:
    """Submits a forward pass, with or without backward, in protobuf (SDK 0.25 or newer)."""
    batch = await wire.receive_pass(request)
    # Count now, so that the callback does not keep the data in memory.
    tokens = sum(map(len, batch.data))

    def count(model: str, done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            TRAINING_TOKENS.labels(model, owner.name).inc(tokens)

    def run(client: LocalTrainingClient) -> Future[Any]:
        reader = partial(state.engine.image_reader, client.base_model)
        submitted = client.run_pass(
            partial(batch.examples, reader),
            batch.loss_fn,
            batch.loss_fn_config,
            backward=batch.backward,
        ).future()
        submitted.add_done_callback(partial(count, client.base_model))
        return submitted

    _, model = state.model(owner, batch.model_id)
    request.state.usage = Usage(model.base_model, tokens_in=tokens)
    name = "forward_backward" if batch.backward else "forward"
    return _submit(state, owner, batch, run, name, wire.pass_message)


@router.post("/optim_step")
async def optim_step(body: bodies.OptimStep, owner: ApiUserDep, state: StateDep) -> Json:
    """Submits a step of AdamW."""

    def step(client: LocalTrainingClient) -> Future[Any]:
        if body.adam_params is None:
            kind = (body.optimizer_params or {}).get("type")
            raise BackendError(
                f"optim_step: got {kind!r}, expected adam_params: the engine has AdamW"
            )
        # pydantic's error would not list the valid names.
        known = types.AdamParams.model_fields
        for name in sorted(set(body.adam_params) - set(known)):
            raise DataValidationError(
                f"adam_params: got {name!r}, expected some of {', '.join(known)}"
            )
        return client.optim_step(types.AdamParams(**body.adam_params)).future()

    return _submit(state, owner, body, step, "optim_step")


@router.post("/save_weights")
@router.post("/save_weights_external")
@router.post("/save_weights_for_sampler")
async def save(body: bodies.Save, request: Request, owner: ApiUserDep, state: StateDep) -> Json:
    """Saves a checkpoint: for training, for download, or for sampling.

    Without a path, the sampler route creates a sampler of the current weights.
    """
    # The three routes have the same body and differ only in the client method.
    kind = request.url.path.rpartition("/")[2]
    session, _ = state.model(owner, body.model_id)
    number = body.sampling_session_seq_id
    sampler_id = "" if number is None else session.sampler_id(number)

    def save_checkpoint(client: LocalTrainingClient) -> Future[Any]:
        if not body.path:
            raise DataValidationError("path: got none, expected the checkpoint's name")
        name, ttl, metadata = body.path, body.ttl_seconds, _as_strings(body.user_metadata)
        if kind == "save_weights":
            return client.save_state(name, ttl, body.overwrite, metadata).future()
        if kind == "save_weights_external":
            recipients = body.age_encryption_recipients
            return client.save_weights_external(name, ttl, recipients).future()
        return client.save_weights_for_sampler(name, ttl, metadata).future()

    def snapshot(client: LocalTrainingClient) -> Future[Any]:
        if number is None:
            raise DataValidationError(f"{kind}: got neither path nor sampling_session_seq_id")
        if body.kind not in ("snapshot", "inflight"):
            raise BackendError(f"kind: got {body.kind!r}, expected 'snapshot' or 'inflight'")
        weights = client.save_weights_and_get_sampling_client()
        inflight_of = body.model_id if body.kind == "inflight" else None
        for sampler in session.samplers.values():
            # In-flight samplers continue with the newer weights.
            if inflight_of is not None and sampler.inflight_of == inflight_of:
                sampler.client = weights
        base_model = weights.get_base_model()
        session.samplers[sampler_id] = OpenSampler(
            sampler_id, weights, base_model, is_snapshot=True, inflight_of=inflight_of
        )
        return done_future(None).future()

    if body.path is None and kind == "save_weights_for_sampler":
        encode = partial(_json, type=kind, sampling_session_id=sampler_id)
        return _submit(state, owner, body, snapshot, kind, encode)
    return _submit(state, owner, body, save_checkpoint, kind)


def _create(
    state: ServerState,
    session: Session,
    model_id: str,
    create: Callable[[], LocalTrainingClient],
    **fields: str,
) -> Json:
    """Queues the creation of a model before its operations; a repeated request has no effect.

    ``fields`` are in the result.
    """
    request_id = f"{model_id}:create"
    # If the acknowledgement was lost, the client repeats the request, and the model exists.
    if model_id not in session.models:
        model = session.models[model_id] = Model(model_id, OrderedDispatcher(model_id))
        encode = partial(_json, model_id=model_id, **fields)
        pending = _register(state, session, model, request_id, "create_model", encode)

        def begin() -> Future[Any]:
            model.client = create()
            model.base_model = model.client.base_model
            # The result must not be the client: a retained result would keep its weights in memory.
            created = model.client.future()
            return chain(created, lambda: created, lambda _: None)

        # ``blocks``, because the creation may read a checkpoint.
        model.dispatcher.add(FIRST_SEQ_ID - 1, lambda: pending.start(begin), blocks=True)
    return {"request_id": request_id, "model_id": model_id}


def _submit(
    state: ServerState,
    owner: ApiUser,
    body: bodies.Operation | wire.PassRequest,
    operation: Callable[[LocalTrainingClient], Future[Any]],
    name: str,
    encode: Encode | None = None,
    *,
    blocks: bool = False,
) -> Json:
    """Queues an operation in sequence order; a repeated request runs once.

    An error raised by ``operation`` becomes its result. Raised earlier, it would leave a gap in
    the sequence ids, for which the later operations would wait.
    """
    session, model = state.model(owner, body.model_id)
    if body.seq_id is None:
        raise DataValidationError("seq_id: got none, expected the number of the request")
    request_id = f"{body.model_id}:{body.seq_id}"
    # Clients repeat a request if its acknowledgement was lost.
    if request_id not in state.requests:
        encode = encode or partial(_json, type=name)
        pending = _register(state, session, model, request_id, name, encode)
        begin = partial(pending.start, lambda: operation(_client(model, state)))
        model.dispatcher.add(body.seq_id, begin, blocks=blocks)
    return {"request_id": request_id, "model_id": body.model_id}


def _json(result: Any, **fields: str) -> Json:
    """Returns the response for a result of the SDK's types, with constant ``fields``."""
    dumped = {} if result is None else result.model_dump(mode="json", exclude_none=True)
    return {**dumped, **fields}


def _register(
    state: ServerState,
    session: Session,
    model: Model,
    request_id: str,
    name: str,
    encode: Encode,
) -> PendingRequest:
    """Adds a request of a model; its end is counted."""
    pending = state.requests[request_id] = PendingRequest(request_id, session.session_id, encode)
    started, owner = time.monotonic(), session.owner.name

    def ended(done: Future[Any]) -> None:
        pending.usage.model = model.base_model
        count_operation(name, model.base_model or "", owner, started, done)

    pending.future.add_done_callback(ended)
    return pending


def _client(model: Model, state: ServerState) -> LocalTrainingClient:
    """Returns the client of a model; raises the error of its creation."""
    if model.client is None:
        pending = state.requests.get(f"{model.model_id}:create")
        if pending is not None:
            pending.future.result()
        raise BackendError(f"model {model.model_id}: could not be created")
    return model.client


def _require_adam(config: Json | None) -> None:
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise BackendError(f"optimizer_config: got {kind!r}, expected 'adamw'")


def _as_strings(metadata: Json | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
