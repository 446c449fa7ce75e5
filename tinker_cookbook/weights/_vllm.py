"""Computes log-probabilities in vLLM, in a separate process.

Run as a script by the Python of an environment with vLLM, which pins other versions of packages
than this package needs. It does not import this package.

python -I _vllm.py request.json answer.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_KV_CACHE_BYTES = 256 * 2**20


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Returns ``logprobs`` (for each prompt, [T - 1]) and ``version``.

    ``request``: ``model`` (folder), ``lora`` (folder of an adapter or ""), ``rank`` (largest rank
    that vLLM prepares for), ``prompts`` (token ids).
    """
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    prompts, lora = request["prompts"], request["lora"]
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": request["rank"]}
    llm: Any = vllm.LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + 1,
        max_num_seqs=32,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        **(options if lora else {}),
    )
    # After each prefix of a prompt, one token is sampled, and only the prompt's next token is
    # allowed. Its log-probability is computed without this restriction. vLLM's log-probabilities of
    # prompt tokens fail with an adapter on the head.
    beginnings = [tokens[:at] for tokens in prompts for at in range(1, len(tokens))]
    following = [token for tokens in prompts for token in tokens[1:]]
    answers = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in beginnings],
        [
            vllm.SamplingParams(
                max_tokens=1,
                temperature=0.0,
                logprobs=0,
                allowed_token_ids=[token],
                detokenize=False,
            )
            for token in following
        ],
        lora_request=LoRARequest("export", 1, lora) if lora else None,
        use_tqdm=False,
    )
    found = iter(
        [
            answer.outputs[0].logprobs[0][token].logprob
            for answer, token in zip(answers, following, strict=True)
        ]
    )
    return {
        "logprobs": [[next(found) for _ in tokens[1:]] for tokens in prompts],
        "version": str(vllm.__version__),
    }


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    # vLLM's threads and process groups may take seconds to end.
    os._exit(0)
