"""Request bodies and errors of the OpenAI API.

Each parameter is supported, has no effect on the text, or is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from tinker_cookbook.exceptions import ModelNotFoundError, nearest
from tinker_cookbook.renderers import ToolCall, ToolSpec
from tinker_cookbook.renderers.core.tool_calls import typed_call
from tinker_cookbook.server.bodies import Int64, Json, Token
from tinker_cookbook.server.errors import SERVER_FAILED, status_of

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

# The package's error messages start with a field name.
_FIELD = re.compile(
    r"(model|prompt|max_tokens|min_tokens|temperature|top_p|top_k|min_p|seed|stop|n|renderer_name"
    r"|stop_token_ids|presence_penalty|frequency_penalty|repetition_penalty|logit_bias|response_format"
    r"|(tools|messages|input)(\[\d+\][^\s:]*)?)(?!\w)"
)
_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}

# Parameters that do not affect the text.
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)

# Unsupported parameters with their neutral values: OpenAI's parameters, and those of vLLM's
# server, because its clients send the defaults.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "verbosity": ("medium",),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "background": (False,),
    "truncation": ("disabled",),
    "functions": ([],),
    "function_call": ("auto",),
}

_NEUTRAL_STREAM_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}

_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tools",
    "best_of": "use n and choose by logprobs",
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "conversation": "responses are not stored; send the whole conversation as input",
    "prompt": "send the whole conversation as input",
}


class ApiError(Exception):
    """Error in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = code or _CODES.get(status)

    def body(self) -> Json:
        """Returns the JSON object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def model_not_found(message: str) -> ApiError:
    """Returns the error for a model that does not exist for this caller."""
    return ApiError(message, status=404, param="model", code="model_not_found")


def as_api_error(error: Exception) -> ApiError:
    """Converts any error; ``param`` is the field name at the start of the package's messages."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(str(error.detail), status=error.status_code)
    if isinstance(error, ModelNotFoundError):
        return model_not_found(str(error))
    status = status_of(error)
    if status >= 500:
        return ApiError(SERVER_FAILED, status=500)
    # OpenAI's clients show ``param``, so use the field name of the package's message.
    field = _FIELD.match(str(error))
    return ApiError(str(error), status=status, param=field[0] if field else None)


