"""The settings of the local engine's sampler, for the command lines of programs that sample."""

from __future__ import annotations

import chz


@chz.chz
class SamplerOptions:
    """Settings of ``SamplerSettings`` (``engine.vllm.settings``), which checks them."""

    sampler: str = chz.field(
        default="auto",
        doc="auto, builtin, vllm, or the URL of a vLLM server (local engine); auto: vllm on CUDA "
        "where it is found",
    )
    vllm_python: str | None = chz.field(
        default=None, doc="Python of the environment with vLLM; default: that of vllm on the path"
    )
    vllm_args: str = chz.field(
        default="", doc="Flags of the vLLM server that is started: '--tensor-parallel-size 2'"
    )
    vllm_timeout: float = chz.field(
        default=1800.0, doc="Seconds after which a request to vLLM fails"
    )
