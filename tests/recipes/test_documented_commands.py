"""The commands and Python examples of README and docs run, each in a process of its own.

Costs about five minutes; marked slow.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import chz
import pytest
from docs_reader import Reader
from documented_commands import EXAMPLES, OF_CLIENTS, OF_SERVERS, PROGRAMS, of_agents

from tinker_cookbook.utils.command_line.entrypoint import config_class_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader"))


def test_commands_are_found():
    assert len(PROGRAMS) > 20
    assert OF_SERVERS
    assert OF_CLIENTS
    assert len(EXAMPLES) > 5


def test_agents_type_programs_and_keys_that_exist():
    typed = of_agents()
    assert len(typed) > 20
    for program, keys in typed:
        module = importlib.import_module(program)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{program}.__main__")
        config = config_class_of(getattr(module, "main", None))
        known = {"--help", "config", *(chz.chz_fields(config) if config else keys)}
        assert set(keys) <= known, (program, keys)


@pytest.mark.parametrize("command", PROGRAMS, ids=str)
def test_command(reader, command):
    reader.run([sys.executable, "-m", command.program, *reader.words(command)])


@pytest.mark.parametrize(
    ("page", "text"),
    [example for example in EXAMPLES if "127.0.0.1" not in example[1]],
    ids=lambda value: value if len(value) < 60 else "example",
)
def test_python_example(reader, page, text):
    reader.run([sys.executable, "-c", reader.example(page, text)])


@pytest.fixture(scope="module")
def server(reader):
    """URL and key of the documented server, and a checkpoint that it serves."""
    checkpoint = reader.checkpoint()
    port = free_port()
    process = reader.start_server(reader.server_words(OF_SERVERS[0]), port)
    keys = json.loads((reader.folder / "home" / "server_keys.json").read_text())
    url = f"http://127.0.0.1:{port}"
    yield {"TINKER_BASE_URL": url, "TINKER_API_KEY": keys["local"], "checkpoint": checkpoint}
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.mark.parametrize("command", OF_SERVERS[1:], ids=str)
def test_server(reader, command):
    process = reader.start_server(reader.server_words(command), free_port())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.mark.parametrize("command", OF_CLIENTS, ids=str)
def test_client(reader, server, command):
    words = [on_server(word, server) for word in command.words]
    program = shutil.which(command.program, path=f"{Path(sys.executable).parent}:{os.defpath}")
    assert program, f"{command.program} is not installed"
    environment = {name: server[name] for name in ("TINKER_BASE_URL", "TINKER_API_KEY")}
    printed = reader.run([program, *words], **environment)
    if command.program == "curl":
        assert json.loads(printed)["choices"], printed


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES if "127.0.0.1" in text])
def test_python_client(reader, server, text):
    environment = {name: server[name] for name in ("TINKER_BASE_URL", "TINKER_API_KEY")}
    reader.run([sys.executable, "-c", on_server(text, server)], **environment)


def on_server(text: str, server: dict[str, str]) -> str:
    """Returns ``text`` with the address, key and checkpoint of the running server."""
    text = text.replace("http://127.0.0.1:8000", server["TINKER_BASE_URL"])
    text = text.replace("$TINKER_API_KEY", server["TINKER_API_KEY"])
    return text.replace("tinker://RUN/sampler_weights/NAME", server["checkpoint"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
