"""``POST /completions``: continuations of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from tinker import types

from tinker_cookbook.server.access import OwnerDep
from tinker_cookbook.server.bodies import json_body_schema, read_json
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.openai.models import LoaderDep, ModelLoader
from tinker_cookbook.server.openai.protocol import ApiError, CompletionBody
from tinker_cookbook.server.openai.sampling import (
    Choice,
    ResponseWriter,
    SampleStream,
    SamplingOptions,
    json_safe_logprob,
)
from tinker_cookbook.server.openai.text import IncrementalDetokenizer, SampledToken, token_name

router = APIRouter()


@router.post("/completions", openapi_extra=json_body_schema(CompletionBody))
async def completions(request: Request, owner: OwnerDep, loader: LoaderDep) -> Response:
    """Returns continuations of one or several prompts."""
    body = await read_json(request, CompletionBody.parse)
    writer = await loader.run(_prepare, loader, owner, body)
    return await writer.respond(request)


def _prepare(loader: ModelLoader, owner: Owner, body: CompletionBody) -> ResponseWriter:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens  # as in OpenAI's API
    if max_tokens == 0 and not body.echo:
        raise ApiError("max_tokens: got 0, expected at least 1 without echo", param="max_tokens")
    if not body.prompt and not isinstance(body.prompt, str):
        raise ApiError("prompt: got an empty list, expected a prompt", param="prompt")
    # One prompt, a string or token ids, or a list of prompts.
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if single else body.prompt
    model = loader.load(owner, body.model)
    options = SamplingOptions.of(body, model, max(1, max_tokens), body.logprobs)
    # The tokenizer adds its BOS token to a string.
    encode = model.codec.tokenizer.encode
    tokens = [list(encode(one)) if isinstance(one, str) else one for one in prompts]
    score = bool(body.echo) and options.top_logprobs is not None
    choices = []
    for prompt, ids in zip(prompts, tokens, strict=True):
        echo = (ids, prompt if isinstance(prompt, str) else "") if body.echo else None
        for _ in range(options.num_samples):
            choices.append(CompletionChoice(len(choices), options, echo))
    samples = SampleStream(loader.state.sample_quota, options, tokens, score)
    names = "cmpl", "text_completion", "text_completion"
    return ResponseWriter(body, *names, choices, samples, discard_tokens=max_tokens == 0)


class CompletionChoice(Choice):
    """Choice of a completion: the text, after its prompt if ``echo`` holds its tokens and text."""

    def __init__(
        self, index: int, options: SamplingOptions, echo: tuple[list[int], str] | None
    ) -> None:
        super().__init__(index, options)
        self._echo = echo
        self._prompt_chars = 0
        self._text = ""
        self._has_tokens = False

    def begin(self, scores: types.SampleResponse | None) -> list[dict[str, Any]]:
        """Returns a chunk with the prompt if it is echoed."""
        if self._echo is None:
            return []
        prompt, text = self._echo
        tokens = [SampledToken(token, None) for token in prompt]
        if scores is not None and scores.prompt_logprobs_np is not None:
            topk = scores.topk_prompt_logprobs_np
            for i in range(1, len(tokens)):
                top = None if topk is None else (topk.token_ids[i], topk.logprobs[i])
                tokens[i] = SampledToken(prompt[i], float(scores.prompt_logprobs_np[i]), top)
        detokenizer = IncrementalDetokenizer(self._options.model.codec, (), ())
        decoded = detokenizer.add(tokens) + detokenizer.finish()
        # A BOS token, and the space that some vocabularies start with, are not part of the text.
        text = text or decoded
        extra = len(decoded) - len(text)
        self._prompt_chars = len(text)
        tokens = detokenizer.take_tokens()
        return [self._chunk(text, [replace(t, offset=max(0, t.offset - extra)) for t in tokens])]

    def add(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        """Returns a chunk with the text that is certain now, or None."""
        self._has_tokens = True
        text = self._detokenizer.add(tokens)
        return self._sampled_chunk(text) if text else None

    def end(self, stop_reason: str) -> list[dict[str, Any]]:
        """Returns a chunk with the rest of the text and the finish reason."""
        text = self._detokenizer.finish()
        stopped = self._has_tokens and (self._detokenizer.stopped or stop_reason == "stop")
        self._finish_reason = "stop" if stopped else "length"
        return [self._sampled_chunk(text)]

    def whole(self) -> dict[str, Any]:
        """Returns the whole choice."""
        return self._text_json(self._text, self._tokens)

    def _sampled_chunk(self, text: str) -> dict[str, Any]:
        tokens = self._detokenizer.take_tokens()
        return self._chunk(text, [replace(t, offset=t.offset + self._prompt_chars) for t in tokens])

    def _chunk(self, text: str, tokens: list[SampledToken]) -> dict[str, Any]:
        self._text += text
        self._tokens += tokens
        return self._text_json(text, tokens)

    def _text_json(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        logprobs = None
        if self._options.top_logprobs is not None:
            codec = self._options.model.codec
            logprobs = {
                "tokens": [token_name(codec, t.token) for t in tokens],
                "token_logprobs": [
                    None if t.logprob is None else json_safe_logprob(t.logprob) for t in tokens
                ],
                "top_logprobs": [self._top_logprobs(t) for t in tokens],
                "text_offset": [t.offset for t in tokens],
            }
        return self._json({"text": text}, logprobs)

    def _top_logprobs(self, token: SampledToken) -> dict[str, float] | None:
        """Returns the most probable tokens, and the sampled one if it is not among them."""
        if token.top is None or token.logprob is None:
            return None

        top: dict[str, float] = {}
        pairs = zip(token.top[0].tolist(), token.top[1].tolist(), strict=True)
        for other, logprob in (*pairs, (token.token, token.logprob)):
            name = token_name(self._options.model.codec, other)
            top.setdefault(name, json_safe_logprob(logprob))
        return top
