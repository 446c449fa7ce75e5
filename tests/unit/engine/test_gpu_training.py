"""Training on a pretended GPU with Liger's kernels gives the CPU's numbers."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch
from device_jobs import JOBS
from pretended_device import DEVICE, PretendedDevice

PARTS = {"llama": 7, "qwen3": 13, "gemma3": 19, "gpt_oss": 7, "qwen3_moe": 13}
"""Norms of a model of three layers, each of which becomes one kernel."""

JOBS_OF_TRAINING = [name for name in JOBS if not name.startswith(("sampling", "scoring"))]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=() if kind == "gemma3" else pytest.mark.slow) for kind in PARTS
])  # fmt: skip
def test_liger_gives_the_numbers_of_the_cpu(tiny_base, tmp_path, kind):
    """Both kinds of gates; all of training for one model, and two passes for the others."""
    jobs = (
        JOBS_OF_TRAINING if kind == "llama" else ("ppo, shared rows", "cross_entropy, padded rows")
    )
    expected = {name: JOBS[name](tiny_base(kind)) for name in jobs}
    with PretendedDevice(liger=True) as device:
        base = ref.load_base(ref.make_model(kind, tmp_path), torch.float32, DEVICE)
        with torch.no_grad():
            base.hidden(torch.arange(3, 20, device=DEVICE)[None])
        fused = [m for m in base._model.modules() if type(m).__name__ == "FusedNorm"]
        assert len(fused) >= PARTS[kind]
        # gpt-oss rotates halves that are not repeated, which Liger's kernel does not compute.
        assert (device.used["liger rope"] >= 3) == (kind != "gpt_oss")
        found = {name: JOBS[name](base) for name in jobs}
    for name, arrays in expected.items():
        for got, want in zip(found[name], arrays, strict=True):
            scale = max(float(np.nanmax(np.abs(want), initial=0.0)), 1e-6)
            np.testing.assert_allclose(got, want, atol=1e-4 * scale, rtol=0, err_msg=name)
