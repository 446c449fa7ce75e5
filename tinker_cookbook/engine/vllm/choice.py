"""Gives an engine the sampler that its settings choose."""

from __future__ import annotations

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.vllm.settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError


def use_sampler(engine: Engine, settings: SamplerSettings) -> str:
    """Returns the sentence for the user that says which sampler the engine has, and why.

    Raises:
        ConfigurationError: vLLM is requested and missing, or no server answers at the URL.
    """
    device = engine.choice.device
    name, reason = settings.choose(device.type)
    if name != "builtin":
        # Loads the HTTP client, which the built-in sampler does without.
        from tinker_cookbook.engine.vllm.sampler import VLLMSampler

        try:
            engine.external = VLLMSampler(settings, device, engine.choice.dtype, engine.submit)
        except ConfigurationError:
            engine.close()
            raise
    return reason
