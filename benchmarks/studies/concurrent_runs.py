"""16 runs on one server, and each by itself: `concurrent_runs.py FOLDER KEY=VALUE…`.

A grid of learning rates and LoRA ranks of `recipes.sl_loop`, all at once: as a sweep, whose runs
share a server, and as processes with one engine each. FOLDER/figures.json gets for both
ways the wall time and the highest sum of the processes' memory (PSS, so that pages which they share
count once), and whether the numbers of each run are the same, to the bit, as those of the same run
the other way; the first run is repeated alone. KEY=VALUE goes to the recipe.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RATES = ("1e-4", "3e-4", "1e-3", "3e-3")
RANKS = ("4", "8", "16", "32")
RECIPE = "recipes.sl_loop"
USUAL = {"max_steps": "20", "save_every": "0", "device": "cpu", "dtype": "float32"}
SECONDS_BETWEEN = 0.5


def main(folder: Path, given: dict[str, str]) -> None:
    """Both ways, one after the other, and one run alone."""
    folder.mkdir(parents=True)
    settings = USUAL | given
    grid = [{"learning_rate": r, "lora_rank": k} for r, k in itertools.product(RATES, RANKS)]
    sweep = {"learning_rate": ",".join(RATES), "lora_rank": ",".join(RANKS)}
    sweep |= {"jobs": str(len(grid)), "log_dir": str(folder / "server")}
    figures: dict[str, Any] = {"settings": settings, "load_before": os.getloadavg()[0]}
    command = ["tinker_cookbook.sweep", RECIPE, *words(settings | sweep)]
    ways: dict[str, Callable[[], list[subprocess.Popen[bytes]]]] = {
        "server": lambda: [start(command, folder, "sweep.log")],
        "separate": lambda: [alone(folder, "separate", settings | one) for one in grid],
        "one": lambda: [alone(folder, "alone", settings | grid[0])],
    }
    for way, begin in ways.items():
        figures[way] = watch(begin)
        print(way, figures[way], flush=True)
    compared = [("server", one) for one in grid] + [("alone", grid[0])]
    equal = [rows(folder, way, one) == rows(folder, "separate", one) for way, one in compared]
    figures["equal"] = f"{sum(equal[:-1])} of {len(grid)}"
    figures["alone_equal"] = equal[-1]
    for name in ("seconds", "peak_bytes"):
        figures[f"{name}_ratio"] = figures["server"][name] / figures["separate"][name]
    (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


def words(settings: dict[str, str]) -> list[str]:
    """A command line's."""
    return [f"{key}={value}" for key, value in settings.items()]


def name_of(one: dict[str, str]) -> str:
    """As a sweep calls a run."""
    return ",".join(f"{key}={one[key]}" for key in ("learning_rate", "lora_rank"))


def alone(folder: Path, way: str, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a run with its own engine."""
    name = name_of(settings)
    more = {"backend": "local", "log_path": str(folder / way / name)}
    return start([RECIPE, *words(settings | more)], folder, f"{way}-{name}.log")


def start(command: Sequence[str], folder: Path, log: str) -> subprocess.Popen[bytes]:
    """Starts a module in a process, whose output goes to a file."""
    surroundings = {**os.environ, "TINKER_COOKBOOK_HOME": str(folder / "home")}
    with (folder / log).open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdout=out, stderr=out, env=surroundings
        )


def watch(begin: Callable[[], list[subprocess.Popen[bytes]]]) -> dict[str, float]:
    """Seconds until the last process has ended, and the peak of the memory of all."""
    started, peak = time.monotonic(), 0
    processes = begin()
    while any(process.poll() is None for process in processes):
        peak = max(peak, sum(map(memory, descendants({process.pid for process in processes}))))
        time.sleep(SECONDS_BETWEEN)
    failed = [process.args for process in processes if process.returncode]
    if failed:
        raise SystemExit(f"failed: {failed[0]}")
    return {"seconds": time.monotonic() - started, "peak_bytes": peak}


def descendants(pids: set[int]) -> set[int]:
    """The processes, those that they started, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found, size = set(pids), 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def memory(pid: int) -> int:
    """Returns the bytes of a process, shared memory in proportion (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def rows(folder: Path, way: str, one: dict[str, str]) -> list[dict[str, Any]]:
    """A run's metrics but for its times."""
    lines = (folder / way / name_of(one) / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert found
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
