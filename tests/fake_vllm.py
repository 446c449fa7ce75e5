"""An HTTP server with the API of vLLM 0.32, as far as sampling uses it.

Its numbers are real: transformers computes the base model, and peft the adapters, which it loads
from the folders that it is sent. Run as a program it has no model (each token is equally probable)
and starts at once: ``python fake_vllm.py --model FOLDER --port 8001 …``.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

BASE = "base"


class Uniform:
    """A model of eight tokens that are all equally probable."""

    max_length = 512

    def load(self, name: str, folder: str) -> None:
        assert (Path(folder) / "adapter_config.json").is_file()

    def unload(self, name: str) -> None: ...

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def steps(self, name: str, prompt: list[int], n: int) -> Iterator[np.ndarray]:
        while True:
            yield np.full((n, 8), -np.log(8))


class Transformers:
    """The model of a folder, computed by transformers and peft."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch, self._lock = torch, threading.Lock()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._peft: Any = None
        files = list(Path(folder).glob("tokenizer*"))
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder) if files else None
        self.max_length = self._model.config.max_position_embeddings

    def load(self, name: str, folder: str) -> None:
        from peft import PeftModel

        with self._lock:
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self._model, folder, adapter_name=name)
                self._peft.eval()
            else:
                self._peft.load_adapter(folder, adapter_name=name)

    def unload(self, name: str) -> None:
        with self._lock:
            if len(self._peft.peft_config) > 1:  # peft keeps the last one
                self._peft.delete_adapter(name)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def steps(self, name: str, prompt: list[int], n: int) -> Iterator[np.ndarray]:
        """Yields the log-probabilities [n, V] of the next token; ``send`` gives the tokens [n]."""
        from transformers import DynamicCache

        cache, rows = DynamicCache(config=self._model.config), [prompt]
        while True:
            with self._lock, self._torch.no_grad():
                logits = self._logits(name, self._torch.tensor(rows), cache)
            if len(rows) < n:
                cache.reorder_cache(self._torch.zeros(n, dtype=self._torch.long))
                logits = logits.expand(n, -1)
            drawn = yield logits.float().log_softmax(-1).numpy()
            rows = [[int(token)] for token in drawn]

    def _logits(self, name: str, ids: Any, cache: Any) -> Any:
        if name != BASE:
            self._peft.set_adapter(name)
        elif self._peft is not None:
            with self._peft.disable_adapter():
                return self._peft(input_ids=ids, past_key_values=cache, use_cache=True).logits[
                    :, -1
                ]
        model = self._model if self._peft is None else self._peft
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]


