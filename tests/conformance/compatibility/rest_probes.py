"""Probes of the rest client and the admin client, and of what several clients have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from safetensors.numpy import load
from tinker import types

from tests.conformance.compatibility.probing import Call, Probes, expect
from tests.conformance.compatibility.sampling_probes import SAMPLING
from tests.conformance.compatibility.service_probes import LOCAL, SERVICE
from tests.conformance.compatibility.training_probes import TRAINING
from tests.conformance.compatibility.world import World, run_of

REST, ADMIN = Probes(), Probes()


def _client(world: World, call: Call) -> Any:
    """The client whose class is probed."""
    kinds = ("service", "training", "sampling", "rest", "admin")
    return getattr(world, next(kind for kind in kinds if kind.title() in str(call.of)))


@SERVICE("get_telemetry", f"{LOCAL}, which discards telemetry")
@TRAINING("get_telemetry", f"{LOCAL}, which discards telemetry")
@SAMPLING("get_telemetry", f"{LOCAL}, which discards telemetry")
@REST("get_telemetry", f"{LOCAL}, which discards telemetry")
@ADMIN("get_telemetry", f"{LOCAL}, which discards telemetry")
def get_telemetry(world: World, call: Call) -> None:
    expect(call(_client(world, call)) is None, "it is off")


@SERVICE("get_console_url", f"{LOCAL}; the address of the hosted console")
@TRAINING("get_console_url", f"{LOCAL}; the address of the hosted console")
def get_console_url(world: World, call: Call) -> None:
    expect(call(_client(world, call)).startswith("https://"), "an address")


@TRAINING("get_tokenizer", "it encodes text (from the model folder that the server reports)")
@SAMPLING("get_tokenizer", "it encodes text (from the model folder that the server reports)")
def get_tokenizer(world: World, call: Call) -> None:
    expect(call(_client(world, call)).encode("a"), "tokens")


@SERVICE("get_server_capabilities", "it lists the served model")
@REST("get_server_capabilities", "it lists the served model")
def get_server_capabilities(world: World, call: Call) -> None:
    (model,) = call(_client(world, call)).supported_models
    expect(model.model_name == world.model and model.max_context_length > 0, "the model")


@REST("get_training_run", "its id, base model and rank")
def get_training_run(world: World, call: Call) -> None:
    _check_run(world, call(world.rest, world.training.model_id))


@REST("get_training_run_by_tinker_path", "its id, base model and rank")
def get_run_by_path(world: World, call: Call) -> None:
    _check_run(world, call(world.rest, world.saved()))


@REST("get_weights_info_by_tinker_path", "base model and rank")
def get_weights_info(world: World, call: Call) -> None:
    info = call(world.rest, world.saved())
    expect((info.base_model, info.lora_rank) == (world.model, 4), "model and rank")


@REST("list_training_runs", "the newest first, a page of two")
def list_training_runs(world: World, call: Call) -> None:
    new = [world.new_training() for _ in range(2)]
    page = call(world.rest, limit=2)
    ids = [run.training_run_id for run in page.training_runs]
    expect(sorted(ids) == sorted(client.model_id for client in new), "the newest")
    expect(page.cursor.total_count > 2, "more follow")


@REST("list_checkpoints", "it contains a new one")
def list_checkpoints(world: World, call: Call) -> None:
    path = world.saved()
    found = call(world.rest, run_of(path)).checkpoints
    expect(path in [one.tinker_path for one in found], "the new one")


@REST("list_user_checkpoints", "the newest first, a page of two")
def list_user_checkpoints(world: World, call: Call) -> None:
    paths = [world.saved(), world.saved("sampler_weights")]
    page = call(world.rest, limit=2)
    expect([one.tinker_path for one in page.checkpoints] == paths[::-1], "the newest")


@REST("get_external_weights_urls", "an adapter, downloaded without a key")
def get_external_weights_urls(world: World, call: Call) -> None:
    found = call(world.rest, world.saved("external_weights"))
    expect(found.expires > datetime.now(UTC), "they hold")
    answer = world.http.get(found.urls["adapter_model.safetensors"], headers={"X-API-Key": ""})
    expect(load(answer.content), "tensors")


@REST("delete_checkpoint", "it is no longer listed")
def delete_checkpoint(world: World, call: Call) -> None:
    path = world.saved()
    call(world.rest, run_of(path), path.split("/", 3)[3])
    expect(world.listed(path) is None, "it is gone")


@REST("delete_checkpoint_from_tinker_path", "it is no longer listed")
def delete_by_path(world: World, call: Call) -> None:
    path = world.saved()
    call(world.rest, path)
    expect(world.listed(path) is None, "it is gone")


@REST(
    "set_checkpoint_ttl_from_tinker_path",
    "the list shows when it expires, and the removal",
)
def set_ttl(world: World, call: Call) -> None:
    path = world.saved()
    call(world.rest, path, 7200)
    found = world.listed(path)
    expect(found is not None and found.expires_at is not None, "it expires")
    call(world.rest, path, None)
    found = world.listed(path)
    expect(found is not None and found.expires_at is None, "it stays")


@REST("publish_checkpoint_from_tinker_path", "the list shows that it is public")
def publish(world: World, call: Call) -> None:
    path = world.saved()
    call(world.rest, path)
    found = world.listed(path)
    expect(found is not None and found.public, "it is public")


@REST("unpublish_checkpoint_from_tinker_path", "the list shows that it is not")
def unpublish(world: World, call: Call) -> None:
    path = world.saved()
    world.rest.publish_checkpoint_from_tinker_path(path).result()
    call(world.rest, path)
    found = world.listed(path)
    expect(found is not None and not found.public, "it is private")


@REST("copy_weights", "the copy is listed")
def copy_weights(world: World, call: Call) -> None:
    call(world.rest, world.saved(), "p")


@REST("get_session", "its runs")
def get_session(world: World, call: Call) -> None:
    run, session = world.training.model_id, world.service.holder.get_session_id()
    expect(run in call(world.rest, session).training_run_ids, "the run")


@REST("list_sessions", "the newest open one first")
def list_sessions(world: World, call: Call) -> None:
    with tinker.ServiceClient() as service:
        session = service.holder.get_session_id()
        expect(call(world.rest, limit=1).sessions == [session], "the newest")


@REST("search_sessions", "finds an open one by its name")
def search_sessions(world: World, call: Call) -> None:
    session = world.service.holder.get_session_id()
    found = call(world.rest, types.SessionSearchRequest(display_name="COMPAT")).sessions
    expect([one.session_id for one in found] == [session], "this session")


@REST("assign_session_project", "the session is in the project")
def assign_session_project(world: World, call: Call) -> None:
    call(world.rest, world.service.holder.get_session_id(), "p")


@REST("export_session_trace", "an address")
def export_session_trace(world: World, call: Call) -> None:
    call(world.rest, world.service.holder.get_session_id())


@REST("whoami", "the owner of the key")
def whoami(world: World, call: Call) -> None:
    expect(call(world.rest).user_urn == "tml:user:local", "the owner")


@REST("get_sampler", "its base model and checkpoint")
def get_sampler(world: World, call: Call) -> None:
    path = world.saved("sampler_weights")
    session = world.service.holder.get_session_id()
    world.service.create_sampling_client(model_path=path).result()
    sampler = world.rest.get_session(session).result().sampler_ids[-1]
    found = call(world.rest, sampler)
    expect((found.base_model, found.model_path) == (world.model, path), "what it samples from")


@REST("get_audit_log", "entries")
@ADMIN("get_audit_log", "entries")
def get_audit_log(world: World, call: Call) -> None:
    call(_client(world, call))


@REST("get_billing_usage", "events")
@ADMIN("get_billing_usage", "events")
def get_billing_usage(world: World, call: Call) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    call(_client(world, call), hour - timedelta(hours=1), hour)


@REST("get_current_checkpoint_storage_usage", "sizes and costs")
@ADMIN("get_current_checkpoint_storage_usage", "sizes and costs")
def get_storage_usage(world: World, call: Call) -> None:
    call(_client(world, call))


def _check_run(world: World, run: types.TrainingRun) -> None:
    expect(run.training_run_id == world.training.model_id, "the run")
    expect((run.base_model, run.lora_rank) == (world.model, 4), "model and rank")
