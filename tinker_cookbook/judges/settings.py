"""Settings of a judge: a model of the backend, or a model behind an OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Literal

import chz

from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.backends.connect import check_backend, make_once
from tinker_cookbook.completers import TinkerMessageCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.judges.judge import (
    CarefulJudge,
    ChatApiCompleter,
    ChatLabelJudge,
    Judge,
    Judgement,
    LabelJudge,
    ReadScore,
    TextJudge,
)
from tinker_cookbook.model_info import resolve_renderer_name
from tinker_cookbook.renderers import Message, check_renderer_name, get_renderer
from tinker_cookbook.run.weights_paths import check_tinker_path, weights_field
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings, number
from tinker_cookbook.utils.chat_api import ChatApi

JudgeMode = Literal["labels", "text"]


@chz.chz
class JudgeSettings(BackendSettings):
    """Settings of a judge; equal settings share one judge per process."""

    model_name: str = chz.field(doc="Hub name or local folder of the judge; with url: its name")
    model_path: str | None = weights_field("sampler_weights", "Weights of a trained judge")
    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's own")
    url: str | None = chz.field(
        default=None, doc="Address of a server with the OpenAI chat API, instead of the backend"
    )
    api_key_env: str = chz.field(
        default="OPENAI_API_KEY", doc="Environment variable with the key of the server at url"
    )
    mode: JudgeMode = chz.field(
        default="labels",
        doc="labels: compare the probabilities of Yes and No, without sampling; text: "
        "sample a text and read the score in it, as the official cookbook does",
    )
    max_tokens: int = number(2048, "mode=text: maximum tokens of the judge's text", low=1)
    temperature: float = number(1.0, "mode=text: sampling temperature")
    max_concurrency: int = number(64, "Concurrent requests to the judge", low=1)
    max_retries: int = number(3, "Retries after an error or an unreadable score")
    timeout_seconds: float = number(300, "Time limit of an attempt", low=1)
    cache_path: str | None = chz.field(
        default=None,
        doc="JSONL file that stores judgements for later runs; default: only in memory",
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for an invalid setting; opens no connection."""
        if self.mode not in ("labels", "text"):
            raise ConfigurationError(f"mode: got {self.mode!r}, expected labels or text")
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")):
                raise ConfigurationError(
                    f"url: got {self.url!r}, expected an address such as http://localhost:8000/v1"
                )
            if self.model_path is not None:
                raise ConfigurationError(
                    f"model_path={self.model_path} with url={self.url}; expected only one: the "
                    "server chooses weights by model_name"
                )
            return
        check_backend(self.backend, self.base_url, self.device, self.dtype)
        if self.renderer_name is not None:
            check_renderer_name(self.renderer_name)
        if self.model_path is not None:
            check_tinker_path(
                "model_path", self.model_path, "sampler_weights", "the run that trained the judge"
            )

    def __call__(self) -> CarefulJudge:
        """Returns the judge; a local model is loaded by the backend of the current run."""
        self.check()
        if self.url is None:
            return make_once(self, self.build)
        with _build_lock:
            if self not in _remote:
                _remote[self] = self._careful(self._remote_judge())
            return _remote[self]

    def build(self, service: ServiceClient) -> CarefulJudge:
        """Builds the judge on ``service``."""
        # A server needs neither the tokenizer nor the chat format here.
        name, _ = resolve_renderer_name(self.model_name, self.renderer_name)
        renderer = get_renderer(name, get_tokenizer(self.model_name))
        base = None if self.model_path else self.model_name
        client = service.create_sampling_client(
            model_path=self.model_path, base_model=base
        ).result()
        identity = f"{self.model_path or self.model_name} {name}"
        if self.mode == "labels":
            return self._careful(LabelJudge(client, renderer, name=identity))
        completer = TinkerMessageCompleter(
            client, renderer, self.max_tokens, temperature=self.temperature
        )
        return self._careful(TextJudge(completer, identity))

    def _remote_judge(self) -> Judge:
        assert self.url is not None
        api = ChatApi(
            self.url,
            self.model_name,
            os.environ.get(self.api_key_env),
            timeout_seconds=self.timeout_seconds,
            max_connections=self.max_concurrency,
            field="url",
        )
        if self.mode == "labels":
            return ChatLabelJudge(api)
        completer = ChatApiCompleter(api, self.max_tokens, self.temperature)
        return TextJudge(completer, f"{api.url} {api.model_name}")

    def _careful(self, judge: Judge) -> CarefulJudge:
        return CarefulJudge(
            judge,
            max_concurrency=self.max_concurrency,
            max_retries=self.max_retries,
            timeout_seconds=self.timeout_seconds,
            cache_path=self.cache_path,
        )


_build_lock = threading.Lock()
_remote: dict[JudgeSettings, CarefulJudge] = {}


class LazyJudge(Judge):
    """A judge that is built at its first use and pickles as its settings.

    So a group can run in another process, although a judge and its connection cannot be pickled.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.uses_labels, self.name = settings.mode == "labels", settings.model_name

    async def __call__(self, messages: list[Message], read: ReadScore) -> Judgement:
        """Grades a prompt; the first call may load weights, in a thread."""
        judge = await asyncio.to_thread(self.settings)
        return await judge(messages, read)

    def __reduce__(self) -> tuple[type[LazyJudge], tuple[JudgeSettings]]:
        return LazyJudge, (self.settings,)
