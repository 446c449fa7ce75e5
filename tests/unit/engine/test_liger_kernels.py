"""Liger's own kernels in the engine's place: on a GPU, else by Triton's interpreter on the CPU.

Both need liger-kernel and triton; without them these tests are skipped, and the fused paths are
tested with emulated kernels (``test_gpu_training``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine import kernels
from tinker_cookbook.engine.kernels.cuda import elementwise

pytestmark = [
    pytest.mark.slow,  # half a minute a model by the interpreter
    pytest.mark.skipif(
        find_spec("liger_kernel") is None or find_spec("triton") is None,
        reason="needs liger-kernel and triton",
    ),
]


@pytest.fixture
def interpreter(monkeypatch) -> Iterator[None]:
    """Triton's interpreter, which by itself hands numbers to a kernel as Python's floats."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels themselves")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton import language as tl
    from triton.runtime import interpreter

    usual = interpreter._implicit_cvt

    def converted(value):
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return usual(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(kernels._on_cpu, "elementwise", lambda dtype: elementwise.elementwise())
    yield
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_by_the_interpreter(tiny_base, interpreter, tmp_path, kind):
    """Norms of both kinds, both gates and rotary embeddings: the engine's numbers."""
    usual = tiny_base(kind)
    base = ref.load_base(ref.make_model(kind, tmp_path))
    modules = [type(module).__name__ for module in base._model.modules()]
    assert modules.count("FusedNorm") > 6
    assert not any(name.endswith("RMSNorm") for name in modules)
    assert all("forward" in vars(layer.mlp) for layer in base._decoder.layers)
    assert len(base._rotary._fused) == 1
    data = ref.supervised(np.random.default_rng(0), usual, (5, 9))
    runs = [ref.make_run(each) for each in (usual, base)]
    expected, found = (run.forward_backward(data, "cross_entropy") for run in runs)
    for got, want in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert ref.relative_error(runs[1]._gradients, runs[0]._gradients) <= 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "granite"])
def test_on_a_gpu(tiny_base, tmp_path, kind):
    usual = tiny_base(kind)
    folder = ref.make_model(kind, tmp_path)
    base = ref.load_base(folder, torch.float32, torch.device("cuda", 0))
    assert sum(type(m).__name__ == "FusedNorm" for m in base._model.modules()) >= 7
    data = ref.supervised(np.random.default_rng(0), usual, (50, 90, 20))
    runs = [ref.make_run(each) for each in (usual, base)]
    for run in runs:
        run.forward_backward(data, "cross_entropy")
    found = {name: gradient.cpu() for name, gradient in runs[1]._gradients.items()}
    assert ref.relative_error(found, runs[0]._gradients) <= 1e-4
