"""The sampling client of the bundled engine. Loaded only through ``connect()``."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tinker import types

from tinker_cookbook.backends import convert
from tinker_cookbook.backends.futures import (
    AsyncNames,
    LocalFuture,
    ReadyClient,
    SampleFuture,
    chain,
)
from tinker_cookbook.engine.checkpoints.save_load import load_adapter
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.sampling.requests import (
    PromptScores,
    Sample,
    SampleRequest,
    sample_request,
    score_request,
)
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class LocalSamplingClient(ReadyClient["LocalSamplingClient"], AsyncNames):
    """Samples from one fixed version of the weights."""

    def __init__(
        self, engine: Engine, base_model: str, make: Callable[[], Sampler], lane: str | None = None
    ) -> None:
        self._engine = engine
        self._base_model = base_model
        self._made = engine.submit_in(lane, make)
        # Provenance names sequences of several clients in one batch, so ids carry the client's.
        self._client_id = uuid.uuid4().hex[:12]
        self._ids = itertools.count()
        super().__init__(self._made)

    @classmethod
    def open(
        cls,
        engine: Engine,
        store: CheckpointStore,
        model_path: str | None,
        base_model: str | None,
    ) -> LocalSamplingClient:
        """From a checkpoint, or from a plain base model."""
        loaded = None
        if model_path is not None:
            loaded = store.read_checkpoint(model_path, with_optimizer=False)
            base_model = str(loaded.state["base_model"])
        assert base_model is not None
        name = base_model
        engine.resolve(name)

        def make() -> Sampler:
            base, adapter = engine.base_model(name), None
            if loaded is not None and model_path is not None:
                adapter = load_adapter(base, loaded, model_path)
            return Sampler(base, adapter, model_path, store.owner)

        return cls(engine, name, make)

    def sample(
        self,
        prompt: types.ModelInput | str,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        on_token: Callable[[int, Sample], None] | None = None,
    ) -> LocalFuture[types.SampleResponse]:
        """Samples ``num_samples`` completions of ``prompt``.

        A string is tokenized with the special tokens that the model's tokenizer puts before a text;
        other backends take ``ModelInput`` only. ``target_prompt_logprobs`` [len - 1, K] are token
        ids to score at each position after the first; -1 skips an entry (0.0 in the response).
        ``on_token(i, sample)`` is called on the engine's thread after each token of sample ``i``;
        it must return at once and raise nothing.
        """
        if prompt_alt_tokens_k:
            raise BackendError(
                "prompt_alt_tokens_k: the local engine does not draw alternative prompt tokens; "
                "use topk_prompt_logprobs"
            )
        if isinstance(prompt, str):
            prompt = types.ModelInput.from_ints(self.get_tokenizer().encode(prompt))
        tokens = convert.tokens_of(prompt, "prompt")
        sequence_ids = [f"{self._client_id}:{next(self._ids)}" for _ in range(num_samples)]

        targets = None  # token ids [T - 1, K] int64, -1 for skipped entries
        if target_prompt_logprobs is not None:
            targets = target_prompt_logprobs.to_torch(pad_value=-1).long().numpy()
        one_token = sampling_params.max_tokens == 1

        @cache
        def request() -> SampleRequest:
            made = self._request(tokens, num_samples, sampling_params, topk_sample_logprobs)
            made.on_token = on_token
            return made

        scored = None
        if include_prompt_logprobs or topk_prompt_logprobs or targets is not None:
            scored = self._score(
                tokens,
                lambda scores: scores,
                draw=request if one_token else None,
                logprobs=include_prompt_logprobs,
                topk=topk_prompt_logprobs,
                targets=None if targets is None else targets.clip(min=0),
                last_n=prompt_logprobs_last_n,
            )

        def draw() -> Future[list[Sample]]:
            if scored is not None:
                scored.result()  # raises if scoring failed: then there are no samples either
                if one_token:
                    return request().future
            return self._engine.sample(request())

        def answer(samples: list[Sample]) -> types.SampleResponse:
            scores = PromptScores() if scored is None else scored.result()
            requested = None
            if targets is not None and scores.target_logprobs is not None:
                filled = np.where(targets < 0, np.float32(0), scores.target_logprobs)
                requested = types.TensorData.from_numpy(filled)
            return convert.sample_response_of(samples, scores, requested, sequence_ids)

        future = chain(scored or self._made, draw, answer)
        if scored is not None:
            future.add_done_callback(lambda _: scored.cancel())  # does nothing if it is done
        return SampleFuture(future)

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> LocalFuture[list[float | None]]:
        """Log-probability of each token given those before it; the first is ``None``.

        Requests that wait at the same time are computed together: submit all, then wait.
        """

        def answer(scores: PromptScores) -> list[float | None]:
            assert scores.logprobs is not None
            return [None if np.isnan(value) else float(value) for value in scores.logprobs]

        tokens = convert.tokens_of(prompt, "prompt")
        return SampleFuture(
            self._score(tokens, answer, logprobs=True, last_n=prompt_logprobs_last_n)
        )

    def sampler(self) -> Sampler:
        """Returns the weights, for requests that the SDK's methods cannot express; blocks until
        they are loaded, and raises the error of loading them."""
        return self._made.result()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the base model."""
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        return get_tokenizer(self._base_model)

    def get_base_model(self) -> str:
        """Returns the name of the base model."""
        return self._base_model

    def _request(
        self, tokens: np.ndarray, num_samples: int, params: types.SamplingParams, topk: int
    ) -> SampleRequest:
        sampler = self._made.result()
        settings = convert.sampling_settings_of(params, sampler.base.eos_ids)
        decode = self._decode if settings.stop_strings else None
        return sample_request(
            sampler, tokens, num_samples, settings, decode=decode, topk_sample=topk
        )

    def _score(
        self,
        tokens: np.ndarray,
        finish: Callable[[PromptScores], T],
        draw: Callable[[], SampleRequest] | None = None,
        **what: Any,
    ) -> Future[T]:
        """Returns ``finish`` of the scores of ``tokens``; ``what`` goes to ``score_request``.

        ``draw`` makes a request for samples of one token, which come with the scores.
        """

        def ask() -> Future[PromptScores]:
            request = score_request(self._made.result(), tokens, **what)
            request.draw = None if draw is None else draw()
            return self._engine.score(request)

        return chain(self._made, ask, finish)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.get_tokenizer().decode(tokens, skip_special_tokens=False))
