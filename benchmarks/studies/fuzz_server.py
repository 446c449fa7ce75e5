"""Ten minutes of any requests: `python benchmarks/studies/fuzz_server.py MODEL FOLDER SECONDS`.

Needs `pip install schemathesis`. A server on MODEL gets requests made from its OpenAPI document,
right and wrong ones, half of them with the names of a session, a model and checkpoints that exist.
Another client trains meanwhile; its losses must equal those of an undisturbed run.
Prints what came back; ends with 1 for an answer of 500 and above, a dead server, or another loss.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import tinker

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from serving import Serving

OWNERS = ("fuzzer", "other")


def main(model: str, folder: Path, seconds: int) -> int:
    """The exit status."""
    owners = json.dumps(list(OWNERS)).replace('"', "").strip("[]").replace(" ", "")
    serving = Serving(folder / "root", {"model_name": model, "owners": owners}).start()
    known = make_known(serving, model)
    alone = losses(serving, model, threading.Event(), 1)
    over, found = threading.Event(), []
    trainer = threading.Thread(target=lambda: found.extend(losses(serving, model, over, 1 << 30)))
    trainer.start()
    env = {
        **os.environ,
        "FUZZ_KNOWN": json.dumps(known),
        "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("fuzz_hooks.py")),
    }
    events = folder / "events.ndjson"
    command = [
        "st", "run", f"{serving.url}/openapi.json", "-H", f"X-API-Key: {serving.key(OWNERS[0])}",
        "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing,stateful",
        "--max-examples", "100000", "--max-time", str(seconds), "--continue-on-failure",
        "--request-timeout", "60", "--report-ndjson-path", str(events),
    ]  # fmt: skip
    status = subprocess.run(command, env=env, check=False).returncode
    over.set()
    trainer.join()
    assert serving.process is not None
    alive = serving.process.poll() is None and httpx.get(f"{serving.url}/healthz").is_success
    same = all(part == alone for part in chunks(found, 5))
    print(f"schemathesis: exit {status}; answers {dict(sorted(statuses(events).items()))}")
    print(f"server alive: {alive}; {len(found)} losses of another client, equal: {same}")
    serving.stop()
    return int(status != 0 or not alive or not same)


def make_known(serving: Serving, model: str) -> dict[str, list[Any]]:
    """Names of what the fuzzer owns."""
    service = tinker.ServiceClient(base_url=serving.url, api_key=serving.key(OWNERS[0]))
    training = service.create_lora_training_client(model, rank=4)
    training.forward_backward([datum()], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    state = training.save_state("state").result().path
    sampler = training.save_weights_for_sampler("sampler").result().path
    run = training.get_info().model_id
    session = service.holder.get_session_id()
    return {
        "session_id": [session],
        "model_id": [run, run.split(":")[0]],
        "training_run_id": [run],
        "run_id": [run],
        "path": [state, sampler, "state"],
        "tinker_path": [state, sampler],
        "model_path": [sampler, state],
        "checkpoint_id": ["weights/state", "sampler_weights/sampler"],
        "kind": ["weights", "sampler_weights"],
        "name": ["state", "sampler"],
        "base_model": [model],
        "model": [model, sampler],
        "seq_id": list(range(20)),
        "sampling_session_id": [f"{session}:sample:{i}" for i in range(3)],
    }


def losses(serving: Serving, model: str, over: threading.Event, rounds: int) -> list[float]:
    """Of runs of five steps one after the other, each of them the same."""
    service = tinker.ServiceClient(base_url=serving.url, api_key=serving.key(OWNERS[1]))
    out: list[float] = []
    while not over.is_set() and len(out) < 5 * rounds:
        training = service.create_lora_training_client(model, rank=4, seed=1)
        for _ in range(5):
            passed = training.forward_backward([datum()], "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
            out.append(passed.metrics["loss:sum"])
    return out


def datum() -> tinker.Datum:
    """A sequence of any tokens."""
    tokens = list(range(3, 40))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def chunks(values: list[float], size: int) -> list[list[float]]:
    """Whole ones alone."""
    return [values[i : i + size] for i in range(0, len(values) - size + 1, size)]


def statuses(events: Path) -> Counter[int]:
    """How often each status was answered."""
    counted: Counter[int] = Counter()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "status_code" in value:
                counted[int(value["status_code"])] += 1
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    with events.open(encoding="utf-8") as lines:
        for line in lines:
            walk(json.loads(line))
    return counted


if __name__ == "__main__":
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else 600
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), limit))
