"""What the engine does on a device, as functions from a base model to arrays that can be compared.

They are run with a base model on the CPU and with the same one on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import engine_reference as ref
import numpy as np
import torch
from image_prompts import example_of, group_of, prompt_of

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import (
    SamplingSettings,
    sample_request,
    score_request,
)
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scoring import Scorer
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import TrainingRun

Arrays = list[np.ndarray]
Job = Callable[[BaseModel], Arrays]

LOSSES: dict[str, dict[str, float] | None] = {
    "cross_entropy": None,
    "importance_sampling": None,
    "ppo": None,
    "cispo": None,
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "stable_reinforce": None,
}
_BUDGET = 64
_ADAM = AdamSettings(eps=1e-4, grad_clip_norm=0.1)
"""With eps=1e-12 the step of a gradient near zero depends on its rounding."""


def examples(vocab: int, loss: str, *, shared: bool, count: int = 4) -> list[Example]:
    """Sequences of random tokens and lengths; with ``shared`` they begin with the same 40."""
    rng, made = np.random.default_rng(0), []
    head = rng.integers(3, vocab, 40)
    for _ in range(count):
        tokens = rng.integers(3, vocab, int(rng.integers(12, 30)))
        if shared:
            tokens = np.concatenate([head, tokens])
        length = len(tokens)
        trained = (np.arange(length) > 3).astype(np.float32)
        if loss == "cross_entropy":
            inputs = {"weights": trained}
        else:
            inputs = {
                "logprobs": rng.normal(-5, 0.3, length),
                "advantages": rng.normal(0, 1, length) * trained,
            }
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = trained
        made.append(ref.example(tokens, target_tokens=np.roll(tokens, -1), **inputs))
    return made


def adapter_of(base: BaseModel, seed: int = 0) -> Adapter:
    """An adapter of all layers, routed experts too."""
    return ref.random_adapter(base, AdapterSpec(8), seed)


def make_run(base: BaseModel, budget: int = _BUDGET) -> TrainingRun:
    return TrainingRun("run", base, adapter_of(base), budget)


def _arrays(tensors: Iterable[torch.Tensor]) -> Arrays:
    return [tensor.detach().cpu().numpy().copy() for tensor in tensors]


def train(loss: str, *, shared: bool) -> Job:
    """A pass and a step with clipping: log-probabilities, loss, gradients, weights."""

    def job(base: BaseModel) -> Arrays:
        run = make_run(base)
        data = examples(base.vocab_size, loss, shared=shared)
        out = run.forward_backward(data, loss, LOSSES[loss])
        gradients = _arrays(run._gradients.values())
        norm = run.optim_step(_ADAM)["grad_norm"]
        numbers = np.array([out.metrics["loss:sum"], norm])
        return [*out.logprobs, numbers, *gradients, *_arrays(run.adapter.parameters().values())]

    return job


def custom(group_size: int | None) -> Job:
    """A custom loss, of groups or of the whole batch."""

    def loss_of(indices: Sequence[int], logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((values**2).sum() for values in logprobs) * 1e-3, {"rows": len(logprobs)}

    def job(base: BaseModel) -> Arrays:
        run = make_run(base)
        data = examples(base.vocab_size, "cross_entropy", shared=True)
        out = run.forward_backward_custom(data, loss_of, group_size)
        return [*out.logprobs, *_arrays(run._gradients.values())]

    return job


def recompute(base: BaseModel) -> Arrays:
    """A row so far over the budget that its layers are recomputed."""
    run = make_run(base, budget=4)
    data = examples(base.vocab_size, "ppo", shared=True, count=1)
    out = run.forward_backward(data, "ppo")
    return [*out.logprobs, *_arrays(run._gradients.values())]


def resume(base: BaseModel) -> Arrays:
    """Weights and optimizer state are saved to the CPU and loaded; training goes on from there."""
    run = make_run(base)
    data = examples(base.vocab_size, "ppo", shared=False)
    run.forward_backward(data, "ppo")
    run.optim_step(_ADAM)
    before = run.snapshot()
    saved = {name: tensor.detach().cpu() for name, tensor in run.adapter.parameters().items()}
    state = {name: tensor.cpu() for name, tensor in run.optimizer.state().items()}
    adapter = Adapter.load(run.adapter.spec, base.targets, saved, base.device, "a test")
    resumed = TrainingRun("resumed", base, adapter, _BUDGET)
    resumed.optimizer.load(state, "a test")
    for one in (run, resumed):
        one.forward_backward(data, "ppo")
        one.optim_step(_ADAM)
    weights = _arrays(run.adapter.parameters().values())
    for found, expected in zip(resumed.adapter.parameters().values(), weights, strict=True):
        np.testing.assert_array_equal(found.detach().cpu().numpy(), expected)
    # The snapshot of a sampler keeps the weights of its time.
    for found, expected in zip(before.parameters().values(), saved.values(), strict=True):
        np.testing.assert_array_equal(found.cpu().numpy(), expected.numpy())
    return weights


def sample(adapters: int = 1, topk: int = 0, **settings: Any) -> Job:
    """Two prompts with a common beginning, three samples of each, in one batch."""

    def job(base: BaseModel) -> Arrays:
        rng = np.random.default_rng(5)
        samplers = [Sampler(base, adapter_of(base, seed)) for seed in range(adapters)]
        head, requests = rng.integers(3, base.vocab_size, 30), []
        for number in range(2):
            tail = rng.integers(3, base.vocab_size, int(rng.integers(3, 60)))
            options = SamplingSettings(**{"max_tokens": 8, "seed": number, **settings})
            sampler, prompt = samplers[number % adapters], np.concatenate([head, tail])
            requests.append(sample_request(sampler, prompt, 3, options, topk_sample=topk))
        if base.kv_shapes is None:
            scheduler = FallbackSampler()
            ref.finish(scheduler, *requests)
        else:
            ref.run_batch(base, requests)
        found: Arrays = []
        for one in (one for request in requests for one in request.future.result(timeout=0)):
            found += [np.array(one.tokens), np.array(one.logprobs)]
            found += [array for pair in one.topk for array in pair]
        return found

    return job


def score(base: BaseModel) -> Arrays:
    """Log-probabilities, most probable tokens and given targets of three prompts in one batch."""
    rng, sampler = np.random.default_rng(6), Sampler(base, adapter_of(base))
    scorer, requests = Scorer(lambda _: _BUDGET), []
    for length in (20, 21, 22):
        prompt = rng.integers(3, base.vocab_size, length)
        targets = rng.integers(3, base.vocab_size, (length - 1, 2))
        request = score_request(sampler, prompt, logprobs=True, topk=3, targets=targets)
        requests.append(request)
    settings = SamplingSettings(max_tokens=1, seed=4)
    requests[0].sample = sample_request(sampler, requests[0].tokens, 1, settings)
    for request in requests:
        scorer.add(request)
    for request in requests:
        scorer.serve(request)
    found: Arrays = []
    for answer in (request.future.result(timeout=0) for request in requests):
        arrays = (answer.logprobs, answer.topk_logprobs, answer.topk_ids, answer.target_logprobs)
        found += [array for array in arrays if array is not None]
    (drawn,) = requests[0].sample.future.result(timeout=0)
    return [*found, np.array(drawn.tokens), np.array(drawn.logprobs)]


JOBS: dict[str, Job] = {
    **{
        f"{name}, {'shared' if shared else 'padded'} rows": train(name, shared=shared)
        for name in LOSSES
        for shared in (False, True)
    },
    "custom loss of the batch": custom(None),
    "custom loss of groups": custom(2),
    "recomputed row": recompute,
    "saved and resumed": resume,
    "sampling": sample(max_tokens=40),
    "sampling, greedy": sample(temperature=0.0),
    "sampling, top_k and top_p": sample(top_k=20, top_p=0.9, temperature=0.7),
    "sampling, two adapters": sample(adapters=2, topk=3),
    "scoring": score,
}


def train_images(base: BaseModel) -> Arrays:
    """Rows with 0, 1 and 3 images, and a group that shares a prompt with images."""
    run = ref.make_run(base, spec=AdapterSpec(4, train_vision=base.vision is not None))
    data = [example_of(prompt_of(base, count, count), count) for count in (1, 0, 3)]
    found: Arrays = []
    for batch in (data, group_of(base)):
        out = run.forward_backward(batch, "cross_entropy")
        found += [*out.logprobs, *_arrays(run.take_gradients().values())]
    return found


def sample_images(base: BaseModel) -> Arrays:
    """Two adapters in one batch, then the score of a prompt with images."""
    samplers = [Sampler(base, adapter_of(base, seed)) for seed in range(2)]
    requests = []
    for number, count in enumerate((2, 0, 1)):
        tokens, images = prompt_of(base, count, 20 + number)
        options = SamplingSettings(max_tokens=6, seed=number)
        requests.append(sample_request(samplers[number % 2], tokens, 2, options, images=images))
    ref.run_batch(base, requests)
    drawn = [one for request in requests for one in request.future.result(timeout=0)]
    tokens, images = prompt_of(base, 2, 30)
    scores = ref.score(samplers[0], tokens, logprobs=True, images=images)
    assert scores.logprobs is not None
    return [*(np.array(s) for one in drawn for s in (one.tokens, one.logprobs)), scores.logprobs]


IMAGE_JOBS: dict[str, Job] = {
    "images, training": train_images,
    "images, sampling and scoring": sample_images,
}
