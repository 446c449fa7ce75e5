"""Inspect AI's model interface for the sampling clients of this package.

With it, any Inspect task runs on a checkpoint, without a server or a network::

    api = InspectAPIFromTinkerSampling(
        renderer_name="llama3", model_name="meta-llama/Llama-3.2-1B", sampling_client=client
    )
    await inspect_ai.eval_async("my_task.py", model=inspect_ai.model.Model(api, GenerateConfig()))

Inspect knows it as ``tinker-sampling``, so ``get_model("tinker-sampling/MODEL", model_path=…)`` and
``inspect eval my_task.py --model tinker-sampling/MODEL -M model_path=tinker://…`` work too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.utils.imports import missing_extra

try:
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        GenerateConfig,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        StopReason,
        modelapi,
    )
    from inspect_ai.solver._task_state import sample_state
    from inspect_ai.tool import ToolChoice, ToolInfo
except ImportError as error:
    raise missing_extra("evaluations of Inspect AI", error, "inspect") from error

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.connect import Connection
from tinker_cookbook.completers import derived_seed
from tinker_cookbook.eval.inspect_bridge.messages import (
    assistant_message,
    convert_inspect_messages,
    with_tools,
)
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.model_info import resolve_max_length, resolve_renderer_name
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.sampling_model import (
    SamplingModelSettings,
    open_sampling_model,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.imports import tinker

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "InspectAPIFromTinkerSampling",
    "convert_inspect_messages",
    "get_model_usage",
]

DEFAULT_MAX_TOKENS = 2048
"""Maximum tokens of a response if neither the task nor the command sets a limit."""

_MAX_CONNECTIONS = 512  # the engine batches concurrent requests

# Settings that are not supported, with neutral values. Others are refused: ignoring them would
# evaluate something else.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "response_schema": (),
    "modalities": ([], ["text"]),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
}


def get_model_usage(
    tokenized_prompt: Sequence[int],
    responses: Sequence[tinker.SampledSequence],
    cached_prompt_tokens: int = 0,
) -> ModelUsage:
    """Returns the token usage of one request.

    Args:
        tokenized_prompt: Token ids of the prompt, counted once for all responses.
        responses: Sampled sequences.
        cached_prompt_tokens: Prompt tokens read from the prefix cache. Inspect counts them
            separately.
    """
    prompt, output = len(tokenized_prompt), sum(len(one.tokens) for one in responses)
    return ModelUsage(
        input_tokens=prompt - cached_prompt_tokens,
        output_tokens=output,
        total_tokens=prompt + output,
        input_tokens_cache_read=cached_prompt_tokens or None,
    )


@modelapi(name="tinker-sampling")
class InspectAPIFromTinkerSampling(ModelAPI):
    """Model of Inspect that samples from a sampling client.

    Stop reasons: ``tool_calls`` if the response has calls, ``max_tokens`` if it was
    truncated, ``model_length`` at the end of the model's context, else ``stop``. With a seed, epoch
    1 is sampled with that seed and each further epoch with a derived seed, so that several
    epochs of a problem are several samples.

    Args:
        renderer_name: Chat format; default: the one recorded in the checkpoint, else the
            model's.
        model_name: Base model, which has the tokenizer.
        model_path: ``tinker://`` path of a checkpoint, if ``sampling_client`` is not given.
        sampling_client: Client of the weights. Without it the first request opens the model.
        base_url: URL of a Tinker server, if ``sampling_client`` is not given.
        api_key: Not used: the SDK reads ``TINKER_API_KEY``.
        api_key_vars: Not used.
        config: Generation settings.
        verbose: Print each prompt and response.
        include_reasoning: Keep thinking, as ``ContentReasoning``; otherwise it is dropped.
        context_window: Maximum tokens of prompt and response; default: from the model's config,
            if it is on this machine.
        backend: As in ``connect``, if ``sampling_client`` is not given; likewise ``device`` and
            ``dtype``.
    """

    def __init__(
        self,
        renderer_name: str | None = None,
        model_name: str = "",
        model_path: str | None = None,
        sampling_client: SamplingClient | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_vars: list[str] | None = None,
        config: GenerateConfig | None = None,
        verbose: bool = False,
        include_reasoning: bool = False,
        *,
        context_window: int | None = None,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        super().__init__(
            model_name, base_url, api_key, api_key_vars or [], config or GenerateConfig()
        )
        self.verbose = verbose
        self.include_reasoning = include_reasoning
        self._settings = SamplingModelSettings(
            model_path=model_path,
            model_name=model_name,
            renderer_name=renderer_name,
            backend=backend,
            base_url=base_url,
            device=device,
            dtype=dtype,
        )
        if sampling_client is None:
            self._settings.check()
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self.sampling_client = sampling_client
        if sampling_client is not None or model_path is None:
            name, _ = resolve_renderer_name(model_name, renderer_name)
            self.renderer: Renderer = get_renderer(name, get_tokenizer(model_name))
        self._context_window = context_window or _context_of(model_name)

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Samples the next message, ``config.num_choices`` times in one request.

        Raises:
            ConfigurationError: a setting that is not supported, such as a penalty.
            RendererError: messages or tools that the chat format cannot express.
        """
        _check_supported(config, tool_choice)
        if self.sampling_client is None:
            await self._open()
        assert self.sampling_client is not None
        declared = [] if tool_choice == "none" else tools
        conversation = with_tools(self.renderer, convert_inspect_messages(input), declared)
        prompt = self.renderer.build_generation_prompt(conversation).to_ints()
        window = self._context_window
        if window is not None and len(prompt) >= window:
            # Inspect's agents react to this stop reason by shortening the conversation.
            problem = (
                f"prompt: {len(prompt)} tokens leave no room in the model's context of {window}"
            )
            output = ModelOutput.from_content(self.model_name, "", "model_length", error=problem)
            output.usage = ModelUsage()
            return output
        started = time.monotonic()
        response = await self.sampling_client.sample(
            prompt=tinker.ModelInput.from_ints(prompt),
            num_samples=config.num_choices or 1,
            sampling_params=self._params(config),
        )
        seconds = time.monotonic() - started
        choices = [self._choice(len(prompt), config, one) for one in response.sequences]
        if self.verbose:
            print(f"--- prompt\n{self.renderer.codec.decode(prompt)}")
            for choice in choices:
                print(f"--- response ({choice.stop_reason})\n{choice.message.text}")
        cached = response.prompt_cache_hit_tokens or 0
        usage = get_model_usage(prompt, response.sequences, cached)
        return ModelOutput(model=self.model_name, choices=choices, usage=usage, time=seconds)

    def _params(self, config: GenerateConfig) -> tinker.SamplingParams:
        stop: Any = self.renderer.get_stop_sequences()
        if config.stop_seqs:
            # The SDK accepts either stop tokens or stop strings, so stop tokens become strings.
            codec = self.renderer.codec
            own = (codec.decode([s]) if isinstance(s, int) else s for s in stop)
            stop = [*config.stop_seqs, *own]
        seed, state = config.seed, sample_state()
        # Inspect has one seed for a whole task, so all epochs of a problem would be equal.
        if seed is not None and state is not None and state.epoch > 1:
            seed = derived_seed(seed, state.epoch)
        return tinker.SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if config.max_tokens is None else config.max_tokens,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k,
            seed=seed,
            stop=stop,
        )

    def _choice(
        self, prompt_length: int, config: GenerateConfig, sequence: tinker.SampledSequence
    ) -> ChatCompletionChoice:
        """Parses a sampled sequence."""
        sampled = list(sequence.tokens)
        converted = assistant_message(
            self._parse(sampled, config.stop_seqs or []),
            self.model_name,
            include_reasoning=self.include_reasoning,
            parallel_tool_calls=config.parallel_tool_calls is not False,
        )
        stop_reason: StopReason = "tool_calls" if converted.tool_calls else "stop"
        if sequence.stop_reason == "length":
            used, window = prompt_length + len(sampled), self._context_window
            stop_reason = "model_length" if window and used >= window else "max_tokens"
        return ChatCompletionChoice(message=converted, stop_reason=stop_reason)

    def _parse(self, sampled: list[int], stop_strings: Sequence[str]) -> Message:
        if stop_strings:
            # A stop string may end within a token, so remove it from the text.
            text = self.renderer.codec.decode(sampled)
            at = [i for stop in stop_strings if (i := text.find(stop)) >= 0]
            if at:
                reader = self.renderer.message_reader()
                reader.feed(text[: min(at)])
                reader.finish()
                return reader.message()
        return self.renderer.parse_response(sampled)[0]

    async def _open(self) -> None:
        """Opens the model of the settings; concurrent requests wait for one opening."""
        async with self._opening:
            if self.sampling_client is None:
                # In a thread: connecting to the engine imports torch.
                self._connection = await asyncio.to_thread(self._settings.connect)
                model = await open_sampling_model(self._connection, self._settings)
                self.renderer, self.sampling_client = model.renderer, model.client

    async def aclose(self) -> None:
        """Closes the connection if this object opened it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self.sampling_client = None
            await asyncio.to_thread(connection.close)

    async def count_text_tokens(self, text: str) -> int:
        """Returns the tokens of ``text`` in the model's own vocabulary.

        Inspect would otherwise download another model's tokenizer for an estimate.
        """
        return max(1, len(await self.tokenize(text)))

    async def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of ``text``, without special tokens."""
        tokenizer = get_tokenizer(self.model_name)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def max_tokens(self) -> int:
        """Returns the default maximum tokens of a response."""
        return DEFAULT_MAX_TOKENS

    def max_connections(self) -> int:
        """Returns the number of concurrent requests: the engine batches them."""
        return _MAX_CONNECTIONS


def _context_of(model_name: str) -> int | None:
    try:
        return resolve_max_length(model_name, None)
    except DataFormatError:  # a folder with only a tokenizer
        return None


def _check_supported(config: GenerateConfig, tool_choice: ToolChoice) -> None:
    found = {name: getattr(config, name, None) for name in _UNSUPPORTED}
    refused = {n: v for n, v in found.items() if v is not None and v not in _UNSUPPORTED[n]}
    if tool_choice not in ("auto", "none"):
        refused["tool_choice"] = tool_choice
    for name, value in refused.items():
        raise ConfigurationError(
            f"{name}: got {value!r}, which is not supported here; leave it out of the task, or run "
            "the task against the server's OpenAI API"
        )
