"""``POST /inference/v1/generate``: tokens in, tokens out, compatible with vLLM's server.

Other training libraries (verifiers, prime-rl) sample through it: they render the prompt themselves
and need exactly the sampled tokens, each with its log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from tinker_cookbook.backends.convert import TokenSequence
from tinker_cookbook.server.access import ApiUserDep
from tinker_cookbook.server.bodies import Int64, Json, Token, json_body_schema, read_json
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.openai.models import LoaderDep, ModelLoader
from tinker_cookbook.server.openai.protocol import MAX_TOP_LOGPROBS, SamplingBody
from tinker_cookbook.server.openai.sampling import (
    ApiCall,
    Choice,
    SamplingOptions,
    json_safe_logprob,
)
from tinker_cookbook.server.openai.text import SampledToken

router = APIRouter(tags=["openai"])


class GenerateBody(SamplingBody):
    """Body of ``POST /inference/v1/generate``, with the fields of its ``sampling_params``."""

    # The prefix cache is always shared, requests have no priorities, and there is no text.
    without_effect: ClassVar[Sequence[str]] = (
        *("cache_salt", "priority", "detokenize", "output_kind", "routed_experts_prompt_start"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    )
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "features": ({},),
        "content_parts": ([],),
        "bad_words": ([],),
        "ignore_eos": (False,),
        "best_of": (1,),
        "length_penalty": (1,),
        "extra_args": ({},),
        "skip_reading_prefix_cache": (False,),
        "return_sampling_mask": (False,),
    }

    token_ids: Annotated[list[Token], Field(min_length=1)]
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_params(cls, given: Any) -> Any:
        params = given.get("sampling_params") if isinstance(given, dict) else None
        if not isinstance(params, dict):
            return given
        return {name: one for name, one in given.items() if name != "sampling_params"} | params


@router.post("/inference/v1/generate", openapi_extra=json_body_schema(GenerateBody))
async def generate(request: Request, owner: ApiUserDep, loader: LoaderDep) -> Response:
    """Returns continuations of a prompt, as token ids with their log-probabilities."""
    body = await read_json(request, GenerateBody.parse)
    call = await loader.run(_prepare, loader, owner, body)
    return await call.respond(request)


def _prepare(loader: ModelLoader, owner: ApiUser, body: GenerateBody) -> ApiCall:
    model = loader.load(owner, body.model)
    # Default: as many tokens as the context has space for, as in chat.
    options = SamplingOptions.of(body, model, body.max_tokens, body.logprobs)
    choices = [TokenChoice(i, options) for i in range(options.num_samples)]
    prompts = [TokenSequence(np.asarray(body.token_ids, dtype=np.int64))]
    first = {"prompt_token_ids": body.token_ids} if body.return_token_ids else {}
    return _GenerateCall(
        *(loader.state, owner.name, body, options, prompts, choices), first_fields=first
    )


class _GenerateCall(ApiCall):
    """Call whose response has the request's id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.body, GenerateBody)
        self._envelope["request_id"] = self.body.request_id or self._envelope["id"]


class TokenChoice(Choice):
    """Choice that has only tokens."""

    id_prefix, object_name, chunk_name = "generate", "generate", "generate.chunk"

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
        return self._json({"token_ids": [token.token for token in tokens]}, logprobs, tokens)


def _entry(token: SampledToken) -> Json:
    def named(one: int, logprob: float) -> Json:
        return {"token": f"token_id:{one}", "logprob": json_safe_logprob(logprob), "bytes": None}

    assert token.logprob is not None
    top = [] if token.top is None else zip(*(part.tolist() for part in token.top), strict=True)
    return {**named(token.token, token.logprob), "top_logprobs": [named(*pair) for pair in top]}
