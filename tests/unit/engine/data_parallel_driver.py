"""A training program for ``test_data_parallel``: one process, or several under torchrun.

``data_parallel_driver.py MODEL OUT [CHECKPOINT]`` writes what it computed to ``OUT``. A pass with a
marked datum fails in one process and in rank 1, which also writes a digest of the weights it
receives. ``data_parallel_driver.py recipes.NAME OUT SETTINGS…`` runs a recipe; rank 1 kills itself.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tinker_cookbook  # noqa: F401  (before torch)

RANK = int(os.environ.get("RANK", "0"))
ALONE = "RANK" not in os.environ
DEVICE = os.environ.get("DATA_PARALLEL_DEVICE", "cpu")
SHARD = os.environ.get("DATA_PARALLEL_SHARD") == "1"
"""Whether the base model is divided among the processes."""
REPLAY = os.environ.get("DATA_PARALLEL_REPLAY") == "1"
"""Whether training replays the sampler's choices of experts."""
BASE_DTYPE = os.environ.get("DATA_PARALLEL_BASE_DTYPE", "auto")
MARKS = {256: "before the layers", 257: "in a layer", 258: "in a layer's backward pass"}
"""A pass with one of these tokens fails there."""
SCARCE = (254, 255)
"""Micro-batches with one of these tokens fit into the memory of that rank only if they are small.
"""

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tinker import types  # noqa: E402

from tinker_cookbook.backends import connect  # noqa: E402
from tinker_cookbook.backends.engine_options import EngineSettings  # noqa: E402
from tinker_cookbook.engine.extensions.parallel.sharding import FSDPMatrix  # noqa: E402


