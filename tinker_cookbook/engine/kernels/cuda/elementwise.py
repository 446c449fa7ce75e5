"""Norms, gates and rotary embeddings in one kernel each, by Liger (extra ``gpu``).

torch launches eight kernels for a norm and ten for rotary embeddings, each a pass over memory: an
estimated two fifths of a training step on a large GPU. Liger's kernels are written in Triton, which
compiles them at their first use (this needs a C compiler). ``fusing`` installs them in a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tinker_cookbook.engine.kernels.fusing import Elementwise
from tinker_cookbook.exceptions import install_command

logger = logging.getLogger(__name__)


def elementwise() -> Elementwise | None:
    """Returns Liger's kernels; ``None`` if the package is not installed."""
    try:
        from liger_kernel import ops  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        logger.info(
            "Liger's kernels are not used, and training is slower: %s. "
            f"{install_command('gpu')} has them",
            error,
        )
        return None
    return Elementwise(
        # Llama multiplies the rounded value by the weight, Gemma the unrounded one by 1 + weight.
        norms=(
            partial(_norm_of, ops.LigerRMSNormFunction, 0.0, "llama"),
            partial(_norm_of, ops.LigerRMSNormFunction, 1.0, "gemma"),
        ),
        # The gradients overwrite gate and up, which nothing else uses.
        gates=(ops.LigerSiLUMulFunction.apply, ops.LigerGELUMulFunction.apply),
        # They also overwrite q and k, which are new results of a product or a norm.
        rotate=ops.LigerRopeFunction.apply,
    )


def _norm_of(
    function: Any, offset: float, casting: str, weight: Tensor, eps: float
) -> Callable[[Tensor], Tensor]:
    # Not in place: the upstream gradient of a norm after a layer (Gemma) is also used by the
    # residual stream.
    return lambda x: function.apply(x, weight, eps, offset, casting, False)
