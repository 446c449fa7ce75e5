"""Norms, gates and rotary embeddings in one kernel each, by Liger (extra ``gpu``).

torch starts eight kernels for a norm and ten for rotary embeddings, each a pass over memory: about
two fifths of a training step on a large GPU, by an estimate. Liger's are written in Triton, which
compiles them at their first use (a C compiler is needed). ``fusing`` puts them into a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tinker_cookbook.engine.kernels.fusing import Elementwise

logger = logging.getLogger(__name__)


def elementwise() -> Elementwise | None:
    """Returns Liger's kernels, if the package is installed."""
    try:
        from liger_kernel import ops  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        logger.info(
            "Liger's kernels are not used, and training is slower: %s. "
            "pip install 'tinker_cookbook[gpu]' has them",
            error,
        )
        return None
    return Elementwise(
        # Llama multiplies the rounded value with the weight, Gemma the exact one with 1 + weight.
        norms=(
            partial(_norm_of, ops.LigerRMSNormFunction, 0.0, "llama"),
            partial(_norm_of, ops.LigerRMSNormFunction, 1.0, "gemma"),
        ),
        # The gradients are written over gate and up, which nothing else keeps.
        gates=(ops.LigerSiLUMulFunction.apply, ops.LigerGELUMulFunction.apply),
        # Over q and k as well, which are fresh results of a product or a norm.
        rotate=ops.LigerRopeFunction.apply,
    )


def _norm_of(
    function: Any, offset: float, casting: str, weight: Tensor, eps: float
) -> Callable[[Tensor], Tensor]:
    # Not in place: the upstream gradient of a norm after a layer (Gemma) is also that of the
    # residual stream.
    return lambda x: function.apply(x, weight, eps, offset, casting, False)
