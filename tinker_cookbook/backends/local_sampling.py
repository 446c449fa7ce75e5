"""The sampling client of the bundled engine. Loaded only through ``connect()``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tinker import types

from tinker_cookbook.backends import convert
from tinker_cookbook.backends.futures import LocalFuture, ReadyClient, SampleFuture, chain
from tinker_cookbook.engine.checkpoints import load_adapter
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.requests import Sample
from tinker_cookbook.engine.sampler import PromptScores, Sampler
from tinker_cookbook.engine.training_run import TrainingRun
from tinker_cookbook.exceptions import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalSamplingClient(ReadyClient["LocalSamplingClient"]):
    """Samples from one fixed version of the weights."""

    def __init__(self, engine: Engine, base_model: str, make: Callable[[], Sampler]) -> None:
        self._engine = engine
        self._base_model = base_model
        self._made = engine.submit(make)
        self._ids = itertools.count()
        super().__init__(self._made)

    @classmethod
    def open(
        cls, engine: Engine, model_path: str | None, base_model: str | None
    ) -> LocalSamplingClient:
        """From a checkpoint, or from a plain base model."""
        if model_path is None:
            assert base_model is not None
            engine.resolve(base_model)
            return cls(engine, base_model, lambda: Sampler(engine.base_model(base_model), None))
        loaded = engine.store.read_checkpoint(model_path, with_optimizer=False)
        name = loaded.state["base_model"]
        engine.resolve(name)

        def make() -> Sampler:
            base = engine.base_model(name)
            return Sampler(base, load_adapter(base, loaded, model_path))

        return cls(engine, name, make)

    @classmethod
    def of_run(
        cls, engine: Engine, base_model: str, run: Callable[[], TrainingRun]
    ) -> LocalSamplingClient:
        """From the present weights of a run, by reference."""

        def make() -> Sampler:
            live = run()
            return Sampler(live.base, live.snapshot())

        return cls(engine, base_model, make)

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> LocalFuture[types.SampleResponse]:
        """Draws ``num_samples`` continuations of ``prompt``.

        ``target_prompt_logprobs`` [len - 1, K] asks for the log-probabilities of given token ids
        at each position after the first; -1 skips an entry (0.0 in the response).
        """
        if prompt_alt_tokens_k:
            raise BackendError(
                "prompt_alt_tokens_k: the local engine does not draw alternative prompt tokens; "
                "use topk_prompt_logprobs"
            )
        tokens = convert.tokens_of(prompt, "prompt")
        sequence_ids = [str(next(self._ids)) for _ in range(num_samples)]

        def score() -> tuple[PromptScores, types.TensorData | None]:
            sampler, scores, asked = self._made.result(), PromptScores(), None
            if include_prompt_logprobs or topk_prompt_logprobs:
                scores = sampler.score_prompt(
                    tokens,
                    logprobs=include_prompt_logprobs,
                    topk=topk_prompt_logprobs,
                    last_n=prompt_logprobs_last_n,
                )
            if target_prompt_logprobs is not None:
                asked = _score_targets(sampler, tokens, target_prompt_logprobs)
            return scores, asked

        def draw() -> Future[list[Sample]]:
            sampler = self._made.result()
            settings = convert.sampling_settings_of(sampling_params, sampler.base.eos_ids)
            return self._engine.sample(
                sampler,
                tokens,
                num_samples,
                settings,
                decode=self._decode if settings.stop_strings else None,
                topk_sample=topk_sample_logprobs,
            )

        def answer(samples: list[Sample]) -> types.SampleResponse:
            scores, asked = scored.result() if scored is not None else (PromptScores(), None)
            return convert.sample_response_of(samples, scores, asked, sequence_ids)

        scored = None
        if include_prompt_logprobs or topk_prompt_logprobs or target_prompt_logprobs is not None:
            scored = self._engine.submit(score)
        return SampleFuture(chain(scored or self._made, draw, answer))

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> LocalFuture[list[float | None]]:
        """Log-probability of each token given those before it; the first is ``None``."""
        tokens = convert.tokens_of(prompt, "prompt")

        def work() -> list[float | None]:
            scores = self._made.result().score_prompt(
                tokens, logprobs=True, last_n=prompt_logprobs_last_n
            )
            assert scores.logprobs is not None
            return [None if np.isnan(value) else float(value) for value in scores.logprobs]

        return LocalFuture(self._engine.submit(work))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base model."""
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        return get_tokenizer(self._base_model)

    def get_base_model(self) -> str:
        """The name of the base model."""
        return self._base_model

    async def sample_async(self, *args: Any, **kwargs: Any) -> types.SampleResponse:
        """Older spelling of ``await sample(...)``."""
        return await self.sample(*args, **kwargs)

    async def compute_logprobs_async(self, *args: Any, **kwargs: Any) -> list[float | None]:
        """Older spelling of ``await compute_logprobs(...)``."""
        return await self.compute_logprobs(*args, **kwargs)

    async def get_base_model_async(self) -> str:
        """Older spelling of ``get_base_model()``."""
        return self._base_model

    def _decode(self, tokens: list[int]) -> str:
        return str(self.get_tokenizer().decode(tokens, skip_special_tokens=False))


def _score_targets(
    sampler: Sampler, prompt: np.ndarray, asked: types.TensorData
) -> types.TensorData:
    """Log-probabilities of the ids ``asked`` [len - 1, K] at each position after the first."""
    ids = asked.to_torch(pad_value=-1)
    values = sampler.score_targets(prompt, ids.clamp(min=0))
    values[(ids < 0).numpy()] = 0.0
    return types.TensorData.from_torch(torch.from_numpy(values))
