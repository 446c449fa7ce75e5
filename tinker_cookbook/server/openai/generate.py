"""``POST /inference/v1/generate``: tokens in, tokens out, compatible with vLLM's server.

Other training libraries (verifiers, prime-rl) sample through it: they render the prompt themselves
and need exactly the sampled tokens, each with its log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tinker import types

from tinker_cookbook.engine.sampling.requests import PromptScores
from tinker_cookbook.server.access import ApiUserDep
from tinker_cookbook.server.bodies import Int64, Json, Token, json_body_schema, read_json
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.openai.models import LoaderDep, ModelLoader
from tinker_cookbook.server.openai.protocol import (
    MAX_TOP_LOGPROBS,
    SamplingBody,
    SamplingFields,
    StreamOptions,
    check_extra,
    check_stream_options,
    first_problem,
)
from tinker_cookbook.server.openai.sampling import (
    Choice,
    ResponseWriter,
    SampleStream,
    SamplingOptions,
    json_safe_logprob,
)
from tinker_cookbook.server.openai.text import SampledToken

router = APIRouter(tags=["openai"])

# Fields without an effect: the prefix cache is always shared, and requests have no priorities.
_WITHOUT_EFFECT = ("cache_salt", "priority")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"features": ({},), "content_parts": ([],)}

# Sampling parameters about text and experts, which do not apply here.
_PARAMS_WITHOUT_EFFECT = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "include_stop_str_in_output",
    "output_kind",
    "routed_experts_prompt_start",
)
_NEUTRAL_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "ignore_eos": (False,),
    "best_of": (1,),
    "length_penalty": (1,),
    "extra_args": ({},),
    "skip_reading_prefix_cache": (False,),
    "return_sampling_mask": (False,),
}


class GenerateParams(SamplingFields):
    """Sampling parameters, by vLLM's names."""

    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class GenerateBody(BaseModel):
    """Body of ``POST /inference/v1/generate``."""

    model_config = ConfigDict(extra="allow")

    model: str
    token_ids: Annotated[list[Token], Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    request_id: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parses a JSON body; raises ``ApiError`` like :meth:`SamplingBody.parse`."""
        try:
            body = cls.model_validate_json(raw)
        except ValidationError as error:
            raise first_problem(error) from error
        check_extra(body, _NEUTRAL, _WITHOUT_EFFECT)
        check_extra(body.sampling_params, _NEUTRAL_PARAMS, _PARAMS_WITHOUT_EFFECT)
        check_stream_options(body.stream_options, body.stream)
        return body

    def sampling_body(self) -> SamplingBody:
        """Returns the request with the common names of all endpoints."""
        common = set(SamplingFields.model_fields)
        params = self.sampling_params.model_dump(include=common, exclude_none=True)
        return SamplingBody(
            model=self.model, stream=self.stream, stream_options=self.stream_options, **params
        )


@router.post("/inference/v1/generate", openapi_extra=json_body_schema(GenerateBody))
async def generate(request: Request, owner: ApiUserDep, loader: LoaderDep) -> Response:
    """Returns continuations of a prompt, as token ids with their log-probabilities."""
    body = await read_json(request, GenerateBody.parse)
    writer = await loader.run(_prepare, loader, owner, body)
    return await writer.respond(request)


def _prepare(loader: ModelLoader, owner: ApiUser, body: GenerateBody) -> ResponseWriter:
    model, params = loader.load(owner, body.model), body.sampling_params
    sampling = body.sampling_body()
    # Default: as many tokens as the context has space for, as in chat.
    options = SamplingOptions.of(sampling, model, params.max_tokens, params.logprobs)
    choices = [TokenChoice(i, options) for i in range(options.num_samples)]
    prompt = types.ModelInput.from_ints(body.token_ids)
    samples = SampleStream(loader.state.sample_quota(owner), options, [prompt])
    first = {"prompt_token_ids": body.token_ids} if body.return_token_ids else {}
    return _GenerateWriter(
        sampling, "generate", "generate", "generate.chunk", choices, samples, False, first,
        body.request_id,
    )  # fmt: skip


class _GenerateWriter(ResponseWriter):
    """Writer of a response with the request's id."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:-1])
        self._envelope["request_id"] = arguments[-1] or self._envelope["id"]


class TokenChoice(Choice):
    """Choice that has only tokens."""

    def begin(self, scores: PromptScores | None) -> list[Json]:
        """Returns no chunks."""
        return []

    def add(self, tokens: Sequence[SampledToken]) -> Json | None:
        """Returns a chunk with the tokens."""
        self._tokens += tokens
        return self._tokens_json(tokens)

    def end(self, stop_reason: str) -> list[Json]:
        """Returns a chunk with the finish reason."""
        self._finish_reason = "stop" if stop_reason == "stop" else "length"
        return [self._tokens_json([])]

    def whole(self) -> Json:
        """Returns the whole choice."""
        return self._tokens_json(self._tokens)

    def _tokens_json(self, tokens: Sequence[SampledToken]) -> Json:
        logprobs = None
        if self._options.top_logprobs is not None:
            logprobs = {"content": [_entry(token) for token in tokens]}
        return self._json({"token_ids": [token.token for token in tokens]}, logprobs)


def _entry(token: SampledToken) -> Json:
    def named(one: int, logprob: float) -> Json:
        return {"token": f"token_id:{one}", "logprob": json_safe_logprob(logprob), "bytes": None}

    assert token.logprob is not None
    top = [] if token.top is None else zip(*(part.tolist() for part in token.top), strict=True)
    return {**named(token.token, token.logprob), "top_logprobs": [named(*pair) for pair in top]}
