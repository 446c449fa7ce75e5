"""Probes of the ``tinker`` command line: its own functions, in this process, over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner
from safetensors.numpy import load_file
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from tests.conformance.compatibility.probing import Probes, Refusal, expect
from tests.conformance.compatibility.service_probes import LOCAL
from tests.conformance.compatibility.world import World, run_of

COMMANDS = Probes()


def commands(group: click.Command = main_cli, name: str = "") -> Iterator[str]:
    """The names of all commands, as they are typed."""
    if not isinstance(group, click.Group):
        yield name
        return
    context = click.Context(group)
    for part in group.list_commands(context):
        found = group.get_command(context, part)
        assert found is not None
        yield from commands(found, f"{name} {part}".strip())


def tinker(*words: str, typed: str | None = None) -> str:
    """What a command prints."""
    done = CliRunner().invoke(main_cli, list(words), input=typed)
    error = done.exception
    if isinstance(error, TinkerCliError):
        said = f"{error.message}\n{error.details or ''}"
        inner = said.partition("{'detail': ")[2].rpartition("}")[0]
        if inner:
            raise Refusal(inner.strip("'\"")) from error
        raise AssertionError(said) from error
    if error is not None:
        raise error
    return done.stdout


def as_json(*words: str) -> Any:
    """The same, as an object."""
    return json.loads(tinker("--format", "json", *words))


@COMMANDS("version", LOCAL)
def version(world: World) -> None:
    expect(tinker("version").startswith("tinker "), "a version")


@COMMANDS("auth status", "the key is accepted")
def auth_status(world: World) -> None:
    expect("Tinker accessible: yes" in tinker("auth", "status"), "it is")


@COMMANDS("auth whoami", "the owner of the key")
def auth_whoami(world: World) -> None:
    expect(as_json("auth", "whoami")["user_urn"] == "tml:user:local", "the owner")


@COMMANDS("auth login", "the key is stored, under its owner's name")
def auth_login(world: World) -> None:
    with mock.patch.dict(os.environ, HOME=str(world.folder)):
        expect("as local" in tinker("auth", "login", typed=f"{world.key}\n"), "the owner")
    stored = (world.folder / ".tinker" / "credentials.json").read_text()
    expect(world.key in stored, "the key")


@COMMANDS("auth logout", f"the stored key is removed; {LOCAL}")
def auth_logout(world: World) -> None:
    with mock.patch.dict(os.environ, HOME=str(world.folder)):
        expect("still active" in tinker("auth", "logout"), "it says so")
    stored = (world.folder / ".tinker" / "credentials.json").read_text()
    expect(world.key not in stored, "the key is gone")


@COMMANDS("model list", "the served model")
def model_list(world: World) -> None:
    expect(as_json("model", "list")["models"][0]["model_name"] == world.model, "the model")


@COMMANDS("run list", "the newest run first")
def run_list(world: World) -> None:
    run = world.new_training().model_id
    expect(as_json("run", "list", "--limit", "1")["runs"][0]["training_run_id"] == run, "it")


@COMMANDS("run info", "its base model, rank and last checkpoint")
def run_info(world: World) -> None:
    path = world.saved()
    said = json.dumps(as_json("run", "info", run_of(path)))
    expect(path in said and json.dumps(world.model) in said, "what it is")


@COMMANDS("session export-trace", "an address")
def export_trace(world: World) -> None:
    tinker("session", "export-trace", world.service.holder.get_session_id(), "--url-only")


@COMMANDS("checkpoint list", "the newest first, or those of a run")
def checkpoint_list(world: World) -> None:
    path = world.saved()
    newest = as_json("checkpoint", "list", "--limit", "1")["checkpoints"]
    expect([one["tinker_path"] for one in newest] == [path], "the newest")
    of_run = as_json("checkpoint", "list", "--run-id", run_of(path))["checkpoints"]
    expect(path in [one["tinker_path"] for one in of_run], "of the run")


@COMMANDS("checkpoint info", "its path and rank")
def checkpoint_info(world: World) -> None:
    path = world.saved()
    said = as_json("checkpoint", "info", path)
    expect((said["tinker_path"], said["lora_rank"]) == (path, 4), "what it is")


@COMMANDS("checkpoint set-ttl", "the list shows when it expires, and with `--remove` no longer")
def checkpoint_set_ttl(world: World) -> None:
    path = world.saved()
    tinker("checkpoint", "set-ttl", path, "--ttl", "7200")
    expect(as_json("checkpoint", "info", path)["expires_at"], "it expires")
    tinker("checkpoint", "set-ttl", path, "--remove")
    expect(as_json("checkpoint", "info", path)["expires_at"] is None, "it stays")


@COMMANDS("checkpoint delete", "it is no longer listed")
def checkpoint_delete(world: World) -> None:
    path, other = world.saved(), world.saved()
    tinker("checkpoint", "delete", "-y", path)
    expect(world.listed(path) is None and world.listed(other), "one is gone")


@COMMANDS("checkpoint download", "safetensors reads the files of `weights` and `external_weights`")
def checkpoint_download(world: World) -> None:
    for kind in ("weights", "external_weights"):
        tinker("checkpoint", "download", world.saved(kind), "-o", str(world.folder / kind))
        (folder,) = (world.folder / kind).iterdir()
        expect(load_file(folder / "adapter_model.safetensors"), "tensors")
        expect((folder / "adapter_config.json").is_file(), "a config")


@COMMANDS("checkpoint push-hf", "the folder that would be uploaded (to a fake Hub)")
def checkpoint_push(world: World) -> None:
    sent: list[str] = []
    hub = mock.Mock()
    hub.upload_folder.side_effect = lambda folder_path, **_: sent.extend(
        one.name for one in Path(folder_path).iterdir()
    )
    missing = mock.Mock(side_effect=FileNotFoundError)
    with mock.patch.multiple("huggingface_hub", HfApi=lambda: hub, hf_hub_download=missing):
        tinker("checkpoint", "push-hf", world.saved(), "--repo", "me/adapter")
    expect({"adapter_model.safetensors", "README.md"} <= set(sent), "adapter and card")


@COMMANDS("checkpoint publish", "the list shows that it is public")
def checkpoint_publish(world: World) -> None:
    path = world.saved()
    tinker("checkpoint", "publish", path)
    found = world.listed(path)
    expect(found is not None and found.public, "it is public")


@COMMANDS("checkpoint unpublish", "the list shows that it is not")
def checkpoint_unpublish(world: World) -> None:
    path = world.saved()
    world.rest.publish_checkpoint_from_tinker_path(path).result()
    tinker("checkpoint", "unpublish", path)
    found = world.listed(path)
    expect(found is not None and not found.public, "it is private")


@COMMANDS("billing usage", "events")
def billing_usage(world: World) -> None:
    tinker("billing", "usage", "2026-07-13", "2026-07-14")


@COMMANDS("billing checkpoint-storage", "sizes and costs")
def billing_storage(world: World) -> None:
    tinker("billing", "checkpoint-storage")
