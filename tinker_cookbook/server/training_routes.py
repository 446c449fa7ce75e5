"""Models: creating, training, saving and loading them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from tinker import types

from tinker_cookbook.backends.futures import LocalFuture
from tinker_cookbook.backends.local_training import LocalTrainingClient
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.exceptions import BackendError, DataValidationError
from tinker_cookbook.server import bodies
from tinker_cookbook.server.access import TheHost, TheOwner, is_same_machine
from tinker_cookbook.server.decode import Pass, read_pass, unread_pass
from tinker_cookbook.server.encode import PassEncoder
from tinker_cookbook.server.errors import NoRoom
from tinker_cookbook.server.openapi_bodies import reads
from tinker_cookbook.server.ordered_dispatch import FIRST, OrderedDispatcher
from tinker_cookbook.server.ordered_route import TurnRoute
from tinker_cookbook.server.pending import AsJson, Encoder, Pending
from tinker_cookbook.server.read_body import SMALL_BYTES, body_of
from tinker_cookbook.server.sessions import Model, OpenSampler, Session
from tinker_cookbook.server.state import ServerState

router = APIRouter(prefix="/api/v1", tags=["training"], route_class=TurnRoute)

Ack = dict[str, Any]
Begin = Callable[[LocalTrainingClient], Future[Any]]


@router.post("/create_model")
async def create_model(body: bodies.CreateModel, owner: TheOwner, host: TheHost) -> Ack:
    """A new adapter on a base model."""
    session = host.session(owner, body.session_id)
    _require_adam(body.optimizer_config)
    host.require_model(body.base_model)
    lora = body.lora_config or bodies.Lora()
    spec = AdapterSpec(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
    model_id = session.model_id(body.model_seq_id)

    def create() -> LocalTrainingClient:
        return session.service.start_run(
            model_id, body.base_model, spec, lora.seed, _texts(body.user_metadata)
        )

    return _create(host, session, model_id, create, AsJson(type="create_model", model_id=model_id))


@router.post("/load_weights")
async def load_weights(body: bodies.LoadWeights, owner: TheOwner, host: TheHost) -> Ack:
    """Weights of a checkpoint into a model, or a new model that begins with them."""
    if body.model_id is not None:
        return _operate(
            host,
            owner,
            body.model_id,
            body.seq_id,
            lambda client: _load(client, body).future(),
            AsJson(type="load_weights"),
            blocks=True,
        )
    if body.session_id is None or body.model_seq_id is None:
        raise DataValidationError(
            "load_weights: got neither model_id nor session_id and model_seq_id; expected one"
        )
    session = host.session(owner, body.session_id)
    model_id = session.model_id(body.model_seq_id)
    _require_plain(body)

    def create() -> LocalTrainingClient:
        if body.base_model is None:
            host.require_model_of(owner, body.path)
        else:
            host.require_model(body.base_model)
        return session.service.continue_run(
            model_id,
            body.path,
            body.base_model,
            _texts(body.user_metadata),
            with_optimizer=body.optimizer,
        )

    encoder = AsJson(type="load_weights", model_id=model_id, path=body.path)
    return _create(host, session, model_id, create, encoder)


@router.post("/get_info")
async def get_info(
    body: bodies.ModelId, request: Request, owner: TheOwner, host: TheHost
) -> dict[str, Any]:
    """Model name, rank and tokenizer."""
    _, model = host.model(owner, body.model_id)
    pending = host.board.get(f"{model.model_id}:create")
    if pending is not None:
        await asyncio.shield(asyncio.wrap_future(pending.future))
    info = _created(model, host).get_info().model_dump(mode="json", exclude_none=True)
    if not is_same_machine(request):
        # The folder says nothing to a client elsewhere but how this machine's disk is laid out. By
        # the model's name the client finds its own copy of the tokenizer.
        info["model_data"]["tokenizer_id"] = info["model_name"]
    return info


@router.post("/forward_backward", openapi_extra=reads(bodies.JsonPass))
async def forward_backward(request: Request, owner: TheOwner, host: TheHost) -> Ack:
    """A training pass; protobuf, or the JSON of SDKs before 0.25."""
    return await _pass(request, owner, host, forward=False)


@router.post("/forward", openapi_extra=reads(bodies.JsonPass))
async def forward(request: Request, owner: TheOwner, host: TheHost) -> Ack:
    """A pass without gradients, as SDKs before 0.25 ask for it."""
    return await _pass(request, owner, host, forward=True)


@router.post("/optim_step")
async def optim_step(body: bodies.OptimStep, owner: TheOwner, host: TheHost) -> Ack:
    """One step of AdamW."""

    def step(client: LocalTrainingClient) -> Future[Any]:
        return client.optim_step(_adam_params(body)).future()

    return _operate(host, owner, body.model_id, body.seq_id, step, AsJson(type="optim_step"))


@router.post("/save_weights")
async def save_weights(body: bodies.SaveWeights, owner: TheOwner, host: TheHost) -> Ack:
    """A checkpoint with the optimizer."""

    def begin(client: LocalTrainingClient) -> Future[Any]:
        name, metadata = _name_of(body.path), _texts(body.user_metadata)
        return client.save_state(name, body.ttl_seconds, body.overwrite, metadata).future()

    return _operate(host, owner, body.model_id, body.seq_id, begin, AsJson(type="save_weights"))


@router.post("/save_weights_external")
async def save_weights_external(body: bodies.SaveExternal, owner: TheOwner, host: TheHost) -> Ack:
    """An adapter whose files can be fetched."""

    def begin(client: LocalTrainingClient) -> Future[Any]:
        name, recipients = _name_of(body.path), body.age_encryption_recipients
        return client.save_weights_external(name, body.ttl_seconds, recipients).future()

    encoder = AsJson(type="save_weights_external")
    return _operate(host, owner, body.model_id, body.seq_id, begin, encoder)


@router.post("/save_weights_for_sampler")
async def save_for_sampler(body: bodies.SaveForSampler, owner: TheOwner, host: TheHost) -> Ack:
    """A checkpoint to sample from; without a name, a sampler of the present weights."""
    kind = "save_weights_for_sampler"
    if body.path is not None:

        def save(client: LocalTrainingClient) -> Future[Any]:
            name, metadata = _name_of(body.path), _texts(body.user_metadata)
            return client.save_weights_for_sampler(name, body.ttl_seconds, metadata).future()

        return _operate(host, owner, body.model_id, body.seq_id, save, AsJson(type=kind))
    session, _ = host.model(owner, body.model_id)
    number = body.sampling_session_seq_id
    sampler_id = "" if number is None else session.sampler_id(number)
    follows = body.model_id if body.kind == "inflight" else None

    def snapshot(client: LocalTrainingClient) -> Future[Any]:
        if number is None:
            raise DataValidationError(f"{kind}: got neither path nor sampling_session_seq_id")
        if body.kind not in ("snapshot", "inflight"):
            raise BackendError(f"kind: got {body.kind!r}, expected 'snapshot' or 'inflight'")
        made = client.save_weights_and_get_sampling_client()
        base = made.get_base_model()
        if follows is not None:
            session.take_inflight(follows, made)
        session.samplers[sampler_id] = OpenSampler(sampler_id, made, base, None, True, follows)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    encoder = AsJson(type=kind, sampling_session_id=sampler_id)
    return _operate(host, owner, body.model_id, body.seq_id, snapshot, encoder)


async def _read_pass(request: Request, *, forward: bool) -> Pass:
    limit = request.app.state.max_request_bytes
    kind = request.headers.get("content-type", "")
    encoding = request.headers.get("content-encoding", "")
    try:
        body = await body_of(request, limit)
    except NoRoom as error:
        return unread_pass(error)
    read = partial(read_pass, body, kind, encoding, limit, forward=forward)
    return read() if len(body) <= SMALL_BYTES and not encoding else await asyncio.to_thread(read)


async def _pass(request: Request, owner: Any, host: ServerState, *, forward: bool) -> Ack:
    what = await _read_pass(request, forward=forward)
    tokens = sum(map(len, what.data))
    return _operate(
        host,
        owner,
        what.model_id,
        what.seq_id,
        lambda client: _run(client, what).future(),
        PassEncoder(),
        lambda _: host.count(trained=tokens),
    )


def _run(client: LocalTrainingClient, what: Pass) -> LocalFuture[Any]:
    if what.error is not None:
        return client.fail_pass(what.error, backward=what.backward)
    return client.run_pass(what.data, what.loss_fn, what.loss_fn_config, backward=what.backward)


def _load(client: LocalTrainingClient, body: bodies.LoadWeights) -> LocalFuture[Any]:
    _require_plain(body)
    load = client.load_state_with_optimizer if body.optimizer else client.load_state
    return load(body.path)


def _create(
    host: ServerState,
    session: Session,
    model_id: str,
    create: Callable[[], LocalTrainingClient],
    encoder: Encoder,
) -> Ack:
    """Queues the creation of a model as the first of its turns; a repetition changes nothing."""
    request_id = f"{model_id}:create"
    if model_id not in session.models:
        model = session.models[model_id] = Model(model_id, OrderedDispatcher(model_id))
        pending = host.board.add(Pending(request_id, session.session_id, encoder))

        def begin() -> Future[Any]:
            model.client = create()
            return _nothing(model.client.future())

        model.turns.add(FIRST - 1, lambda: pending.follow(begin), blocks=True)
        host.note_open(model_id)
    return {"request_id": request_id, "model_id": model_id}


def _operate(
    host: ServerState,
    owner: Any,
    model_id: str,
    seq_id: int | None,
    begin: Begin,
    encoder: Encoder,
    note: Callable[[Any], None] | None = None,
    *,
    blocks: bool = False,
) -> Ack:
    """Queues an operation in its turn; one that was sent twice runs once.

    What ``begin`` raises is the operation's result. Refused before, it would leave a gap in the
    numbers, for which the operations after it would wait.
    """
    session, model = host.model(owner, model_id)
    if seq_id is None:
        raise DataValidationError("seq_id: got none, expected the number of the request")
    request_id = f"{model_id}:{seq_id}"
    if host.board.get(request_id) is None:
        pending = host.board.add(Pending(request_id, session.session_id, encoder))
        if note is not None:
            pending.when_done(note)
        work = partial(pending.follow, lambda: begin(_created(model, host)))
        model.turns.add(seq_id, work, blocks=blocks)
    return {"request_id": request_id, "model_id": model_id}


def _created(model: Model, host: ServerState) -> LocalTrainingClient:
    """The client of a model; where its creation failed, raises why."""
    pending = host.board.get(f"{model.model_id}:create")
    if model.client is None and pending is not None:
        pending.future.result()
    if model.client is None:
        raise BackendError(f"model {model.model_id}: could not be created")
    return model.client


def _nothing(done: Future[Any]) -> Future[None]:
    """A future of None that ends when ``done`` does, and fails with it."""
    out: Future[None] = Future()

    def end(_: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            out.set_result(None)
        else:
            out.set_exception(error)

    done.add_done_callback(end)
    return out


def _require_adam(config: dict[str, Any] | None) -> None:
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise BackendError(f"optimizer_config: got {kind!r}, expected 'adamw'")


def _require_plain(body: bodies.LoadWeights) -> None:
    _require_adam(body.optimizer_config)
    if body.weights_access_token is not None:
        raise BackendError("weights_access_token: this server knows none; leave it out")


def _adam_params(body: bodies.OptimStep) -> types.AdamParams:
    if body.adam_params is None:
        kind = (body.optimizer_params or {}).get("type")
        raise BackendError(f"optim_step: got {kind!r}, expected adam_params: the engine has AdamW")
    known = types.AdamParams.model_fields
    unknown = sorted(set(body.adam_params) - set(known))
    if unknown:
        raise DataValidationError(
            f"adam_params: got {unknown[0]!r}, expected some of {', '.join(known)}"
        )
    return types.AdamParams(**body.adam_params)


def _name_of(path: str | None) -> str:
    if not path:
        raise DataValidationError("path: got none, expected the checkpoint's name")
    return path


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
