"""Settings of the local engine's sampler, for command lines of programs that sample."""

from __future__ import annotations

import chz


@chz.chz
class SamplerOptions:
    """Fields of ``SamplerSettings`` (``engine.sampler_settings``), which validates them."""

    sampler: str = chz.field(
        default="auto",
        doc="auto, builtin, vllm, or the URL of a vLLM server (local engine); auto: vllm on CUDA "
        "if it is installed",
    )
    vllm_python: str | None = chz.field(
        default=None, doc="Python of the environment with vLLM; default: from the vllm command"
    )
    vllm_args: str = chz.field(
        default="", doc="Flags of the started vLLM server, such as '--tensor-parallel-size 2'"
    )
    vllm_timeout: float = chz.field(default=1800.0, doc="Timeout of a request to vLLM in seconds")
