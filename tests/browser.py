"""A headless Chromium that tests drive through its debugging protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0


def find_chromium() -> str | None:
    """The program, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page in a browser; ``problems`` has its exceptions, refused loads and console errors."""

    def __init__(self, program: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.problems: list[str] = []
        self._number = 0
        port = folder / "DevToolsActivePort"
        until = time.monotonic() + SECONDS
        while not (port.exists() and port.read_text().count("\n")):
            assert self.process.poll() is None, "Chromium did not start"
            assert time.monotonic() < until, "Chromium opened no debugging port"
            time.sleep(0.05)
        address = f"127.0.0.1:{port.read_text().splitlines()[0]}"
        while True:
            pages = [p for p in httpx.get(f"http://{address}/json").json() if p["type"] == "page"]
            if pages:
                break
            assert time.monotonic() < until
            time.sleep(0.05)
        self._socket = connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()
        self.process.terminate()
        self.process.wait(SECONDS)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """The value of an expression as soon as it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < until, (script, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        there = f"location.href.startsWith({json.dumps(url)})"
        self.wait(f"{there} && document.readyState == 'complete'")

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def fill(self, selector: str, text: str) -> None:
        """Sets a field as a person does who types and leaves it."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(
            f"{field}.focus(), {field}.value = {json.dumps(text)}, "
            f"{field}.dispatchEvent(new Event('input', {{bubbles: true}})), "
            f"{field}.dispatchEvent(new Event('change', {{bubbles: true}})), 1"
        )

    def press(self, key: str, shift: bool = False) -> None:
        """Presses a key in the field with the focus."""
        fields = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": {"Enter": 13, "Escape": 27}[key],
            "modifiers": 8 if shift else 0,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def hover(self, selector: str) -> None:
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(json.dumps(params["args"]))
