"""The clients of Modal and SandboxFusion, against a fake module and a local server (under 2 s)."""

from __future__ import annotations

import asyncio
import base64
import sys
import types

import pytest
from json_server import json_server

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.sandbox import (
    ModalSandbox,
    ModalSandboxPool,
    SandboxFusionClient,
    SandboxInterface,
    SandboxTerminatedError,
    modal_sandbox,
)


def aio(function):
    """Modal's functions have their asynchronous form as the attribute ``aio``."""
    return types.SimpleNamespace(aio=function)


async def stream(*pieces):
    for piece in pieces:
        yield piece


class FakeStdin:
    def __init__(self):
        self.data = b""
        self.drain = aio(self._drain)

    async def _drain(self):
        pass

    def write(self, data):
        self.data += data

    def write_eof(self):
        pass


class FakeSandbox:
    """Gives each script a fixed output."""

    made = 0

    def __init__(self):
        FakeSandbox.made += 1
        self.object_id = f"sb-{FakeSandbox.made}"
        self.error: BaseException | None = None
        self.ended = False
        self.exec, self.terminate, self.wait = map(aio, (self._exec, self._terminate, self._wait))

    async def _exec(self, *argv, timeout=None, workdir=None):
        if self.error is not None:
            raise self.error
        reads = {"cat > ": "", "cat ": "content", "head -c": "con", "echo": "out\n" * 100}
        text = next((t for key, t in reads.items() if key in argv[-1]), "")
        self.last = types.SimpleNamespace(
            stdin=FakeStdin(),
            argv=argv,
            stdout=stream(text, b"\xff"),
            stderr=stream("warning"),
            wait=aio(self._wait),
        )
        return self.last

    async def _terminate(self):
        self.ended = True

    async def _wait(self, raise_on_termination=True):
        return 0


@pytest.fixture
def modal(monkeypatch):
    fake = types.ModuleType("modal")
    sandboxes = []

    async def create(app=None, image=None, timeout=None):
        sandboxes.append(FakeSandbox())
        return sandboxes[-1]

    async def lookup(name, create_if_missing):
        return name

    fake.Image = types.SimpleNamespace(debian_slim=lambda: "slim")
    fake.App = types.SimpleNamespace(lookup=aio(lookup))
    fake.Sandbox = types.SimpleNamespace(create=aio(create))
    fake.exception = types.SimpleNamespace(SandboxTimeoutError=TimeoutError)
    fake.sandboxes = sandboxes
    monkeypatch.setitem(sys.modules, "modal", fake)
    return fake


def test_modal_sandbox_follows_the_interface(modal):
    async def main():
        box = await ModalSandbox.create(max_stream_output_bytes=8)
        assert isinstance(box, SandboxInterface)
        assert box.sandbox_id == modal.sandboxes[0].object_id
        result = await box.run_command("echo out")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\nout\n", "warning", 0)
        assert (await box.read_file("/a b", max_bytes=3)).stdout == "con"
        assert modal.sandboxes[0].last.argv[-1] == "head -c 3 '/a b'"
        await box.write_file("/x/y", b"\x00data", executable=True)
        assert modal.sandboxes[0].last.stdin.data == b"\x00data"
        assert "chmod +x /x/y" in modal.sandboxes[0].last.argv[-1]
        await box.send_heartbeat()
        await box.cleanup()
        assert modal.sandboxes[0].ended

    asyncio.run(main())


def test_modal_errors_are_told_apart(modal):
    async def main():
        box = await ModalSandbox.create()
        inside = modal.sandboxes[0]
        inside.error = ValueError("bad request")
        result = await box.run_command("echo")
        assert (result.exit_code, result.stderr) == (-1, "ValueError: bad request")
        inside.error = RuntimeError("the Sandbox was terminated")
        with pytest.raises(SandboxTerminatedError):
            await box.run_command("echo")
        # Modal's own cancellation must not cancel the training step.
        inside.error = asyncio.CancelledError()
        with pytest.raises(SandboxTerminatedError):
            await box.run_command("echo")

    asyncio.run(main())


def test_modal_pool_uses_each_sandbox_once(modal, monkeypatch):
    monkeypatch.setattr(modal_sandbox, "_RETRY_SECONDS", 0.01)

    async def main():
        pool = ModalSandboxPool(pool_size=2)
        results = await asyncio.gather(
            *(pool.run_in_workdir({"a.txt": "x"}, ["echo", "a b"], 5) for _ in range(3))
        )
        assert all(result.stdout.startswith("out") for result in results)
        assert len(modal.sandboxes) >= 3
        short = await pool.run_in_workdir({}, ["echo"], 5, max_output_bytes=3)
        assert short.stdout == "out"
        await pool.terminate()
        assert all(sandbox.ended for sandbox in modal.sandboxes)
        with pytest.raises(SandboxError, match="terminated"):
            await pool.run_in_workdir({}, ["true"])

    asyncio.run(main())


def test_fusion_client_tells_program_and_server_failures_apart():
    ran = {"status": "Success", "run_result": {"stdout": "1\n"}}
    requests, answers = (
        [],
        [
            (200, ran),
            (200, {"status": "Failed", "run_result": {"return_code": 1}}),
            (200, {"status": "SandboxError", "message": "no container"}),
            (500, "broken"),
        ],
    )

    def answer(body, headers):
        requests.append(body)
        return answers.pop(0)

    async def main(url):
        client = SandboxFusionClient(f"{url}/run_code")
        files = {"a.txt": "ü"}
        results = [await client.run("print(1)", files, timeout=0.5) for _ in range(4)]
        await client.close()
        return results

    with json_server(answer) as url:
        results = asyncio.run(main(url))
    assert results[0] == (True, ran)
    assert not results[1][0]
    assert "error" not in results[1][1]
    assert results[2] == (False, {"error": "no container", **results[2][1]})
    assert results[3][1]["error"].startswith("HTTP 500")
    request = requests[0]
    assert request["run_timeout"] == 1
    assert base64.b64decode(request["files"]["a.txt"]).decode() == "ü"
    client = SandboxFusionClient("http://127.0.0.1:1/run_code")
    ok, answer = asyncio.run(client.run("", {}, 1))
    assert not ok
    assert "127.0.0.1:1" in answer["error"]
