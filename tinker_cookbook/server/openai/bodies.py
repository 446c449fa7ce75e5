"""Request bodies, and which parameters are taken, which are without effect, which are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinker_cookbook.exceptions import nearest
from tinker_cookbook.server.bodies import Int64
from tinker_cookbook.server.openai.errors import ApiError

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20

_WITHOUT_EFFECT = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    ]
)
"""What says nothing about the text that is drawn."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto",),
}
"""Parameters that this server has no means for, with the values at which none is needed: OpenAI's,
and those of vLLM's server, whose clients send them with their defaults."""

_INSTEAD = {
    "reasoning_effort": "name a renderer that sets it, by renderer_name",
    "chat_template_kwargs": 'use renderer_name="template?NAME=VALUE"',
    "functions": "use tools",
    "function_call": "use tools",
    "tool_choice": "what is drawn is not constrained; leave it out, or leave out tools",
    "response_format": "what is drawn is not constrained; ask for the form in the prompt",
    "best_of": "use n and choose by logprobs",
}


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk that counts tokens."""

    include_usage: bool = False


class SamplingBody(BaseModel):
    """What both kinds of request have. ``top_k`` and ``renderer_name`` are no OpenAI parameters."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stop: str | list[str] | None = None
    seed: Annotated[Int64, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The body; raises ``ApiError`` that names the first field that is wrong."""
        try:
            found = cls.model_validate_json(body)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "body"
            param = str(problem["loc"][0]) if problem["loc"] else None
            raise ApiError(f"{where}: {problem['msg']}", param=param) from error
        found.check_others()
        return found

    def check_others(self) -> None:
        """Refuses parameters that would change the answer if they were heeded."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT:
                continue
            neutral = self._neutral(name)
            if value in neutral:
                continue
            said = f"{name}: got {json.dumps(value)[:80]}, "
            if name in _INSTEAD:
                said += f"which this server cannot do: {_INSTEAD[name]}"
            elif neutral:
                said += f"expected {json.dumps(neutral[0])}, or leave it out: it is not built here"
            else:
                known = [*type(self).model_fields, *_NEUTRAL, *_WITHOUT_EFFECT]
                said += f"which this server does not know{nearest(name, known) or '; leave it out'}"
            raise ApiError(said, param=name, code="unsupported_parameter")

    def _neutral(self, name: str) -> tuple[Any, ...]:
        """Values at which a parameter asks for nothing."""
        return _NEUTRAL.get(name, ())

    @property
    def choices(self) -> int:
        """Answers to a prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer and are no part of it."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in found:
            raise ApiError("stop: got an empty text, which would end every answer", param="stop")
        return tuple(found)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def top_logprobs_asked(self) -> int | None:
        """So many alternatives at each token; None: no log-probabilities at all."""
        raise NotImplementedError


class CompletionBody(SamplingBody):
    """``POST /completions``."""

    prompt: str | list[Int64] | list[str] | list[list[Int64]]
    max_tokens: Annotated[Int64, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts as several."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError("prompt: got an empty list, expected a prompt", param="prompt")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [one for one in prompt if not isinstance(one, int)]

    @property
    def most_tokens(self) -> int:
        """Tokens to draw; 16 where nothing is said, as OpenAI has it."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top_logprobs_asked(self) -> int | None:
        """``logprobs`` is a number here."""
        return self.logprobs


class FunctionSpec(BaseModel):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool: functions only."""

    type: Literal["function"]
    function: FunctionSpec


class ChatBody(SamplingBody):
    """``POST /chat/completions``."""

    messages: list[dict[str, Any]]
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    renderer_name: str | None = None

    def _neutral(self, name: str) -> tuple[Any, ...]:
        values = super()._neutral(name)
        return (*values, "none") if name == "tool_choice" and not self.tools else values

    @property
    def most_tokens(self) -> int | None:
        """Tokens to draw; None: as many as the context has room for."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def top_logprobs_asked(self) -> int | None:
        """``top_logprobs`` counts only beside ``logprobs``."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError("top_logprobs: needs logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0
