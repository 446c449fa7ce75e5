"""llama.cpp on the model with the adapter merged, from ``xllamacpp``.

It decodes greedily and returns no log-probabilities, which is the fastest that it can do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine.sampling.requests import Request, warm_up
from benchmarks.engine.sampling.sides import CaseResult, Measurement, Setup
from tinker_cookbook.engine.devices import cpu_threads, peak_memory_bytes
from tinker_cookbook.weights import open_checkpoint
from tinker_cookbook.weights._gguf_files import write_model_file

_QUANTS = {"float32": "f32", "bfloat16": "bf16"}


def write_model(setup: Setup, file: Path) -> None:
    """Writes the model with its adapter in ``setup.dtype``, unless an earlier run did."""
    if not file.exists():
        checkpoint = open_checkpoint(str(setup.adapter), base_model=str(setup.folder))
        write_model_file(checkpoint, file, _QUANTS[setup.dtype])


def measure(file: Path, cases: Mapping[str, Sequence[Request]], seconds: float) -> Measurement:
    """Measures decode cases, each on prompts that are in the cache."""
    longest = max(len(r.prompt) + r.tokens for of in cases.values() for r in of)
    server = _server(file, max(map(len, cases.values())), longest + 8)
    loaded = _peak()
    found = {case: _decode(server, requests, seconds) for case, requests in cases.items()}
    notes = [f"xllamacpp {version('xllamacpp')}, adapter merged, greedy, no log-probabilities"]
    return Measurement(found, loaded, _peak(), cpu_threads(), notes)


def _server(file: Path, rows: int, context: int) -> Any:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = str(file), rows, rows * context
    params.kv_unified = False
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = cpu_threads()
    params.port, params.verbosity = 0, 1  # errors only
    return xllamacpp.Server(params)


def _decode(server: Any, requests: Sequence[Request], seconds: float) -> CaseResult:
    rows, tokens = len(requests), requests[0].tokens
    _complete(server, warm_up(requests, max(map(max, (r.prompt for r in requests)))), 4)
    start = time.perf_counter()
    _complete(server, requests, 1)  # the prompts, which stay in the cache
    prompts = time.perf_counter() - start
    tried = min(_complete(server, requests, min(6, tokens)))
    tokens = min(tokens, max(8, int(seconds / tried)))
    used = time.process_time()
    steps = _complete(server, requests, tokens)
    used = time.process_time() - used
    return CaseResult(
        tokens_per_second=rows / median(steps),
        fastest=None,
        cpu_seconds=used / (rows * tokens),
        prompt_seconds=prompts,
        measured=f"{tokens} steps",
        peak_bytes=_peak(),
    )


def _complete(server: Any, requests: Sequence[Request], tokens: int) -> list[float]:
    """Seconds of a step by llama.cpp's own clock, for each of the requests, all at once."""

    def complete(slot: int) -> float:
        body = {
            "prompt": requests[slot].prompt,
            "n_predict": tokens,
            "id_slot": slot,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
        }
        found = server.handle_completions(body)["timings"]
        # The first token comes from the prompt's pass.
        return found["predicted_ms"] / 1e3 / max(1, found["predicted_n"] - 1)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(complete, range(len(requests))))


def _peak() -> int:
    return peak_memory_bytes(torch.device("cpu"))
