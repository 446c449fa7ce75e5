"""OpenAI client of one rollout; the loop that runs the rollout answers its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import tinker

from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.recipes.verifiers_rl.driven_env import ModelCall
from tinker_cookbook.recipes.verifiers_rl.tinker_openai import TinkerAsyncOpenAIClient
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer


class DrivenOpenAIClient(TinkerAsyncOpenAIClient):
    """Client without a sampling client. Of a call's settings only ``stop`` has an effect."""

    def __init__(self, call: ModelCall, renderer: Renderer, tokenizer: Tokenizer) -> None:
        super().__init__(cast(Any, None), renderer, tokenizer)
        self._call = call

    async def sample(
        self, prompt: tinker.ModelInput, stop: StopCondition, settings: Mapping[str, Any]
    ) -> TokensWithLogprobs:
        """Returns the response that the loop samples."""
        return await self._call(prompt, stop)