def datum(
    rng: np.random.Generator, length: int, prefix: list[int] | None = None, broken: bool = False
) -> types.Datum:
    tokens = [*(prefix or []), *rng.integers(3, 250, length).tolist()]
    targets = [*tokens[1:], 2]
    inputs = {
        "target_tokens": targets,
        "weights": rng.uniform(0, 1, len(tokens)).astype(np.float32).tolist(),
        "logprobs": rng.normal(-5, 0.3, len(tokens)).astype(np.float32).tolist(),
        "advantages": rng.normal(0, 1, len(tokens)).astype(np.float32).tolist(),
    }
    if broken:
        inputs["advantages"][3] = float("nan")
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def coupled(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
    """Each datum's gradient depends on all others."""
    means = torch.stack([one.mean() for one in logprobs])
    return (means.softmax(0) * torch.arange(len(means))).sum() * 10, {"spread": means.std().item()}


def pairs(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
    margins = torch.stack([a.sum() - b.sum() for a, b in zip(logprobs[::2], logprobs[1::2])])  # noqa: B905
    return -torch.nn.functional.logsigmoid(0.1 * margins).sum(), {"pairs": float(len(margins))}


pairs.group_size = 2  # type: ignore[attr-defined]


def broken(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
    raise ZeroDivisionError("of the caller's loss")


def digest(adapter: Any) -> str:
    tensors = adapter.parameters().values()
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()


def note_weights(out: Path) -> None:
    from tinker_cookbook.engine.extensions.parallel import follower

    receive = follower.receive_weights

    def receive_and_note(adapter: Any) -> None:
        receive(adapter)
        with open(f"{out}.rank{RANK}", "a") as file:
            print(digest(adapter), file=file)

    follower.receive_weights = receive_and_note


def break_marked_passes() -> None:
    from tinker_cookbook.engine.model.lora import AdapterLinear
    from tinker_cookbook.engine.training.micro_batch import MicroBatchPass

    body, product = MicroBatchPass.body, AdapterLinear.forward
    breaking = [""]

    def fail(*_: Any) -> None:
        raise ValueError(f"this rank cannot compute that datum, {breaking[0]}")

    def body_or_fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = (MARKS[t] for t in MARKS if any(t in one.tokens for one in self._examples))
        breaking[0] = next(found, "")
        if breaking[0] == "before the layers":
            fail()
        return body(self, *args, **kwargs)

    def product_or_fail(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = product(self, x)
        if "layers.1." in self.name and "o_proj" in self.name:
            if breaking[0] == "in a layer":
                fail()
            if breaking[0] == "in a layer's backward pass" and out.requires_grad:
                out.register_hook(fail)
        return out

    MicroBatchPass.body, AdapterLinear.forward = body_or_fail, product_or_fail


def limit_memory() -> None:
    from tinker_cookbook.engine.training.micro_batch import MicroBatchPass

    body = MicroBatchPass.body
    marks = SCARCE if ALONE else SCARCE[RANK : RANK + 1]

    def body_in_memory(self: Any, *, grad: bool, checkpoint: float) -> Any:
        scarce = any(mark in one.tokens for mark in marks for one in self._examples)
        if scarce and self._batch.tokens.numel() > 42 * (1 + checkpoint):
            raise torch.OutOfMemoryError("out of memory")
        return body(self, grad=grad, checkpoint=checkpoint)

    MicroBatchPass.body = body_in_memory


def run_recipe(recipe: str, out: Path) -> None:
    """Runs a recipe in which rank 1 ends at its 8th pass, without warning."""
    if RANK:
        from tinker_cookbook.engine.extensions.parallel.follower import Follower

        run, passes = Follower._forward_backward, []

        def run_or_die(self: Any, *args: Any, **kwargs: Any) -> Any:
            passes.append(1)
            if len(passes) == 8:
                out.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            return run(self, *args, **kwargs)

        Follower._forward_backward = run_or_die
    runpy.run_module(recipe, run_name="__main__", alter_sys=True)


class Program:
    """The steps, and what they gave."""

    def __init__(self, model: str) -> None:
        settings = EngineSettings(BASE_DTYPE, REPLAY, shard_base=SHARD)
        self.connection = connect("local", device=DEVICE, dtype="float32", engine_settings=settings)
        self.service: Any = self.connection.service
        self.client: Any = self.service.create_lora_training_client(model, rank=4, seed=5)
        self.out: dict[str, Any] = {"digests": [], "errors": {}}
        self.rng = np.random.default_rng(0)

    def note(self, name: str, output: types.ForwardBackwardOutput) -> None:
        logprobs = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
        self.out[name] = logprobs, dict(output.metrics)

    def step(self, **settings: float) -> dict[str, float]:
        run = self.client._created.result()
        # With this eps a step of a tiny gradient is tiny too, not one of full length whose sign
        # rounding decides.
        params = types.AdamParams(learning_rate=1e-3, eps=1e-3, **settings)
        metrics = self.client.optim_step(params).result().metrics
        self.out["digests"].append(digest(run.adapter))
        return metrics

    def fails(self, name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            self.out["errors"][name] = f"{type(error).__name__}: {error}"

    def train(self) -> None:
        client, rng = self.client, self.rng
        self.out["digests"].append(digest(client.result()._created.result().adapter))
        plain = [datum(rng, int(n)) for n in rng.integers(12, 60, 9)]
        prefix = rng.integers(3, 250, 40).tolist()
        shared = [datum(rng, 10 + n, prefix) for n in range(8)]
        for name in ("cross_entropy", "ppo", "importance_sampling"):
            # Two passes add up before a step.
            self.note(f"{name} plain", client.forward_backward(plain, name).result())
            self.note(f"{name} shared", client.forward_backward(shared, name).result())
            self.out[f"{name} step"] = self.step(grad_clip_norm=1.0)
        self.note("forward", client.forward(plain, "ppo").result())
        for name, loss in (("coupled", coupled), ("pairs", pairs)):
            data = shared + plain[:4]
            self.note(name, client.forward_backward_custom(data, loss).result())
            self.out[f"{name} step"] = self.step()
        self.note("one datum", client.forward_backward(plain[:1], "ppo").result())
        self.out["one datum step"] = self.step()
        self.train_short_of_memory()
        self.out["path"] = client.save_state("trained").result().path

    def train_short_of_memory(self) -> None:
        """Rows that fit when layers are recomputed, and micro-batches that fit when halved."""
        client, rng = self.client, self.rng
        # Rank 0 gets the longest datum, so some of the others go to rank 1.
        plain = [datum(rng, 61), datum(rng, 20)]
        self.note("before", client.forward_backward(plain, "ppo").result())
        for rank, mark in enumerate(SCARCE):
            long = [*plain, *[datum(rng, 55, [mark]) for _ in range(4)]]
            short = [*plain, *[datum(rng, 18, [mark]) for _ in range(12)]]
            self.note(f"long rows, rank {rank}", client.forward_backward(long, "ppo").result())
            custom = client.forward_backward_custom(short, pairs)
            self.note(f"short rows, rank {rank}", custom.result())
        # The gradients of passes that were repeated count once, those of the first pass too.
        self.out["short of memory step"] = self.step()

    def refuse(self) -> None:
        client, rng = self.client, self.rng
        good = [datum(rng, 20) for _ in range(6)]
        bad = datum(rng, 20, broken=True)
        self.fails("datum", lambda: client.forward_backward([*good, bad], "ppo").result())
        self.fails("after datum", self.step)
        for mark, where in MARKS.items():
            # Rank 0 gets the longest datum, so some of the marked ones go to rank 1.
            failing = [datum(rng, 30), datum(rng, 28), *[datum(rng, 19, [mark]) for _ in range(4)]]
            for name, loss in (("ppo", None), ("all", coupled), ("groups", pairs)):
                client.forward_backward(good, "ppo").result()
                data = [*failing, *good]
                call = client.forward_backward if loss is None else client.forward_backward_custom
                self.fails(
                    f"{where}, {name}",
                    lambda call=call, data=data, loss=loss: call(data, loss or "ppo").result(),
                )
                self.fails(f"after {where}, {name}", self.step)
        for name in ("coupled", "grouped"):
            loss: Any = lambda data, logprobs: broken(data, logprobs)  # noqa: E731
            if name == "grouped":
                loss.group_size = 2
            self.fails(name, lambda loss=loss: client.forward_backward_custom(good, loss).result())
            self.fails(f"after {name}", self.step)
        # Nothing of all this is left.
        self.note("after errors", client.forward_backward(good, "ppo").result())
        self.out["after errors step"] = self.step()

    def sample(self) -> None:
        client = self.client
        sampler = client.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([1, 5, 9])
        params = types.SamplingParams(max_tokens=8, seed=3)
        answer = sampler.sample(prompt, 3, params).result()
        self.out["samples"] = [list(one.tokens) for one in answer.sequences]
        self.out["scores"] = sampler.compute_logprobs(prompt).result()[1:]
        self.out["reasons"] = self.connection.reasons
        if REPLAY:
            self.replay(prompt.to_ints(), self.out["samples"])

    def replay(self, prompt: list[int], answers: list[list[int]]) -> None:
        """Trains on samples with other experts than the routers would choose."""
        for chosen, _ in self.client._created.result().base.replay._known._values.values():
            chosen[:] = (chosen + 1) % 4
        data = []
        for answer in answers:
            tokens = [*prompt, *answer]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
                )
            )
        # The longest goes to rank 0, which has the choices, and the samples to rank 1.
        data.append(datum(self.rng, 30))
        self.note("replayed", self.client.forward_backward(data, "cross_entropy").result())
        custom = self.client.forward_backward_custom(data, pairs)
        self.note("replayed, custom", custom.result())
        self.out["replayed step"] = self.step()

    def go_on(self, path: str) -> None:
        self.client = self.service.create_training_client_from_state_with_optimizer(path)
        rng = np.random.default_rng(1)
        data = [datum(rng, 25) for _ in range(5)]
        for name in ("resumed", "and on"):
            self.note(name, self.client.forward_backward(data, "ppo").result())
            self.out[f"{name} step"] = self.step()

    def queue(self) -> None:
        """Submits operations that are still queued when the script ends."""
        rng = np.random.default_rng(2)
        for _ in range(4):
            self.client.forward_backward([datum(rng, 50) for _ in range(8)], "ppo")
        self.client.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-3))
        self.client.save_state("queued")
        self.out["queued path"] = f"tinker://{self.client._run_id}/weights/queued"

    def count_kept(self) -> None:
        """Notes how many numbers of the layers' matrices this rank has, and how many there are."""
        modules = self.client._created.result().base._decoder.modules()
        parts: list[Any] = [p for one in modules if isinstance(one, FSDPMatrix) for p in one.parts]
        local = sum(part.to_local().numel() for part in parts)
        self.out["kept"] = local, sum(part.numel() for part in parts)


def main() -> None:
    model, out, *checkpoint = sys.argv[1:]
    if model.startswith("recipes."):
        del sys.argv[1:3]
        run_recipe(model, Path(out))
        return
    if RANK:
        note_weights(Path(out))
    if RANK or ALONE:
        break_marked_passes()
    limit_memory()
    if SHARD:
        from tinker_cookbook.engine.engine import Engine

        # Several micro-batches on each rank, which follows the plan of rank 0.
        Engine.token_budget = lambda self, base, *_: base.limits.budget(30 if RANK else 100)
    program = Program(model)
    if not checkpoint:
        program.train()
        program.refuse()
        program.sample()
    program.go_on(checkpoint[0] if checkpoint else program.out["path"])
    if SHARD:
        program.count_kept()
    program.queue()
    Path(out).write_bytes(pickle.dumps(program.out))


if __name__ == "__main__":
    main()
