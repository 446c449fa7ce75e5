"""The chat as a program: in a pseudo-terminal (slow), and in a pipe (in this process, 1 s)."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from tinker_cookbook.chat.__main__ import Config, main

SECONDS = 60.0
PROMPT = "> "


class Terminal:
    """A program on a pseudo-terminal of ``width`` columns."""

    def __init__(self, command: list[str], width: int) -> None:
        self.fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            # The slave becomes the controlling terminal, so that Ctrl-C is a signal.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.reads = 0

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, end: str, seconds: float = SECONDS) -> str:
        """Reads until the output, without styles, matches ``end`` at its end; returns it."""
        raw, stop = b"", time.monotonic() + seconds
        while True:
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode(errors="replace"))
            if re.search(f"{end}$", plain):
                return plain.replace("\r\n", "\n")
            assert time.monotonic() < stop, plain
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    raw += os.read(self.fd, 65536)
                except OSError:  # the program has ended
                    raise AssertionError(plain) from None
                self.reads += 1


@pytest.fixture
def settings(stories_model):
    names = {"model_name": stories_model, "renderer_name": "role_colon"}
    return {**names, "device": "cpu", "dtype": "float32", "seed": 3}


@pytest.mark.slow  # it starts the program, which takes 6 s of processor time
def test_chat_in_a_terminal(settings, tmp_path):
    words = [f"{key}={value}" for key, value in {**settings, "max_tokens": 400}.items()]
    terminal = Terminal([sys.executable, "-m", "tinker_cookbook.chat", *words], width=80)
    start = terminal.until(PROMPT)
    assert "chat format role_colon, asked for; context 512 tokens" in start
    # Several reads: the answer arrives in pieces.
    terminal.reads = 0
    terminal.type("Once upon a time\r")
    answer = terminal.until(PROMPT)
    assert terminal.reads > 20
    assert len(answer) > 100
    # Ctrl-C ends the answer, and the conversation goes on.
    terminal.type("Tell me more\r")
    terminal.until(r"more\r\n(?s:.*\w.*)")  # the note on the context, or the first word
    terminal.type("\x03")
    assert "[stopped" in terminal.until(PROMPT)
    # At the prompt Ctrl-C ends nothing. It has no effect while the program leaves the answer, so it
    # is typed again until it is read.
    for _ in range(10):
        terminal.type("\x03")
        with contextlib.suppress(AssertionError):
            assert "Ctrl-D or /quit" in terminal.until(PROMPT, seconds=3)
            break
    else:
        pytest.fail("Ctrl-C at the prompt prints no note")
    file = tmp_path / "chat.jsonl"
    terminal.type(f"/save {file}\r")
    assert "1 conversation" in terminal.until(PROMPT)
    terminal.type("/nothing\r")
    assert "/nothing is not a command" in terminal.until(PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(SECONDS) == 0
    assert file.read_text().startswith('{"messages": [{"role": "user", "content": "Once upon')


def test_a_pipe_has_answers_alone_on_standard_output(settings, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\nMore\n"))
    main(Config(**settings, max_tokens=8))
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    first, second, rest = said.out.split("\n\n")
    assert first
    assert second
    assert rest == ""
    assert "chat format role_colon" in said.err
    assert said.err.count("[cut at max_tokens=8]") == 2