class FakeVLLM:
    """A running server; as a context it ends itself.

    ``bodies`` has the requests for samples, ``adapters`` the folders that are loaded, ``events``
    what else it was told.
    """

    def __init__(
        self, model: Any = None, root: str = "model", port: int = 0, key: str | None = None
    ):
        self.model = model or Uniform()
        self.root, self.key = root, key
        self.bodies: list[dict[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.events: list[str] = []
        self.aborted = 0
        self.asleep = False
        self.before: Callable[[], None] = lambda: None
        """Called before each token."""
        self.error: tuple[int, str] | None = None
        """Answer to each request for samples."""
        self.paths = ["/v1/load_lora_adapter", "/v1/completions"]
        fake = self

        class Handler(_Handler):
            server_of_fake = fake

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # an error in ``before`` cuts the connection
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> FakeVLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Step = tuple[int, int, float, dict[int, float], str | None]
"""Sample, token, log-probability, the most probable tokens, and why the sample ended."""


def sample(fake: FakeVLLM, body: dict[str, Any], gone: Callable[[], bool]) -> Iterator[list[Step]]:
    """Yields the new tokens of each step."""
    n, texts = body["n"], body.get("stop") or []
    assert body["temperature"] > 0 or n == 1, "n must be 1 when using greedy sampling"
    seed = body.get("seed")
    rngs = [np.random.default_rng(None if seed is None else seed + i) for i in range(n)]
    tokens: list[list[int]] = [[] for _ in range(n)]
    running = set(range(n))
    steps = fake.model.steps(body["model"], body["prompt"], n)
    logprobs = next(steps)
    while running:
        fake.before()
        if gone():
            fake.aborted += 1
            return
        out = []
        drawn = np.zeros(n, dtype=np.int64)
        for i in sorted(running):
            drawn[i] = _draw(logprobs[i], body, tokens[i], rngs[i])
            tokens[i].append(int(drawn[i]))
            order = np.argsort(-logprobs[i])[: body["logprobs"]].tolist()
            best = {int(t): float(logprobs[i][t]) for t in [int(drawn[i]), *order]}
            reason, late = None, len(tokens[i]) >= body["min_tokens"]
            stop = int(drawn[i]) in body["stop_token_ids"]
            stop = stop or any(text in fake.model.decode(tokens[i]) for text in texts)
            if late and stop:
                reason = "stop"
            elif len(tokens[i]) >= body["max_tokens"]:
                reason = "length"
            if reason:
                running.discard(i)
            out.append((i, int(drawn[i]), float(logprobs[i][drawn[i]]), best, reason))
        yield out
        if running:
            logprobs = steps.send(drawn)  # type: ignore[attr-defined]


def _draw(logprobs: np.ndarray, body: dict[str, Any], so_far: list[int], rng: Any) -> int:
    logits = logprobs.astype(np.float64)
    for token, bias in (body.get("logit_bias") or {}).items():
        logits[int(token)] += bias
    if len(so_far) < body["min_tokens"]:
        logits[body["stop_token_ids"]] = -np.inf
    if so_far:
        ids, counts = np.unique(so_far, return_counts=True)
        logits[ids] -= body["frequency_penalty"] * counts + body["presence_penalty"]
    if body["temperature"] == 0:
        return int(logits.argmax())
    logits = logits / body["temperature"]
    order = np.argsort(-logits)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    if body["top_k"]:
        p[order[body["top_k"] :]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= body["top_p"]]] = 0
    return int(rng.choice(len(p), p=p / p.sum()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_fake: FakeVLLM

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        fake = self.server_of_fake
        card = {
            "id": BASE,
            "root": fake.root,
            "parent": None,
            "max_model_len": fake.model.max_length,
        }
        adapters = [{"id": n, "root": f, "parent": BASE} for n, f in fake.adapters.items()]
        if self.path == "/health":
            self._answer(200, {})
        elif self.path == "/openapi.json":
            self._answer(200, {"paths": {path: {} for path in fake.paths}})
        elif self._allowed():
            self._answer(200, {"object": "list", "data": [card, *adapters]})

    def do_POST(self) -> None:
        fake = self.server_of_fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        if path.startswith("/v1") and not self._allowed():
            return
        if path in ("/sleep", "/wake_up"):
            fake.asleep = path == "/sleep"
            fake.events.append(self.path)
            self._answer(200, {"status": "ok"})
        elif path == "/v1/load_lora_adapter":
            if body["lora_name"] in fake.adapters:
                return self._refuse(400, f"{body['lora_name']} has already been loaded")
            fake.model.load(body["lora_name"], body["lora_path"])
            fake.adapters[body["lora_name"]] = body["lora_path"]
            fake.events.append(f"load {body['lora_name']}")
            self._answer(200, {})
        elif path == "/v1/unload_lora_adapter":
            fake.adapters.pop(body["lora_name"])
            fake.model.unload(body["lora_name"])
            fake.events.append(f"unload {body['lora_name']}")
            self._answer(200, {})
        else:
            self._complete(fake, body)

    def _complete(self, fake: FakeVLLM, body: dict[str, Any]) -> None:
        fake.bodies.append(body)
        assert not fake.asleep, "a request reached a server that sleeps"
        # As in vLLM 0.32, where this ends the whole server.
        assert "prompt_logprobs" not in body
        assert not body.get("echo")
        if fake.error is not None:
            return self._refuse(*fake.error)
        if body["model"] != BASE and body["model"] not in fake.adapters:
            return self._refuse(404, f"The model `{body['model']}` does not exist.")
        steps = sample(fake, body, self._gone)
        if body.get("stream"):
            return self._stream(steps)
        choices = [_choice(i) for i in range(body["n"])]
        for step in steps:
            for entry in step:
                _extend(choices[entry[0]], *entry[1:])
        if not any(choice["finish_reason"] is None for choice in choices):
            details = {"cached_tokens": 16 * (len(body["prompt"]) // 16)}
            self._answer(200, {"choices": choices, "usage": {"prompt_tokens_details": details}})

    def _stream(self, steps: Iterator[list[Step]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for step in steps:
            for entry in step:
                choice = _choice(entry[0])
                _extend(choice, *entry[1:])
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _gone(self) -> bool:
        # A client that waits sends nothing: what can be read is the end of its connection.
        return bool(select.select([self.connection], [], [], 0)[0])

    def _allowed(self) -> bool:
        key = self.server_of_fake.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._answer(401, {"error": "Unauthorized"})
        return False

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "code": status}})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")  # so that none is left when it ends
        self.end_headers()
        self.wfile.write(data)


def _choice(index: int) -> dict[str, Any]:
    logprobs = {"token_logprobs": [], "top_logprobs": []}
    return {"index": index, "token_ids": [], "logprobs": logprobs, "finish_reason": None}


def _extend(choice: dict[str, Any], token: int, logprob: float, best: Any, reason: Any) -> None:
    choice["token_ids"].append(token)
    choice["logprobs"]["token_logprobs"].append(logprob)
    best = {f"token_id:{t}": value for t, value in best.items()}
    choice["logprobs"]["top_logprobs"].append(best)
    choice["finish_reason"] = reason


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--delay", type=float, default=0, help="seconds for each token")
    options, rest = parser.parse_known_args()
    if options.crash:
        raise ValueError("no kernel image is available")
    print("arguments", *rest, flush=True)
    print("device", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    fake = FakeVLLM(root=options.model, port=options.port, key=os.environ["VLLM_API_KEY"])
    fake.before = lambda: time.sleep(options.delay)
    threading.Event().wait()


if __name__ == "__main__":
    main()
