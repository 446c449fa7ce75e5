"""Routes for samplers and samples, and for the results of all acknowledged requests."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import CancelledError, Future
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from tinker import types

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import OwnerDep, StateDep
from tinker_cookbook.server.bodies import Json, JsonRoute, json_body_schema, read_json
from tinker_cookbook.server.errors import NotFoundError
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.requests import PendingRequest, error_body
from tinker_cookbook.server.state import OpenSampler, ServerState
from tinker_cookbook.server.wire import SampleEncoder, prompt_tokens, tensor_of

# How long a response waits for the result; clients time out after 45.
LONG_POLL_SECONDS = 35.0

PROTOBUF = "application/x-protobuf"

router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=JsonRoute)


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(
    request_id: bodies.IdField, request: Request, owner: OwnerDep, state: StateDep
) -> Response:
    """Returns the result or the error of a request; 408 if it is not done."""
    pending = _pending(state, owner, request_id)
    if pending is None:
        raise NotFoundError(
            f"request {request_id!r}: not known here; its session ended, its result was "
            "fetched long ago, or the server restarted"
        )
    state.session(owner, pending.session_id)  # counts as a heartbeat
    if not pending.future.done():
        await _wait(pending, state)
    if not pending.future.done():
        later = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return JSONResponse(later, status_code=408)
    pending.fetched_at = time.monotonic()
    try:
        result = pending.future.result()
        binary = PROTOBUF in request.headers.get("accept", "")
        message = pending.encoder.proto(result) if binary else None
        if message is not None:
            return Response(message, media_type=PROTOBUF)
        # Not a JSONResponse: a loss may be NaN or Infinity. SDKs before 0.25 read these, and their
        # types accept neither null nor strings for numbers.
        text = json.dumps(pending.encoder.json(result), ensure_ascii=False, separators=(",", ":"))
        return Response(text, media_type="application/json")
    except (Exception, CancelledError) as error:
        return JSONResponse(error_body(error))


@router.post("/cancel_future")
async def cancel_future(body: Json, owner: OwnerDep, state: StateDep) -> Json:
    """Cancels requests."""
    ids = body.get("request_ids") or [body.get("request_id")]
    for request_id in ids if isinstance(ids, list) else []:
        if (pending := _pending(state, owner, str(request_id))) is not None:
            pending.cancel()
    return {}


def _pending(state: ServerState, owner: Owner, request_id: str) -> PendingRequest | None:
    """Returns a request of this owner."""
    pending = state.requests.get(request_id)
    sessions = {one.session_id for one in state.sessions(owner)}
    return pending if pending is not None and pending.session_id in sessions else None


async def _wait(pending: PendingRequest, state: ServerState) -> None:
    """Waits up to ``LONG_POLL_SECONDS`` for a request to end, or for the server to stop."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    pending.future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    deadline = loop.time() + LONG_POLL_SECONDS
    waits = [asyncio.ensure_future(event.wait()) for event in (done, state.stopping)]
    await asyncio.wait(waits, timeout=LONG_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    # The server is stopping and the engine works on this request: its client gets the result.
    if (work := pending.work) is not None and work.running():
        await asyncio.wait(waits[:1], timeout=deadline - loop.time())
    for wait in waits:
        wait.cancel()


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: bodies.CreateSampler, owner: OwnerDep, state: StateDep
) -> Json:
    """Creates a sampler of a base model or a checkpoint."""
    session = state.session(owner, body.session_id)
    sampler_id = session.sampler_id(body.sampling_session_seq_id)
    if sampler_id not in session.samplers:
        client = await asyncio.to_thread(
            _load_client, state, owner, body.model_path, body.base_model
        )
        session.samplers[sampler_id] = OpenSampler(
            sampler_id, client, client.get_base_model(), body.model_path
        )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.post("/asample", openapi_extra=json_body_schema(bodies.SampleBody))
async def asample(request: Request, owner: OwnerDep, state: StateDep) -> Json:
    """Submits a sampling request; 429 if too many samples are queued."""
    try:
        # From the bytes: three times as fast as parsing first and validating then.
        body = await read_json(request, bodies.SampleBody.model_validate_json)
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(problems) from error
    if body.sampling_session_id is None or body.seq_id is None:
        raise DataValidationError(
            "asample: got no sampling_session_id and seq_id; expected both, from "
            "create_sampling_session"
        )
    session, sampler = state.sampler(owner, body.sampling_session_id)
    request_id = f"{sampler.sampler_id}:{body.seq_id}"
    client = sampler.client
    if client is None:  # it was evicted
        load = _load_client, state, owner, sampler.model_path, sampler.base_model
        client = sampler.client = await asyncio.to_thread(*load)

    def sample() -> Future[Any]:
        target = body.target_prompt_logprobs
        return client.sample(
            types.ModelInput.from_ints(prompt_tokens(body.prompt, "prompt")),
            body.num_samples,
            types.SamplingParams(**body.sampling_params.model_dump()),
            include_prompt_logprobs=bool(body.prompt_logprobs),
            topk_prompt_logprobs=body.topk_prompt_logprobs,
            topk_sample_logprobs=body.topk_sample_logprobs,
            target_prompt_logprobs=None if target is None else tensor_of(target),
            prompt_alt_tokens_k=body.prompt_alt_tokens_k,
            prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        ).future()

    # Clients repeat a request whose acknowledgement was lost.
    if request_id not in state.requests:
        size = body.num_samples
        state.sample_quota.acquire(size)
        pending = PendingRequest(request_id, session.session_id, SampleEncoder())
        # Also released if the request fails or is cancelled.
        pending.future.add_done_callback(lambda _: state.sample_quota.release(size))
        state.requests[request_id] = pending
        pending.start(sample)
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)],
    }


def _load_client(
    state: ServerState, owner: Owner, model_path: str | None, base_model: str | None
) -> LocalSamplingClient:
    """Loads a checkpoint of this owner, or else a base model."""
    if model_path is not None:
        state.require_model_of(owner, model_path)
    elif base_model is not None:
        state.require_model(base_model)
    else:
        raise DataValidationError("sampler: got neither base_model nor model_path")
    return LocalSamplingClient.open(state.engine, owner.store, model_path, base_model)