class StreamOptions(BaseModel):
    """Options of a stream; ``include_usage`` adds a final chunk with token counts."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False


Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]


class StructuredOutputs(BaseModel):
    """Constraint of the text in vLLM's format; at most one field is set."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[Json | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class SamplingBody(BaseModel):
    """Common fields of all requests: sampling (``SamplingSettings`` reads them), constraints of the
    text, streaming."""

    model_config = ConfigDict(extra="allow")

    without_effect: ClassVar[Sequence[str]] = _WITHOUT_EFFECT
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stop: str | list[str] | None = None
    seed: Annotated[Int64, Field(ge=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    min_tokens: Annotated[Int64, Field(ge=0)] | None = None
    stop_token_ids: list[Int64] | None = None
    response_format: Json | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def constrains_text(self) -> bool:
        """Whether the request constrains its text, which ``constraints`` does."""
        return self.response_format is not None or self.structured_outputs is not None

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parses a JSON body.

        Raises ``ApiError`` for the first invalid field, and for an unsupported parameter that would
        change the response.
        """
        try:
            body = cls.model_validate_json(raw)
        except ValidationError as error:
            raise first_problem(error) from error
        check_extra(body, cls.neutral_values, cls.without_effect)
        if (options := body.stream_options) is not None:
            if not body.stream:
                problem = "stream_options: got them without stream=true, expected both or neither"
                raise ApiError(problem, param="stream_options")
            check_extra(options, _NEUTRAL_STREAM_OPTIONS, (), within="stream_options.")
        return body


def first_problem(error: ValidationError) -> ApiError:
    """Returns the first problem of a body, because OpenAI's error format has one parameter."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "body"
    param = str(problem["loc"][0]) if problem["loc"] else None
    return ApiError(f"{where}: {problem['msg']}", param=param)


def check_extra(
    body: BaseModel,
    neutral_values: Mapping[str, tuple[Any, ...]],
    ignored: Sequence[str],
    within: str = "",
) -> None:
    """Raises ``ApiError`` for the first unknown parameter that would have an effect.

    ``neutral_values`` has values without an effect; parameters in ``ignored`` never have one.
    ``within`` precedes the names of nested parameters.
    """
    for name, value in (body.model_extra or {}).items():
        neutral = neutral_values.get(name, ())
        if value is None or name in ignored or value in neutral:
            continue
        message = f"{within}{name}: got {json.dumps(value)[:80]}, "
        if name in _INSTEAD:
            message += f"which this server does not support: {_INSTEAD[name]}"
        elif neutral:
            expected = json.dumps(neutral[0])
            message += f"expected {expected}, or leave it out: other values are not supported"
        else:
            known = [*type(body).model_fields, *neutral_values, *ignored]
            hint = nearest(name, known) or "; leave it out"
            message += f"which this server does not know{hint}"
        raise ApiError(message, param=within + name, code="unsupported_parameter")


class ResponsesBody(SamplingBody):
    """Body of ``POST /responses``."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None
    reasoning: Json | None = None
    include: list[str] | None = None
    chat_template_kwargs: Json | None = None
    renderer_name: str | None = None


class CompletionBody(SamplingBody):
    """Body of ``POST /completions``."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[Int64, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class FunctionSpec(BaseModel):
    """Function that the model may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSpec


class ChatBody(SamplingBody):
    """Body of ``POST /chat/completions``."""

    messages: list[Json]
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    renderer_name: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


@dataclass(frozen=True)
class CallPolicy:
    """Tool calls that an answer may have: the allowed ``tools``, and the number of calls."""

    use: Literal["auto", "none", "required"] = "auto"
    tools: Sequence[Tool] = ()
    parallel: bool = True
    named: bool = False

    @classmethod
    def of(cls, body: ChatBody) -> CallPolicy:
        """Returns the policy of a request; raises ``ApiError`` for an invalid ``tool_choice``."""
        tools, choice = body.tools or [], body.tool_choice
        parallel = body.parallel_tool_calls is not False
        if choice in (None, "auto") or (choice == "none" and not tools):
            return cls("auto", tools, parallel)
        if choice == "none":
            return cls("none", tools)
        if not tools:
            raise ApiError(
                f"tool_choice: got {json.dumps(choice)} without tools; give tools, or leave it out",
                param="tool_choice",
            )
        if choice == "required":
            return cls("required", tools, parallel)
        name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
        named = [tool for tool in tools if tool.function.name == name]
        if not named:
            known = ", ".join(tool.function.name for tool in tools)
            raise ApiError(
                f"tool_choice: got {json.dumps(choice)[:80]}, expected auto, none, required, or "
                f'{{"type": "function", "function": {{"name": …}}}} with one of {known}',
                param="tool_choice",
            )
        return cls("required", named, parallel=False, named=True)

    @property
    def constrains(self) -> bool:
        """Whether sampling has to be constrained for the calls."""
        strict = any(tool.function.strict for tool in self.tools)
        return bool(self.tools) and (self.use != "auto" or strict)

    def split(self, calls: Sequence[ToolCall]) -> tuple[Sequence[ToolCall], str]:
        """Returns the allowed calls of an answer, and the text of forbidden calls.

        Calls after the first are dropped without ``parallel``.
        """
        if self.use == "none":
            return [], "".join(call.function.model_dump_json() for call in calls)
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        typed = [typed_call(call, schemas.get(call.function.name)) for call in calls]
        return (typed if self.parallel else typed[:1]), ""


def tool_spec(tool: Tool) -> ToolSpec:
    """Returns the declaration of a tool for renderers."""
    return ToolSpec(
        name=tool.function.name,
        description=tool.function.description or "",
        parameters=tool.function.parameters or {"type": "object", "properties": {}},
    )


def format_options(body: ChatBody) -> dict[str, Any]:
    """Returns the options of the chat format that a request sets."""
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    return options
