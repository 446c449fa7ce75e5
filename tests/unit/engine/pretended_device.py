"""A CUDA device for tests on a machine without one: tensors say ``cuda:0``, numbers are in RAM.

Inside ``with PretendedDevice() as device`` every operator is checked as CUDA checks it and is then
computed on the CPU. An operator that mixes CPU tensors and device tensors fails, and so does code
that reads a device tensor through numpy or by its address. Kernels, waits of the host, copies to
the device and the attention backends that CUDA would choose are counted.

It does not show errors of real kernels (alignment, missing dtypes), real memory or speed.
"""

from __future__ import annotations

from typing import Any

import pretended_kernels
import torch
from pretended_mode import DEVICE, PretendedMode

from tinker_cookbook.engine.kernels.cuda import attention as cuda_attention

__all__ = ["DEVICE", "PretendedDevice"]


class PretendedDevice(PretendedMode):
    """The device. With ``liger``, Liger's kernels are installed."""

    def __init__(self, total_bytes: int = 16 << 30, *, liger: bool = False) -> None:
        super().__init__(total_bytes)
        self._liger = liger

    def functions(self) -> list[tuple[Any, str, Any]]:
        return [
            (torch.nn.functional, "scaled_dot_product_attention", pretended_kernels.sdpa),
            (cuda_attention, "_flex_attention", lambda device_type: pretended_kernels.flex),
        ]

    def modules(self) -> dict[str, Any]:
        package = pretended_kernels.liger_kernel() if self._liger else None
        return {"liger_kernel": package, "liger_kernel.ops": package and package.ops}
