"""Computes log-probabilities in llama.cpp, in a separate process.

Run as a script, because llama.cpp exits the process if it refuses a file. It needs only the package
``xllamacpp``, and does not import this package.

python _llama_cpp.py request.json answer.json
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_FORCED = 1e9  # added to a logit, it forces that token


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Returns ``logprobs`` (for each prompt, [T - 1]), ``tokens`` (of each text) and ``version``.

    A log-probability is None if llama.cpp returns none, which happens for a token that ends within
    a character.

    ``request``: ``model`` and ``lora`` (paths), ``prompts`` (token ids), ``texts``.
    """
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params: Any = xllamacpp.CommonParams()
    params.model.path = request["model"]
    if request["lora"]:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["lora"], 1.0)]
    longest = max(map(len, request["prompts"]))
    # All prompts at once: each read of the weights serves one token of every prompt.
    count = len(request["prompts"])
    params.n_parallel, params.n_ctx = count, count * (longest + 8)
    params.kv_unified, params.warmup = False, False
    # Use float32 for everything that is not stored in another type.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # One thread, because several would wait for each other for seconds on a busy machine.
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads, threads.poll = 1, 0
    params.port, params.verbosity = 0, 1  # errors only
    server: Any = xllamacpp.Server(params)
    with ThreadPoolExecutor(count) as pool:
        prompts = request["prompts"]
        logprobs = list(pool.map(_logprobs, [server] * count, range(count), prompts))
    return {
        "logprobs": logprobs,
        "tokens": [_tokens(server, text) for text in request["texts"]],
        "version": getattr(xllamacpp, "__version__", "unknown"),
    }


def _logprobs(server: Any, slot: int, tokens: list[int]) -> list[float | None]:
    """Returns the log-probability of each token after the first. The server returns it for a
    sampled token, without the bias that forces the token."""
    found: list[float | None] = []
    for position in range(1, len(tokens)):
        answer = _post(
            server,
            "/completion",
            {
                "prompt": tokens[:position],
                "n_predict": 1,
                "n_probs": 1,
                "temperature": 0.0,
                "post_sampling_probs": False,
                "id_slot": slot,
                "cache_prompt": True,
                "logit_bias": [[tokens[position], _FORCED]],
            },
        )
        chosen = (answer.get("completion_probabilities") or [None])[0]
        if chosen is not None and chosen["id"] != tokens[position]:
            raise RuntimeError(f"token {chosen['id']} was sampled instead of {tokens[position]}")
        found.append(None if chosen is None else float(chosen["logprob"]))
    return found


def _tokens(server: Any, text: str) -> list[int]:
    body = {"content": text, "add_special": True, "parse_special": True}
    return _post(server, "/tokenize", body)["tokens"]


def _post(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.listening_address + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    # Ignore proxies of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    # The server's threads may never end.
    os._exit(0)
