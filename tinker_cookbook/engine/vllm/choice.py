"""Gives an engine the sampler that its settings choose."""

from __future__ import annotations

from dataclasses import replace

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.vllm.settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError


def use_sampler(engine: Engine, settings: SamplerSettings) -> str:
    """Returns the sentence for the user that says which sampler the engine has, and why.

    Raises:
        ConfigurationError: vLLM is requested and missing, or no server answers at the URL.
    """
    device = engine.choice.device
    # vLLM has other weights than a quantised base, and does not tell what its routers chose.
    own = {"base_dtype": engine.base_dtype != "auto", "replay_router": engine.replay_router}
    if needed := [name for name, on in own.items() if on]:
        if settings.sampler not in ("auto", "builtin"):
            raise ConfigurationError(
                f"sampler={settings.sampler}: {' and '.join(needed)} work with the engine's own "
                "sampler; set sampler=builtin"
            )
        settings = replace(settings, sampler="builtin")
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
