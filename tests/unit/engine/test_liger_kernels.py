"""Liger's own kernels on a GPU; ``test_gpu_training`` tests the fused paths with emulated ones."""

from __future__ import annotations

from importlib.util import find_spec

import engine_reference as ref
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("liger_kernel") is None or find_spec("triton") is None,
    reason="needs liger-kernel and triton",
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "granite"])
def test_on_a_gpu(tiny_base, tmp_path, kind):
    usual = tiny_base(kind)
    folder = ref.make_model(kind, tmp_path)
    base = ref.load_base(folder, torch.float32, torch.device("cuda", 0))
    assert sum(type(m).__name__ == "FusedNorm" for m in base._model.modules()) >= 7
    assert base._rotary._fused
    data = ref.supervised(np.random.default_rng(0), usual, (50, 90, 20))
    runs = [ref.make_run(each) for each in (usual, base)]
    for run in runs:
        run.forward_backward(data, "cross_entropy")
    found = {name: gradient.cpu() for name, gradient in runs[1]._gradients.items()}
    assert ref.relative_error(found, runs[0]._gradients) <= 1e-4
