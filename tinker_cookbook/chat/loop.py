"""Reads messages and commands of a chat from a terminal or a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from tinker_cookbook.chat.screen import Screen, ending_note, tokens_table
from tinker_cookbook.chat.session import ChatSession
from tinker_cookbook.exceptions import (
    DataError,
    RendererError,
    TinkerCookbookError,
    nearest_sentence,
)
from tinker_cookbook.renderers.core.messages import Content, ContentPart, format_content_as_string
from tinker_cookbook.utils.command_line.entrypoint import server_error_message

HELP = """\
/reset          start a new conversation with the same system prompt
/system TEXT    set the system prompt; without TEXT, show it; /system "" removes it
/save FILE      add the conversation to a JSONL file, which recipes.sl_basic trains on
/tokens         show the log-probabilities of the last answer's tokens
/image FILE     show an image with the next message; several are shown in order
/retry          sample the last answer again
/undo           remove the last turn
/help           show this list
/quit           end the program; so does Ctrl-D

A line that ends with \\ continues in the next line. Type // to send a message that begins with /.
Ctrl-C stops an answer."""

_COMMANDS = ("reset", "system", "save", "tokens", "image", "retry", "undo", "help", "quit", "exit")
# readline needs these marks around codes without a width.
_PROMPT, _PLAIN_PROMPT = "\001\x1b[1;32m\002> \001\x1b[0m\002", "> "


class ChatLoop:
    """Main loop over the lines of a chat.

    ``runner`` runs the answers. ``inform`` prints texts that are not answers.
    """

    def __init__(
        self,
        session: ChatSession,
        runner: asyncio.Runner,
        console: Console,
        inform: Callable[[str], None],
    ) -> None:
        self.session, self._runner = session, runner
        self._console, self._inform = console, inform
        self._labels = [model.label for model in session.models]
        self._images: list[ContentPart] = []  # of the next message

    def run_terminal(self) -> None:
        """Reads from a terminal until ``/quit`` or Ctrl-D; prints errors and continues."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has editing and a history)
        while True:
            try:
                line = _read_terminal(_PLAIN_PROMPT if self._console.no_color else _PROMPT)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._inform("\n(Ctrl-D or /quit ends the program)")
                continue
            try:
                if not self.handle(line):
                    return
            except KeyboardInterrupt:
                self._inform("\n[stopped; the message was removed]")
            except Exception as error:
                ours = isinstance(error, TinkerCookbookError)
                message = str(error) if ours else server_error_message(error)
                if message is None:
                    raise
                self._inform(message)

    def run_pipe(self, lines: IO[str]) -> None:
        """Reads messages and commands from a file, one per line; raises the first error."""
        for line in lines:
            if not self.handle(line.rstrip("\n")):
                return

    def handle(self, line: str) -> bool:
        """Handles a message or command; returns whether the chat continues."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/") or text.startswith("//"):
            text = text.removeprefix("/") if text.startswith("//") else text
            images, self._images = self._images, []
            self._send([*images, {"type": "text", "text": text}] if images else text)
            return True
        command, _, rest = text.removeprefix("/").partition(" ")
        if command not in _COMMANDS:
            raise DataError(
                f"/{command} is not a command{nearest_sentence(command, _COMMANDS)} See /help; "
                "type // to send a message that begins with /"
            )
        if command in ("quit", "exit"):
            return False
        getattr(self, f"_{command}")(rest.strip())
        return True

    def _send(self, content: Content) -> None:
        session = self.session
        screen = Screen(self._console, self._labels, session.choices.max_tokens)
        with screen:
            answers = self._runner.run(session.send(content, screen.show, screen.end))
        if all(answer.is_empty for answer in answers):
            self._inform("the message was removed")
        if self._console.is_terminal:
            return
        self._console.print()  # an empty line ends a plain answer
        for label, answer in zip(self._labels, answers, strict=True):
            if note := ending_note(answer, session.choices.max_tokens):
                self._inform(f"{label}: {note}")
            if answer.ending == "interrupted":
                raise KeyboardInterrupt  # in a pipe, Ctrl-C ends the program

    def _image(self, rest: str) -> None:
        if not rest:
            raise DataError("/image: got no file, expected /image FILE")
        file = Path(rest).expanduser()
        if not file.exists():
            with contextlib.suppress(ValueError):
                # A terminal quotes the path of a file that is dragged into it.
                (word,) = shlex.split(rest)
                file = Path(word).expanduser()
        # An absolute path, so that a saved conversation can be trained on from any folder.
        path = str(file.absolute())
        image: ContentPart = {"type": "image", "image": path}
        for model in self.session.models:
            try:
                prompt = model.prompt([{"role": "user", "content": [image]}])
            except RendererError as error:
                problem = re.sub(r"^messages\[0\]\S*: ", "", str(error))
                raise DataError(f"/image {rest}: {model.label}: {problem}") from error
            length = sum(piece.length for piece in prompt.chunks if piece.type != "encoded_text")
            self._inform(f"{model.label}: {rest} takes {length:,} tokens")
        self._images.append(image)

    def _reset(self, rest: str) -> None:
        self._images = []
        self.session.reset()
        self._inform("a new conversation")

    def _system(self, rest: str) -> None:
        session = self.session
        if rest:
            session.system_prompt = "" if rest in ('""', "''") else rest
        shown = session.system_prompt or "none (the chat format may have a default)"
        self._inform(f"system prompt: {shown}")

    def _save(self, rest: str) -> None:
        if not rest:
            raise DataError("/save: got no file, expected /save FILE")
        self._inform(self.session.save(rest))

    def _tokens(self, rest: str) -> None:
        if not self.session.turns:
            raise DataError("there is no answer yet to show tokens of")
        for label, answer in zip(self._labels, self.session.turns[-1], strict=True):
            self._console.print(Text(f"[{label}]", style="bold cyan"))
            self._console.print(tokens_table(answer.tokens))

    def _retry(self, rest: str) -> None:
        session = self.session
        before = [list(history) for history in session.histories], [*session.turns]
        text = session.undo()
        try:
            self._send(text)
        finally:
            # There is no new answer after an error or an interruption before the first token.
            if len(session.histories[0]) < len(before[0][0]):
                session.histories, session.turns = before
                self._inform("the earlier answer was kept")

    def _undo(self, rest: str) -> None:
        self._inform(f"removed: {format_content_as_string(self.session.undo())}")

    def _help(self, rest: str) -> None:
        self._inform(HELP)


def _read_terminal(prompt: str) -> str:
    line = input(prompt)
    while line.endswith("\\"):
        line = line.removesuffix("\\") + "\n" + input("  ")
    return line


def is_interactive() -> bool:
    """Returns whether input and output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
