"""Routes for sampling; results are fetched by ``retrieve_future``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from tinker import types

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies, wire
from tinker_cookbook.server.access import ApiUserDep, StateDep
from tinker_cookbook.server.bodies import Json, JsonRoute, json_body_schema
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.requests import PendingRequest, Usage
from tinker_cookbook.server.state import OpenSampler, ServerState

router = APIRouter(prefix="/api/v1", tags=["operations"], route_class=JsonRoute)


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: bodies.CreateSampler, owner: ApiUserDep, state: StateDep
) -> Json:
    """Creates a sampler of a base model or a checkpoint."""
    session = state.session(owner, body.session_id)
    sampler_id = session.sampler_id(body.sampling_session_seq_id)
    # The id is derived from the client's number, so a repeated request finds the same sampler.
    if sampler_id not in session.samplers:
        # In a thread, because reading weights must not block the event loop.
        client = await asyncio.to_thread(
            _load_client, state, owner, body.model_path, body.base_model
        )
        session.samplers[sampler_id] = OpenSampler(
            sampler_id, client, client.get_base_model(), body.model_path
        )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.post("/asample", openapi_extra=json_body_schema(bodies.SampleBody))
async def asample(request: Request, owner: ApiUserDep, state: StateDep) -> Json:
    """Submits a sampling request; 429 if too many samples are queued."""
    try:
        # Validate the bytes directly, which is three times as fast as parsing first.
        body = await bodies.read_json(request, bodies.SampleBody.model_validate_json)
    except ValidationError as error:
        # For bodies that it parses itself, FastAPI prefixes locations with "body".
        # Without the input, which may be an image of many megabytes.
        found = error.errors(include_input=False)
        problems = [{**one, "loc": ("body", *one["loc"])} for one in found]
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

    images = [one for one in body.prompt.chunks if one.type != "encoded_text"]
    await _read_pointers(images, request, state)

    def sample() -> Future[Any]:
        target, limit = body.target_prompt_logprobs, request.app.state.max_request_bytes
        if images:
            reader = partial(state.engine.image_reader, sampler.base_model)
            wire.count_image_tokens(body.prompt.chunks, reader)
        return client.sample(
            wire.model_input(body.prompt.chunks, "prompt"),
            body.num_samples,
            types.SamplingParams(**body.sampling_params.model_dump()),
            include_prompt_logprobs=bool(body.prompt_logprobs),
            topk_prompt_logprobs=body.topk_prompt_logprobs,
            topk_sample_logprobs=body.topk_sample_logprobs,
            target_prompt_logprobs=target and wire.tensor_of(target, limit),
            prompt_alt_tokens_k=body.prompt_alt_tokens_k,
            prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        ).future()

    # Clients repeat a request if its acknowledgement was lost.
    if request_id not in state.requests:
        # Acquire before registering the request: a refused request is repeated and must run then.
        state.acquire_samples(owner.name, body.num_samples)
        pending = PendingRequest(request_id, session.session_id, wire.sample_message)
        pending.usage.model = sampler.base_model
        state.requests[request_id] = pending

        def ended(done: Future[Any]) -> None:
            # Release also if the request fails or is cancelled.
            state.release_samples(owner.name, body.num_samples)
            if not done.cancelled() and done.exception() is None:
                sampled = (len(one.tokens_np) for one in done.result().sequences)
                pending.usage.tokens_out = sum(sampled)

        pending.future.add_done_callback(ended)
        if images:
            # In a thread and few at once, because reading an image takes time and memory.
            async with state.image_slots:
                await asyncio.to_thread(pending.start, sample)
        else:
            pending.start(sample)
    request.state.usage = Usage(
        sampler.base_model,
        tokens_in=sum(len(one.tokens) + (one.expected_tokens or 0) for one in body.prompt.chunks),
    )
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)],
    }


async def _read_pointers(
    chunks: Sequence[bodies.Chunk], request: Request, state: ServerState
) -> None:
    """Replaces pointers to images by the images."""
    budget = request.app.state.max_request_bytes
    for i, chunk in enumerate(chunks):
        if chunk.type == "image_asset_pointer":
            where = f"prompt: image {i}: location"
            chunk.data = await state.images.read(chunk.location, where, budget)
            chunk.type, budget = "image", budget - len(chunk.data)


def _load_client(
    state: ServerState, owner: ApiUser, model_path: str | None, base_model: str | None
) -> LocalSamplingClient:
    """Loads a checkpoint of this owner, or else a base model."""
    if model_path is not None:
        # Check before the engine loads it, because the base model may not be served.
        state.require_model_of(owner, model_path)
    elif base_model is not None:
        state.require_model(base_model)
    else:
        raise DataValidationError("sampler: got neither base_model nor model_path")
    return LocalSamplingClient.open(state.engine, owner.store, model_path, base_model)
