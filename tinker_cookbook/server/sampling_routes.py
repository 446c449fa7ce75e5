"""Routes for samplers and samples, and for the results of all acknowledged requests."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import CancelledError, Future
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tinker import types

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import OwnerDep, StateDep
from tinker_cookbook.server.bodies import JsonRoute, json_body_schema, read_model
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
    body: bodies.RequestId, request: Request, owner: OwnerDep, state: StateDep
) -> Response:
    """Returns the result or the error of a request; 408 if it is not done."""
    pending = state.requests.get(body.request_id)
    if pending is None or not _is_owner(state, owner, pending):
        raise NotFoundError(
            f"request {body.request_id!r}: not known here; its session ended, its result was "
            "fetched long ago, or the server restarted"
        )
    state.session(owner, pending.session_id)  # counts as a heartbeat
    if not await _wait(pending, state):
        later = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(later, status_code=408)
    pending.fetched_at = time.monotonic()
    try:
        result = pending.future.result()
        binary = PROTOBUF in request.headers.get("accept", "")
        message = pending.encoder.proto(result) if binary else None
        if message is not None:
            return Response(message, media_type=PROTOBUF)
        return _PythonJSONResponse(pending.encoder.json(result))
    except (Exception, CancelledError) as error:
        return JSONResponse(error_body(error))


@router.post("/cancel_future")
async def cancel_future(body: dict[str, Any], owner: OwnerDep, state: StateDep) -> dict[str, Any]:
    """Cancels requests."""
    ids = body.get("request_ids") or [body.get("request_id")]
    for request_id in ids if isinstance(ids, list) else []:
        pending = state.requests.get(str(request_id))
        if pending is not None and _is_owner(state, owner, pending):
            pending.cancel()
    return {}


async def _wait(pending: PendingRequest, state: ServerState) -> bool:
    """Waits for a request up to ``LONG_POLL_SECONDS``; returns whether it is done.

    When the server stops, only the running operation is waited for.
    """
    if pending.future.done():
        return True
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    pending.future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    deadline = loop.time() + LONG_POLL_SECONDS
    waits = [asyncio.ensure_future(event.wait()) for event in (done, state.stopping)]
    await asyncio.wait(waits, timeout=LONG_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    # The server is stopping and the operation runs: its client gets the result.
    if pending.is_running():
        await asyncio.wait(waits[:1], timeout=deadline - loop.time())
    for wait in waits:
        wait.cancel()
    return pending.future.done()


def _is_owner(state: ServerState, owner: Owner, pending: PendingRequest) -> bool:
    return any(one.session_id == pending.session_id for one in state.sessions(owner))


class _PythonJSONResponse(JSONResponse):
    """JSON response in which a loss may be ``NaN`` or ``Infinity``, as Python's parser reads them.

    SDKs before 0.25 use that parser, and their types accept neither null nor strings for numbers.
    """

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: bodies.CreateSampler, owner: OwnerDep, state: StateDep
) -> dict[str, Any]:
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
async def asample(request: Request, owner: OwnerDep, state: StateDep) -> dict[str, Any]:
    """Submits a sampling request; 429 if too many samples are queued."""
    body = await read_model(request, bodies.SampleBody)
    if body.sampling_session_id is None or body.seq_id is None:
        raise DataValidationError(
            "asample: got no sampling_session_id and seq_id; expected both, from "
            "create_sampling_session"
        )
    session, sampler = state.sampler(owner, body.sampling_session_id)
    request_id = f"{sampler.sampler_id}:{body.seq_id}"
    client = sampler.client
    if client is None:  # it was evicted
        base = None if sampler.model_path else sampler.base_model
        client = await asyncio.to_thread(_load_client, state, owner, sampler.model_path, base)
        sampler.client = client
    if state.requests.get(request_id) is None:
        size = body.num_samples
        state.sample_quota.acquire(size)
        pending = PendingRequest(request_id, session.session_id, SampleEncoder())
        # Also released if the request fails or is cancelled.
        pending.future.add_done_callback(lambda _: state.sample_quota.release(size))
        state.requests.add(pending)
        pending.start(lambda: _sample(client, body))
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)],
    }


def _load_client(
    state: ServerState, owner: Owner, model_path: str | None, base_model: str | None
) -> LocalSamplingClient:
    """Loads a checkpoint of this owner, or a base model."""
    if model_path is not None:
        state.require_model_of(owner, model_path)
        base_model = None
    elif base_model is not None:
        state.require_model(base_model)
    else:
        raise DataValidationError("sampler: got neither base_model nor model_path")
    return LocalSamplingClient.open(state.engine, owner.store, model_path, base_model)


def _sample(client: LocalSamplingClient, body: bodies.SampleBody) -> Future[Any]:
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
