"""Parity check: compares the engine on this device with transformers and autograd on the CPU.

It uses a tiny model, and finds a wrong kernel, driver or library in seconds, before a run fails to
learn.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.sampling.requests import SampleRequest, SamplingSettings
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import TrainingRun

_LENGTHS = (24, 17, 24)  # the first and last share a prefix, like the answers of a group
_SHARED = 9
_STEPS = 2  # B starts at zero, so the first step does not change A
_ADAM = AdamSettings(learning_rate=1e-2, eps=1e-8)
_RANK = 4
_NEW_TOKENS = 8
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest allowed difference of log-probabilities in nats; in half precision, of the median."""


@dataclass(frozen=True)
class ParityCheck:
    """One comparison: the largest (or median) difference, and the tolerance."""

    name: str
    difference: float
    tolerance: float
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is a number within the tolerance."""
        return not self.error and self.difference <= self.tolerance


def check_parity(device: str, dtype: torch.dtype) -> list[ParityCheck]:
    """Compares in float32, and in ``dtype`` if different; errors are part of the result."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = _write_model(Path(name)), _examples()
        checks: list[ParityCheck] = []
        for used in dict.fromkeys((torch.float32, dtype)):
            label = str(used).removeprefix("torch.")
            try:
                checks += _compare(folder, data, device, used, label)
            except Exception as error:  # every failure is reported to the user
                # Errors of compilers have hundreds of lines.
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                checks.append(ParityCheck(f"{label}: engine", float("nan"), 0, text))
        return checks


def _compare(
    folder: Path, data: list[Example], device: str, dtype: torch.dtype, label: str
) -> list[ParityCheck]:
    exact, tolerance = dtype == torch.float32, TOLERANCES[dtype]
    with closing(Engine(device, label)) as engine:
        run = engine.submit(_create_run, engine, folder).result()
        reference = _Reference(folder, run)
        output = engine.submit(run.forward_backward, data, "cross_entropy", backward=False).result()
        found = [
            ParityCheck(
                f"{label}: log-probabilities against transformers",
                _difference(output.logprobs, reference.logprobs(data), exact),
                tolerance,
            )
        ]
        if exact:
            found.append(_training_check(engine, run, reference, data, label))
        # After the training steps, so that the adapter affects sampling.
        return [*found, _sampling_check(engine, run, reference, label, exact, tolerance)]


def _create_run(engine: Engine, folder: Path) -> TrainingRun:
    # Not ``Engine.create_run``, which needs a tokenizer that this model does not have.
    base = BaseModel("doctor", folder, engine.choice.device, engine.choice.dtype)
    adapter = Adapter.create(AdapterSpec(rank=_RANK), base.targets, 0, base.device)
    return TrainingRun("doctor", base, adapter, engine.token_budget(base), pause=engine.pause)


def _training_check(
    engine: Engine, run: TrainingRun, reference: _Reference, data: list[Example], label: str
) -> ParityCheck:
    for _ in range(_STEPS):
        engine.submit(run.forward_backward, data, "cross_entropy").result()
        engine.submit(run.optim_step, _ADAM).result()
        reference.step(data)
    weights = [tensor.detach().cpu() for tensor in run.adapter.parameters().values()]
    differences = [
        (ours - theirs.detach()).abs().max().item()
        for ours, theirs in zip(weights, reference.parameters(), strict=True)
    ]
    # AdamW moves a weight by about the learning rate per step, so this is 1% of a step.
    name = f"{label}: adapter after {_STEPS} steps of AdamW against autograd"
    return ParityCheck(name, max(differences), _ADAM.learning_rate / 100)


def _sampling_check(
    engine: Engine,
    run: TrainingRun,
    reference: _Reference,
    label: str,
    exact: bool,
    tolerance: float,
) -> ParityCheck:
    """Compares the log-probabilities of sampled tokens, computed with the KV cache."""
    prompt = _examples()[0].tokens.tolist()
    sampler = Sampler(run.base, engine.submit(run.snapshot).result())
    settings = SamplingSettings(max_tokens=_NEW_TOKENS, seed=1)
    request = SampleRequest(sampler, np.asarray(prompt), 2, settings, limit=_NEW_TOKENS)
    samples = engine.sample(request).result()
    whole = [np.asarray([*prompt, *sample.tokens]) for sample in samples]
    scored = reference.logprobs(
        [Example(tokens[:-1], {"target_tokens": tokens[1:]}) for tokens in whole]
    )
    expected = [row[-len(s.tokens) :] for row, s in zip(scored, samples, strict=True)]
    drawn = [np.asarray(sample.logprobs) for sample in samples]
    difference = _difference(drawn, expected, exact)
    return ParityCheck(f"{label}: sampled tokens against transformers", difference, tolerance)


def _difference(ours: list[np.ndarray], theirs: list[np.ndarray], exact: bool) -> float:
    gaps = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    # NaN stays NaN and therefore fails.
    return float(gaps.max() if exact else np.median(gaps))


class _Reference:
    """transformers' own model in float32 on the CPU; adapters are added to its weights."""

    def __init__(self, folder: Path, run: TrainingRun) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._model = model.requires_grad_(False).eval()
        self._scaling = run.adapter.spec.scaling
        # Copy the engine's initial adapter, so that both train the same one.
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {
            name: (
                a.detach().cpu().clone().requires_grad_(),
                b.detach().cpu().clone().requires_grad_(),
            )
            for name, (a, b) in run.adapter.tensors.items()
        }
        adam = _ADAM
        self._optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )

    def parameters(self) -> list[Tensor]:
        """Returns A and B of each layer, in the order of the engine's adapter."""
        return [tensor for pair in self._pairs.values() for tensor in pair]

    def logprobs(self, data: list[Example]) -> list[np.ndarray]:
        """Returns the log-probabilities [T] of each example's targets."""
        with torch.no_grad():
            return [self._of(example).numpy() for example in data]

    def step(self, data: list[Example]) -> None:
        """Takes one step of AdamW on the summed loss."""
        self._optimizer.zero_grad()
        weights = [torch.from_numpy(example.inputs["weights"]) for example in data]
        rows = zip(data, weights, strict=True)
        loss = -sum((self._of(example) * weight).sum() for example, weight in rows)
        assert isinstance(loss, Tensor)
        loss.backward()
        self._optimizer.step()

    def _of(self, example: Example) -> Tensor:
        merged = {
            f"{name}.weight": self._model.get_submodule(name).weight + self._scaling * (b @ a)
            for name, (a, b) in self._pairs.items()
        }
        tokens = torch.from_numpy(example.tokens)[None]
        arguments = {"input_ids": tokens, "use_cache": False}
        logits = torch.func.functional_call(self._model, merged, (), arguments).logits[0]
        targets = torch.from_numpy(example.inputs["target_tokens"])[:, None]
        return logits.log_softmax(-1).gather(1, targets)[:, 0]


def _write_model(folder: Path) -> Path:
    """Writes a random Qwen3 model with logits that are far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    disable_progress_bar()
    # transformers initialises weights with the global generator; restore its state afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.15)
        model.save_pretrained(folder)
    return folder


def _examples() -> list[Example]:
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, length + 1) for length in _LENGTHS]
    rows[-1][:_SHARED] = rows[0][:_SHARED]
    return [
        Example(
            row[:-1],
            {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, dtype=np.float32)},
        )
        for row in rows
    ]
