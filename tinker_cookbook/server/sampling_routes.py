"""Samplers, and samples from them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from tinker import types

from tinker_cookbook.backends.local_sampling import LocalSamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import TheHost, TheOwner
from tinker_cookbook.server.decode import prompt_of, tensor_of
from tinker_cookbook.server.encode import SampleEncoder
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.openapi_bodies import reads
from tinker_cookbook.server.pending import Pending
from tinker_cookbook.server.read_body import JsonRoute, read_model
from tinker_cookbook.server.sessions import OpenSampler
from tinker_cookbook.server.state import ServerState

router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=JsonRoute)


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: bodies.CreateSampler, owner: TheOwner, host: TheHost
) -> dict[str, Any]:
    """A sampler of a base model or of a checkpoint."""
    session = host.session(owner, body.session_id)
    sampler_id = session.sampler_id(body.sampling_session_seq_id)
    if sampler_id not in session.samplers:
        session.samplers[sampler_id] = await asyncio.to_thread(
            open_sampler, host, owner, sampler_id, body.model_path, body.base_model
        )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.post("/asample", openapi_extra=reads(bodies.SampleBody))
async def asample(request: Request, owner: TheOwner, host: TheHost) -> dict[str, Any]:
    """Samples of a prompt; 429 while too many wait."""
    body = await read_model(request, bodies.SampleBody)
    if body.sampling_session_id is None or body.seq_id is None:
        raise DataValidationError(
            "asample: got no sampling_session_id and seq_id; expected both, from "
            "create_sampling_session"
        )
    session, sampler = host.sampler(owner, body.sampling_session_id)
    request_id = f"{sampler.sampler_id}:{body.seq_id}"
    client = await client_of(host, owner, sampler)
    if host.board.get(request_id) is None:
        size = body.num_samples
        host.waiting.begin(size)
        pending = Pending(request_id, session.session_id, SampleEncoder())
        pending.future.add_done_callback(lambda _: host.waiting.end(size))
        host.board.add(pending)
        pending.follow(lambda: sample(client, body).future())
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)],
    }


async def client_of(host: ServerState, owner: Owner, sampler: OpenSampler) -> LocalSamplingClient:
    """The client of a sampler, opened again where it was put away."""
    if sampler.client is None:
        base = None if sampler.model_path else sampler.base_model
        again = await asyncio.to_thread(
            open_sampler, host, owner, sampler.sampler_id, sampler.model_path, base
        )
        sampler.client = again.client
    assert sampler.client is not None
    return sampler.client


def open_sampler(
    host: ServerState, owner: Owner, sampler_id: str, model_path: str | None, base_model: str | None
) -> OpenSampler:
    """Reads a checkpoint of this owner, or takes a plain base model."""
    if model_path is None:
        if base_model is None:
            raise DataValidationError("sampler: got neither base_model nor model_path")
        host.require_model(base_model)
        client = LocalSamplingClient.open(host.engine, owner.store, None, base_model)
    else:
        host.require_model_of(owner, model_path)
        client = LocalSamplingClient.open(host.engine, owner.store, model_path, None)
    return OpenSampler(sampler_id, client, client.get_base_model(), model_path)


def sample(client: LocalSamplingClient, body: bodies.SampleBody) -> Any:
    """Hands a request to the engine; returns the future."""
    ask = partial(
        client.sample,
        prompt_of(body.prompt, "prompt"),
        body.num_samples,
        types.SamplingParams(**body.sampling_params.model_dump()),
    )
    target = body.target_prompt_logprobs
    return ask(
        include_prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_prompt_logprobs=None if target is None else tensor_of(target),
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
    )
