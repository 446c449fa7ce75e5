"""The terminal tool of the model, and the reward of an episode."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.renderers import Message
from tinker_cookbook.sandbox import (
    SandboxInfrastructureError,
    SandboxInterface,
    SandboxResult,
    SandboxTerminatedError,
)
from tinker_cookbook.tool_use import ToolResult, simple_tool_result, tool

logger = logging.getLogger(__name__)

MAX_OUTPUT_CHARS = 16384
TIMED_OUT = 124
_REWARD_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
_EVENTS = ("grader_timeout", "no_reward_file", "work_not_readable")
_REMOVE_OUTER_LINKS = """
set -o pipefail
here=$(pwd -P)
find . -type l -print0 | while IFS= read -r -d '' link; do
    case "$(realpath -m -- "$link")" in
        "$here" | "$here"/*) ;;
        *) rm -f -- "$link" || exit 1 ;;
    esac
done
"""


class HarborBashTool:
    """Terminal in a sandbox. Each command begins in ``workdir``; files persist between commands."""

    def __init__(
        self, sandbox: SandboxInterface, command_timeout: int = 120, workdir: str = "/"
    ) -> None:
        self._sandbox, self._command_timeout, self._workdir = sandbox, command_timeout, workdir

    # ``command_timeout`` is the limit of a command.
    @tool(timeout_seconds=None)
    async def bash(self, command: Annotated[str, "The bash command to execute."]) -> ToolResult:
        """Execute a bash command in the sandbox and return its exit code and output."""
        result = await self._sandbox.run_command(
            command,
            workdir=self._workdir,
            timeout=self._command_timeout,
            max_output_bytes=MAX_OUTPUT_CHARS,
        )
        output = {
            "exit_code": result.exit_code,
            "stdout": result.stdout[:MAX_OUTPUT_CHARS],
            "stderr": result.stderr[:MAX_OUTPUT_CHARS],
        }
        return simple_tool_result(json.dumps(output, ensure_ascii=False))


@dataclass
class HarborReward:
    """Reward of an episode: tests run on the work folder and write ``/logs/verifier/reward.*``.

    With ``verifier`` the tests run in a second sandbox, which receives the work folder (and
    ``artifacts``) of the first one and nothing else: programs that the model replaced or left
    running, and files that it wrote elsewhere, have no effect. Without it they run in the model's
    sandbox, as with the original.

    A time-out of the tests, and tests that fail before they write a reward, give 0. What is not the
    model's fault raises ``SandboxInfrastructureError``: the episode is repeated or left out.
    """

    tests_dir: Path
    sandbox: SandboxInterface
    grader_timeout: int = 60
    verifier: Callable[[], Awaitable[SandboxInterface]] | None = None
    workdir: str = "/root"
    artifacts: Sequence[str] = ()

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        """Grades the finished episode."""
        reward, metrics = await self._grade()
        # Zeros are reported too, so that the mean over episodes is the share of each event.
        return reward, {**dict.fromkeys(_EVENTS, 0.0), **metrics, "reward": reward}

    async def _grade(self) -> tuple[float, dict[str, float]]:
        if self.verifier is None:
            return await self._grade_in(self.sandbox)
        grader = await self.verifier()
        try:
            for folder in (self.workdir, *self.artifacts):
                if not await _move_folder(self.sandbox, grader, folder):
                    return 0.0, {"test_passed": 0.0, "work_not_readable": 1.0}
            return await self._grade_in(grader)
        finally:
            await grader.cleanup()

    async def _grade_in(self, grader: SandboxInterface) -> tuple[float, dict[str, float]]:
        # Files of these names that the model has written must not be taken for the tests'.
        await _checked(grader, "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier")
        for path in sorted(file for file in self.tests_dir.rglob("*") if file.is_file()):
            target = f"/tests/{path.relative_to(self.tests_dir).as_posix()}"
            executable = path.suffix == ".sh" or bool(path.stat().st_mode & 0o100)
            # As bytes: fixtures need not be text.
            written = await grader.write_file(target, path.read_bytes(), executable=executable)
            if written.exit_code:
                raise SandboxInfrastructureError(f"{target}: {written.stderr.strip()}")
        # Tests of Terminal-Bench refuse to run in /.
        workdir = self.workdir if self.workdir != "/" else "/root"
        await _checked(grader, f"mkdir -p {shlex.quote(workdir)}")
        result = await grader.run_command(
            "bash /tests/test.sh", workdir=workdir, timeout=self.grader_timeout
        )
        if result.exit_code == TIMED_OUT and result.metrics.get("timed_out", True):
            return 0.0, {"test_passed": 0.0, "grader_timeout": 1.0}
        reward, metrics = await self._read_reward(grader, result)
        return reward, {**metrics, "test_passed": float(reward > 0)}

    async def _read_reward(
        self, grader: SandboxInterface, tests: SandboxResult
    ) -> tuple[float, dict[str, float]]:
        for path in _REWARD_FILES:
            found = await grader.read_file(path, max_bytes=1 << 20)
            text = found.stdout.strip()
            if found.exit_code or not text:
                continue
            try:
                value: Any = json.loads(text)
                metrics = value if isinstance(value, dict) else {"reward": value}
                numbers = {name: float(number) for name, number in metrics.items()}
                reward = numbers.pop("reward")
            except (ValueError, TypeError, KeyError):
                reward, numbers = math.nan, {}
            if not all(map(math.isfinite, (reward, *numbers.values()))):
                raise SandboxInfrastructureError(
                    f"{self.tests_dir}: {path} has {text[:100]!r}, expected a finite number, or a "
                    "JSON object of such numbers with the key 'reward'"
                )
            return reward, numbers
        if tests.exit_code == 0:
            raise SandboxInfrastructureError(
                f"{self.tests_dir}: test.sh succeeded, but wrote no {' or '.join(_REWARD_FILES)}"
            )
        logger.info("test.sh failed without a reward: %s", tests.stderr[-300:])
        return 0.0, {"no_reward_file": 1.0}


async def _checked(sandbox: SandboxInterface, command: str) -> None:
    result = await sandbox.run_command(command, workdir="/")
    if result.exit_code:
        raise SandboxInfrastructureError(f"{command}: {result.stderr.strip()[-300:]}")


async def _move_folder(source: Any, target: Any, folder: str) -> bool:
    """Replaces a folder of ``target`` by the one of ``source``; if it was deleted, by an empty one.

    Links that lead out of the folder are left out. Returns False if it cannot be read, because the
    model has made it too large, too deep or unreadable.
    """
    name = shlex.quote(folder)
    await _checked(target, f"mkdir -p {name} && find {name} -mindepth 1 -delete")
    exists = await source.run_command(f"test -d {name}", workdir="/")
    if exists.exit_code:
        return True
    try:
        archive = await source.export_folder(folder)
        # Paths may be too long to unpack, as folders of folders without end.
        await target.import_folder(archive, folder)
    except SandboxTerminatedError:
        raise
    except SandboxError as error:
        logger.info("the work folder is not graded: %s", error)
        return False
    # A link to a file of the tests would pass it off as the model's work.
    cleaned = await target.run_command(_REMOVE_OUTER_LINKS, workdir=folder)
    return cleaned.exit_code == 0
