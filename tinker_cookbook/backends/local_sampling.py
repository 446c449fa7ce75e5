"""The sampling client of the bundled engine. Loaded only through ``connect()``."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import cache, cached_property, partial
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
    once,
)
from tinker_cookbook.engine.checkpoints.save_load import load_sampler
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.sampling.options import LogitOptions, SamplingSettings
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

    from tinker_cookbook.renderers.core.codec import TextCodec

T = TypeVar("T")


class LocalSamplingClient(ReadyClient["LocalSamplingClient"], AsyncNames):
    """Samples from one fixed version of the weights."""

    def __init__(
        self, engine: Engine, base_model: str, make: Callable[[], Sampler], lane: Hashable
    ) -> None:
        self._engine = engine
        self._base_model = base_model
        # Runs on the worker: loads the base model, or takes the snapshot after queued steps.
        self._made = engine.submit_in(lane, make)
        # Ids contain the client's id, because provenance refers to sequences of several clients.
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
        """Returns a client for a checkpoint or a base model."""
        # Look up checkpoint and model name in the caller's thread, so that errors are raised here.
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
                base, adapter = load_sampler(base, loaded, model_path)
            return Sampler(base, adapter, model_path, store.owner)

        # Loading waits neither for the scores nor for the samplers of other owners.
        return cls(engine, name, make, ("samplers", store.owner))

    def sample(
        self,
        prompt: types.ModelInput | str,
        num_samples: int = 1,
        sampling_params: types.SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        on_token: Callable[[int, Sample], None] | None = None,
        sampling_options: LogitOptions | None = None,
    ) -> LocalFuture[types.SampleResponse]:
        """Samples ``num_samples`` completions of ``prompt``.

        A string is tokenized with the special tokens that the model's tokenizer prepends.
        ``target_prompt_logprobs`` [len - 1, K] are token
        ids to score at each position after the first; -1 skips an entry (0.0 in the response).
        ``on_token(i, sample)`` is called on the engine's thread after each token of sample ``i``;
        it must return immediately and must not raise. ``sampling_options`` adds penalties, a bias
        or a mask; the response then has their names in ``sampling_adjustments``, and its
        log-probabilities stay the model's own.
        """
        if prompt_alt_tokens_k:
            raise BackendError(
                "prompt_alt_tokens_k: the local engine does not sample alternative prompt tokens; "
                "use topk_prompt_logprobs"
            )
        if isinstance(prompt, str):
            prompt = types.ModelInput.from_ints(self.get_tokenizer().encode(prompt))
        sequence = self._sequence(prompt)
        sampling_params = sampling_params or types.SamplingParams()
        sequence_ids = [f"{self._client_id}:{next(self._ids)}" for _ in range(num_samples)]
        targets = None  # token ids [T - 1, K] int64, -1 for skipped entries
        if target_prompt_logprobs is not None:
            targets = target_prompt_logprobs.to_torch(pad_value=-1).long().numpy()
        scores_prompt = bool(include_prompt_logprobs or topk_prompt_logprobs or targets is not None)
        # A single token needs no decode step, so the scoring pass samples it too.
        in_one_pass = scores_prompt and sampling_params.max_tokens == 1

        # Created lazily, because it needs the sampler; cached, because scoring and sampling may
        # share it.
        @cache
        def request() -> SampleRequest:
            sampler = self._made.result()
            settings = SamplingSettings.of(sampling_params, sampler.base.eos_ids, sampling_options)
            made = sample_request(
                sampler,
                sequence.tokens,
                num_samples,
                settings,
                images=sequence.images,
                # Only stop strings need the text of a growing sample.
                decode=self._decode if settings.stop_strings else None,
                topk_sample=topk_sample_logprobs,
                scored=in_one_pass,
            )
            made.on_token, made.entropy = on_token, self._engine.sample_entropies
            return made

        scored = None
        if scores_prompt:
            scored = self._score(
                sequence,
                lambda scores: scores,
                sample=request if in_one_pass else None,
                logprobs=include_prompt_logprobs,
                topk=topk_prompt_logprobs,
                targets=None if targets is None else targets.clip(min=0),
                last_n=prompt_logprobs_last_n,
            )
        adjustments = () if sampling_options is None else sampling_options.in_effect
        answer = partial(
            convert.sample_response_of,
            targets=targets,
            sequence_ids=sequence_ids,
            adjustments=adjustments,
        )
        return self._sample_after(scored, request, answer, sampled=in_one_pass)

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> LocalFuture[list[float | None]]:
        """Returns each token's log-probability given the tokens before it; the first is ``None``.

        Concurrent requests are batched: submit all, then wait.
        """

        def answer(scores: PromptScores) -> list[float | None]:
            # NaN marks positions that were not computed; the SDK uses None.
            assert scores.logprobs is not None
            return [None if np.isnan(value) else float(value) for value in scores.logprobs]

        return SampleFuture(
            self._score(
                self._sequence(prompt), answer, logprobs=True, last_n=prompt_logprobs_last_n
            )
        )

    def sampler(self) -> Sampler:
        """Returns the engine's sampler, for requests that the SDK cannot express; blocks until the
        weights are loaded, and raises errors of loading."""
        return self._made.result()

    def release_terms(self) -> None:
        """Frees what the next request computes again from the weights."""
        made = self._made
        if made.done() and not made.cancelled() and made.exception() is None:
            made.result().release_terms()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the base model."""
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        return get_tokenizer(self._base_model)

    def get_base_model(self) -> str:
        """Returns the name of the base model."""
        return self._base_model

    def weights_digest(self) -> str:
        """Returns the base model's name, a hash of its weights, and a hash of the adapter, if any;
        blocks until loaded.

        It is equal exactly for clients with the same weights.
        """
        sampler = self.sampler()
        digest, terms = hashlib.sha256(), sampler.terms()
        for name in sorted(terms):
            digest.update(name.encode())
            for factor in (terms[name].a, terms[name].b):
                digest.update(factor.detach().float().cpu().numpy().tobytes())
        adapter = digest.hexdigest()[:16] if terms else ""
        return " ".join(filter(None, (self._base_model, sampler.base.weights_digest, adapter)))

    def _sample_after(
        self,
        scored: Future[PromptScores] | None,
        request: Callable[[], SampleRequest],
        answer: Callable[[list[Sample], PromptScores], types.SampleResponse],
        *,
        sampled: bool,
    ) -> SampleFuture[types.SampleResponse]:
        """Returns ``answer`` of the samples of ``request()`` and, if requested, the scores.

        ``sampled``: the scoring pass also computes the samples.
        """

        def submit() -> Future[list[Sample]]:
            if scored is not None:
                scored.result()  # raises if scoring failed, without sampling
                if sampled:
                    return request().future
            return self._engine.sample(request())

        def finish(samples: list[Sample]) -> types.SampleResponse:
            return answer(samples, PromptScores() if scored is None else scored.result())

        # In sequence: first the prompt's scores, or at least the weights, then the samples.
        future = chain(scored or self._made, submit, finish)
        if scored is not None:
            future.add_done_callback(once(lambda _: scored.cancel()))  # no effect if it is done
        return SampleFuture(future)

    def _score(
        self,
        sequence: convert.TokenSequence,
        finish: Callable[[PromptScores], T],
        sample: Callable[[], SampleRequest] | None = None,
        **what: Any,
    ) -> Future[T]:
        """Returns ``finish`` of the scores of a sequence; ``what`` is passed to ``score_request``.

        ``sample`` creates a request for one sampled token, computed in the same pass.
        """

        def submit() -> Future[PromptScores]:
            tokens, images = sequence
            request = score_request(self._made.result(), tokens, images=images, **what)
            request.sample = None if sample is None else sample()
            return self._engine.score(request)

        return chain(self._made, submit, finish)

    def _sequence(self, prompt: types.ModelInput) -> convert.TokenSequence:
        reader = partial(self._engine.image_reader, self._base_model)
        return convert.sequence_of(prompt, "prompt", reader)

    def _decode(self, tokens: list[int]) -> str:
        return self._codec.decode(tokens)

    @cached_property
    def _codec(self) -> TextCodec:
        """Keeps the leading space of a text, which some tokenizers drop."""
        from tinker_cookbook.renderers.core.codec import TextCodec

        return TextCodec(self.get_tokenizer())
