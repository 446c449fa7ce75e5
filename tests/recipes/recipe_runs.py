"""A folder in which recipes run as a user runs them: in real processes, with a small real model."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import forks
from homes import new_home

from recipes.start import example_data

REPO = Path(__file__).resolve().parents[2]


def of_the_moment(key: str) -> bool:
    """Whether a metric depends on timing."""
    return key.startswith(("time/", "tokens/prefill_")) or key.endswith("total_cached_ob_tokens")


class RecipeRuns:
    """22 conversations to train on, 6 held out, and a checkpoint root that all runs share.

    ``options`` are further words of the command line, as a text.
    """

    def __init__(
        self, folder: Path, model: str, recipe: str = "recipes.sl_basic", options: str = ""
    ) -> None:
        self.folder, self.model, self.recipe, self.options = folder, model, recipe, options
        rows = example_data("conversations.jsonl").read_text().splitlines()
        (folder / "train.jsonl").write_text("\n".join(rows[:22]) + "\n")
        (folder / "test.jsonl").write_text("\n".join(rows[30:36]) + "\n")

    def shorten(self) -> None:
        """Cuts messages to 40 characters, for tests that no signal must reach in time."""
        for path in (self.folder / "train.jsonl", self.folder / "test.jsonl"):
            rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
            short = [[{**m, "content": m["content"][:40]} for m in row] for row in rows]
            path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in short))

    def arguments(self, name: str, behavior: str = "raise") -> list[str]:
        shared = [
            f"model_name={self.model}",
            f"log_path={self.folder / name}",
            f"behavior_if_log_dir_exists={behavior}",
            "renderer_name=role_colon",
            "lora_rank=4",
            "device=cpu",
            "dtype=float32",
            *self.options.split(),
        ]
        if self.options:
            return shared
        # 22 conversations in batches of 4: six steps an epoch, the last one partial.
        shared.append(f"dataset_path={self.folder / 'train.jsonl'}")
        shared += ["batch_size=4", "num_epochs=2", "save_every=3", "learning_rate=0.005"]
        if self.recipe != "recipes.sl_basic":
            return shared
        shared += [f"test_path={self.folder / 'test.jsonl'}", "eval_every=4", "show_samples=0"]
        return [
            *shared,
            "warmup_steps=2",
            "grad_clip_norm=3",
            "weight_decay=0.01",
            "submit_ahead=2",
        ]

    def environment(self, **extra: str) -> dict[str, str]:
        # Each module of the test run shares one checkpoint root, as a user's runs do.
        home = new_home(self.folder / "home")
        return {**os.environ, "TINKER_COOKBOOK_HOME": home, "PYTHONPATH": str(REPO), **extra}

    def command(self, name: str, behavior: str = "raise", *extra: str) -> list[str]:
        return [sys.executable, "-m", self.recipe, *self.words(name, behavior, *extra)]

    def words(self, name: str, behavior: str = "raise", *extra: str) -> list[str]:
        """The arguments, in which one of ``extra`` takes the place of an earlier one."""
        return last_of_each([*self.arguments(name, behavior), *extra])

    def start(self, command: list[str], fresh: bool = False, **extra: str) -> subprocess.Popen[str]:
        """Starts a command in the background: in a fork, or ``fresh``, where its imports count.
        ``extra`` is added to its environment."""
        fresh |= command[0] != sys.executable
        start = functools.partial(subprocess.Popen, text=True) if fresh else forks.Popen
        return start(
            command,
            cwd=REPO,
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self, name: str, behavior: str = "raise", *extra: str, kill: list[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the recipe to its end, or to the point named by ``kill``."""
        return self.execute([self.recipe, *self.words(name, behavior, *extra)], kill)

    def execute(
        self, words: list[str], kill: list[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program and its arguments in a fork."""
        command = [sys.executable, "-m", *(["kill_at", *kill] if kill else []), *words]
        return forks.run(command, cwd=REPO, env=self.environment_of_kill_at())

    def environment_of_kill_at(self) -> dict[str, str]:
        env = self.environment()
        env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"  # where kill_at is
        return env

    def start_paused(
        self,
        point: str,
        count: int,
        name: str,
        *extra: str,
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> tuple[subprocess.Popen[str], Path]:
        """Starts the recipe and waits until it pauses after the ``count``-th call of ``point``.

        ``prefix`` stands before the command. Returns the process and the file whose removal lets
        it go on.
        """
        file = self.folder / f"{name}.paused"
        words = [self.recipe, *self.words(name, "raise", *extra)]
        command = [sys.executable, "-m", "kill_at", point, str(count), str(file), *words]
        process = self.start(
            [*prefix, *command], **{**self.environment_of_kill_at(), **environment}
        )
        wait_for(file.exists, process)
        return process, file

    def check_killed_and_resumed(self, name: str, point: str, count: int, when: str) -> None:
        """Kills a run at a point, goes on, and holds the end against the run ``straight``."""
        killed = self.run(name, kill=[point, str(count), when])
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        resumed = self.run(name, "resume")
        assert resumed.returncode == 0, resumed.stderr[-2000:]
        assert self.rows(name) == self.rows("straight")
        assert self.adapter(name) == self.adapter("straight")

    def rows(self, name: str) -> list[dict]:
        """The rows of ``metrics.jsonl`` without what depends on the moment: times, and how many
        prompt tokens the sampler happened to have at hand."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{k: v for k, v in row.items() if not of_the_moment(k)} for row in rows]

    def adapter(self, name: str) -> bytes:
        """The file of the final adapter."""
        lines = (self.folder / name / "checkpoints.jsonl").read_text().splitlines()
        final = json.loads(lines[-1])
        assert final["final"]
        return (self.weights(final["state_path"]) / "adapter_model.safetensors").read_bytes()

    def weights(self, state_path: str, home: Path | None = None) -> Path:
        """The folder of a checkpoint."""
        run, kind, checkpoint = state_path.removeprefix("tinker://").split("/")
        return (home or self.folder / "home") / "runs" / run / kind / checkpoint


def last_of_each(words: Sequence[str]) -> list[str]:
    """``key=value`` words with the last value of each key: a command line takes a key once."""
    return list({word.partition("=")[0]: word for word in words}.values())


def finish(
    process: subprocess.Popen[str], seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Waits for a process, and ends it where it takes too long."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300
) -> None:
    """Waits until ``condition`` holds; fails where the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < end, "the process did not come so far"
        time.sleep(0.02)


def count_lines(path: Path) -> int:
    """Lines of a file that may not be there yet."""
    return path.read_text().count("\n") if path.exists() else 0
