"""Clients of the OpenAI API that need constrained sampling, each in an environment of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from environments import REPO, python_with, run_in
from serving import Serving

from tinker_cookbook.backends import connect

pytest.importorskip("llguidance", reason="structured output is an extra: pip install llguidance")
CLIENTS = str(Path(__file__).resolve().parent / "openai_clients.py")


@pytest.fixture(scope="module")
def random_server(tmp_path_factory):
    """A server of a checkpoint of random weights that records a format: (address, key, model)."""
    path = REPO / "tests" / "unit" / "server" / "openai" / "scripted.py"
    spec = importlib.util.spec_from_file_location("scripted_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.make_scripted_model(tmp_path_factory.mktemp("random"))
    running = Serving(tmp_path_factory.mktemp("server"), {"model_name": model}).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", running.key())
        with connect(running.url) as connection:
            recorded = {"renderer_name": "qwen2_5"}
            client = connection.service.create_lora_training_client(
                model, rank=4, user_metadata=recorded
            )
            path = client.save_weights_for_sampler("random").result().path
    yield f"{running.url}/oai/api/v1", running.key(), path
    assert running.stop() == 0


@pytest.mark.slow
def test_tools_of_inspect_with_its_defaults(random_server):
    """Half a minute, and a minute more where the environment is made."""
    printed = run_in(python_with("inspect"), CLIENTS, *random_server)
    (line,) = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert [(api, choice) for api, choice, _ in found] == [
        ("openai-api", "auto"),
        ("openai-api", "any"),
        ("openai", "auto"),
        ("openai", "any"),
    ]
    for api, choice, calls in found:
        assert calls or choice == "auto"
        if (api, choice) == ("openai", "auto"):
            continue  # its tools are not strict
        for arguments in calls:
            assert arguments.keys() == {"number", "loud"}
            assert isinstance(arguments["number"], int)
            assert isinstance(arguments["loud"], bool)
