from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tinker_cookbook
from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.engine.model import resolve
from tinker_cookbook.exceptions import DataFormatError, ModelNotFoundError

_ROOT = str(Path(tinker_cookbook.__file__).parent.parent)
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CALL = """
import json, sys
from tinker_cookbook.engine.model.resolve import resolve_model
from tinker_cookbook.exceptions import ModelNotFoundError
try:
    found = resolve_model(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps({"folder": str(found.folder), "source": found.source}))
except ModelNotFoundError as error:
    print(json.dumps({"error": str(error)}))
"""


class _Hub(ThreadingHTTPServer):
    """Speaks as much of the Hub's protocol as a download needs, and records what was asked."""

    def __init__(self, files: Path, repository: str):
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files, self.repository = files, repository
        self.fetched: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _HubHandler(BaseHTTPRequestHandler):
    server: _Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        if path.startswith(f"/api/models/{hub.repository}"):
            sizes = {
                str(file.relative_to(hub.files)): file.stat().st_size
                for file in sorted(hub.files.rglob("*"))
                if file.is_file()
            }
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": name, "size": size, "oid": name.replace("/", "-")}
                    for name, size in sizes.items()
                ]
                return self._answer(json.dumps(tree).encode())
            siblings = [{"rfilename": name} for name in sizes]
            info = {"id": hub.repository, "sha": _COMMIT, "siblings": siblings}
            return self._answer(json.dumps(info).encode())
        if path.startswith(f"/{hub.repository}/resolve/"):
            name = path.split("/resolve/")[1].split("/", 1)[1]
            if self.command == "GET":
                hub.fetched.append(name)
            return self._answer((hub.files / name).read_bytes(), etag=name.replace("/", "-"))
        kind = "GatedRepo" if "gated" in path else "RepoNotFound"
        self.send_response(403 if "gated" in path else 404)
        self.send_header("X-Error-Code", kind)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _answer(self, body: bytes, etag: str = "info"):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(stories_model: str, tmp_path: Path) -> Iterator[_Hub]:
    files = tmp_path / "on-the-hub"
    shutil.copytree(stories_model, files)
    (files / "original").mkdir()
    (files / "original" / "consolidated.safetensors").write_bytes(b"another copy")
    (files / "pytorch_model.bin").write_bytes(b"another copy")
    (files / "README.md").write_text("a card")
    server = _Hub(files, "acme/stories")
    yield server
    server.shutdown()
    server.server_close()


def _resolve(name: str, home: Path, endpoint: str, offline: bool = False, **arguments) -> dict:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    environment = {**kept, "PYTHONPATH": _ROOT, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    environment |= {"HF_HUB_OFFLINE": str(int(offline)), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", _CALL, name, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_download_takes_one_weight_format_and_is_reused_offline(hub: _Hub, tmp_path: Path):
    home = tmp_path / "hf"
    refused = _resolve("acme/stories", home, hub.url, allow_download=False)
    assert "Downloading was not allowed" in refused["error"]
    assert not hub.fetched

    found = _resolve("acme/stories:peft:8192", home, hub.url)
    assert "error" not in found, found["error"]
    assert found["source"] == "download"
    assert Path(found["folder"]).is_relative_to(home)
    wanted = {"config.json", "generation_config.json", "model.safetensors"}
    assert set(hub.fetched) == wanted | {"tokenizer.json", "tokenizer_config.json"}

    again = _resolve("acme/stories", home, "http://127.0.0.1:9", offline=True)
    assert again == {"folder": found["folder"], "source": "hub cache"}


def test_a_tokenizer_alone_is_fetched_and_completed_later(hub: _Hub, tmp_path: Path):
    home = tmp_path / "hf"
    assert _resolve("acme/stories", home, hub.url, need="tokenizer")["source"] == "download"
    assert "model.safetensors" not in hub.fetched
    offline = _resolve("acme/stories", home, hub.url, offline=True)
    assert "incomplete copy" in offline["error"]
    assert "HF_HUB_OFFLINE is set" in offline["error"]
    assert _resolve("acme/stories", home, hub.url, need="tokenizer")["source"] == "hub cache"
    assert _resolve("acme/stories", home, hub.url)["source"] == "download"
    assert "model.safetensors" in hub.fetched


def test_missing_and_gated_repositories_are_told_apart(hub: _Hub, tmp_path: Path):
    assert "no such model" in _resolve("acme/other", tmp_path, hub.url)["error"]
    gated = _resolve("acme/gated", tmp_path, hub.url)["error"]
    assert "accept its licence" in gated
    assert "HF_TOKEN" in gated


@pytest.mark.slow
def test_a_network_that_swallows_requests_is_given_up_in_seconds(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        started = time.monotonic()
        answer = _resolve("acme/x", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - started < 60
    assert "Timeout" in answer["error"]
    assert "Hub cache: no copy" in answer["error"]


@pytest.mark.parametrize(
    ("removed", "named"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "a tokenizer"),
    ],
)
def test_an_incomplete_folder_names_what_is_missing(
    stories_model: str, tmp_path: Path, removed: str, named: str
):
    folder = tmp_path / "model"
    shutil.copytree(stories_model, folder)
    (folder / removed).unlink()
    with pytest.raises(ModelNotFoundError) as raised:
        resolve.resolve_model(str(folder))
    missing = str(raised.value).split("missing: ")[1].split(";")[0]
    assert missing.startswith(named)


def test_a_missing_shard_is_named(stories_model: str, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(stories_model, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelNotFoundError, match=r"missing: model-00002-of-00002\.safetensors;"):
        resolve.resolve_model(str(folder))


def test_an_adapter_folder_is_recognised(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="holds a LoRA adapter, not a model"):
        resolve.resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nope", "./nope", "a/b/c", "/no/such/folder", ""])
def test_invalid_name_is_refused_offline(name: str):
    with pytest.raises(ModelNotFoundError, match="neither an existing folder nor a Hub name"):
        resolve.resolve_model(name)


def test_a_damaged_config_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(DataFormatError, match="got list, expected a JSON object"):
        resolve.model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataFormatError, match=r"config\.json: cannot be read"):
        resolve.model_config(tmp_path)


def test_the_demo_model_falls_back_on_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: str
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TINKER_COOKBOOK_MODELS", str(Path(demo_model).parent))
    found = resolve.resolve_model(f"{DEMO_MODEL}:peft:2048")
    assert (found.source, str(found.folder)) == ("demo package", demo_model)
    assert "4-bit" in found.note
    assert resolve.missing_parts(found.folder) == []
