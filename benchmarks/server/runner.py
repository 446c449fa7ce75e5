"""Runs the measurement: all sides in turn, in one run."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import chz
import tinker
from rich.console import Console

from benchmarks.harness import describe_machine
from benchmarks.report import deliver, now, print_report
from benchmarks.server import empty
from benchmarks.server.config import Config
from benchmarks.server.sides import (
    KINDS,
    Side,
    Work,
    in_turns,
    messages_of,
    start_empty,
)
from tinker_cookbook.backends import connect
from tinker_cookbook.engine.devices import choose_device
from tinker_cookbook.engine.model.resolve import model_config, resolve_model
from tinker_cookbook.sweep.runs import Server, started_server

LOCAL, SERVER = "in process", "server"
AT_ONCE, HELD = "empty server", "empty server, held"
_QUEUED = {"forward_backward": "forward_backward", "optim_step": "optim_step", "asample": "sample"}
_TRIALS = 5


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    config.check()
    logging.getLogger("tinker").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    console = Console(highlight=False)
    choice = choose_device(config.device, config.dtype)
    vocabulary = int(model_config(resolve_model(config.model_name).folder)["vocab_size"])
    work = Work.random(config, vocabulary)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides, held = _sides(config, work, folder, stack)
        in_turns(sides, range(config.warmup))
        for side in sides.values():
            side.forget()
        load = os.getloadavg()[0]
        in_turns(sides, range(config.warmup, len(work.prompts)))
        result = _result(config, sides, held) | describe_machine(choice.device)
    result |= {"load_before": load, "sdk": version("tinker"), "date": now()}
    _print_table(result, console)
    deliver(result, config.output, console)
    return 0


def _sides(
    config: Config, work: Work, folder: Path, stack: contextlib.ExitStack
) -> tuple[dict[str, Side], dict[str, float]]:
    """Returns all sides, and the seconds that the empty server holds results of a kind.

    It responds with the engine's results in process, and holds them as long as the engine took.
    """
    server = _start_server(config, folder, stack)
    local = connect("local", device=config.device, dtype=config.dtype, root=folder / "local")
    stack.callback(local.close)
    here = Side(local.service, config, work)
    results = {kind: here.call(kind, i) for i in range(_TRIALS) for kind in KINDS}
    held = {kind: median(here.seconds[kind]) for kind in KINDS}
    seconds = {queued: held[kind] for queued, kind in _QUEUED.items()}
    empty.write(folder / "answers.json", messages_of(results), seconds)
    process, url = start_empty(folder / "answers.json")
    stack.callback(process.wait)
    stack.callback(process.terminate)
    sides = {LOCAL: here}
    for name, where, key in (
        (SERVER, server.url, server.key),
        (AT_ONCE, f"{url}/{empty.AT_ONCE}", "tml-none"),
        (HELD, f"{url}/{empty.HELD}", "tml-none"),
    ):
        service = tinker.ServiceClient(base_url=where, api_key=key)
        stack.callback(lambda close=service.close: close("success").result())
        sides[name] = Side(service, config, work)
    return sides, held


def _start_server(config: Config, folder: Path, stack: contextlib.ExitStack) -> Server:
    settings = {"device": config.device, "dtype": config.dtype}
    server = stack.enter_context(
        started_server([config.model_name], settings, folder / "served", folder)
    )
    environment = server.environment()
    os.environ.update({name: environment[name] for name in ("NO_PROXY", "no_proxy")})
    return server


def _result(config: Config, sides: dict[str, Side], held: dict[str, float]) -> dict[str, Any]:
    """Returns milliseconds of each kind of call: medians, quartiles, excess over the engine."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        found = {name: [1e3 * s for s in side.seconds[kind]] for name, side in sides.items()}
        middle = {name: median(values) for name, values in found.items()}
        # Of neighbouring calls, since the speed of the machine varies.
        above = [a - b for a, b in zip(found[SERVER], found[LOCAL], strict=True)]
        kinds[kind] = {
            "milliseconds": middle,
            "quartiles": {name: _quartiles(values) for name, values in found.items()},
            "above": median(above),
            "above_quartiles": _quartiles(above),
            "above_by_sdk": middle[AT_ONCE],
            "above_by_sdk_held": middle[HELD] - 1e3 * held[kind],
        }
    settings = {name: value for name, value in chz.asdict(config).items() if name != "output"}
    return {"settings": settings, "calls": kinds}


def _quartiles(values: list[float]) -> list[float]:
    return quantiles(values, n=4) if len(values) > 1 else values * 3


def _print_table(result: dict[str, Any], console: Console) -> None:
    columns = ("call", LOCAL, SERVER, "above", "SDK alone", "SDK alone, held")
    rows = []
    for kind, found in result["calls"].items():
        middle = found["milliseconds"]
        shown = [middle[LOCAL], middle[SERVER]]
        shown += [found[name] for name in ("above", "above_by_sdk", "above_by_sdk_held")]
        rows.append([kind, *(f"{value:.1f}" for value in shown)])
    lines = ["SDK alone: the same calls against a server that does nothing"]
    print_report("milliseconds a call, medians", columns, rows, lines, console)
