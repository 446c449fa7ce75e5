"""Quantised bases: settings, refusals, and the way of a quantised layout through the model.

What needs bitsandbytes is in ``quantized_checks`` and runs in an environment of its own.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import engine_reference as ref
import numpy as np
import pytest
import torch
from environments import python_with, run_in
from image_prompts import example_of, group_of, prompt_of
from transformers import AutoModelForCausalLM

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.extensions import quantized
from tinker_cookbook.engine.extensions.quantized import quantize_tables
from tinker_cookbook.engine.kernels.cpu.build import library
from tinker_cookbook.engine.kernels.cpu.linear import _Panels
from tinker_cookbook.engine.model import base_model
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.loading import (
    check_architecture,
    dequantized,
    model_class,
)
from tinker_cookbook.engine.model.low_rank import LowRank
from tinker_cookbook.engine.sampling.requests import SamplingSettings
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import ConfigurationError

CHECKS = Path(__file__).resolve().parent / "quantized_checks" / "quantized_checks.py"


class Rounded(quantized._Dequantized):
    """Quantises to bfloat16, without a package."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._kept, self._dtype = weight.to(torch.bfloat16), weight.dtype

    def dense(self) -> torch.Tensor:
        return self._kept.to(self._dtype)

    def rows(self, at: torch.Tensor) -> torch.Tensor:
        return self.dense()[at]


class FakeBitsandbytes:
    """Random codes of 4 bits in bitsandbytes' order, and the weights that they stand for."""

    def __init__(self) -> None:
        self.values = torch.randn(16)

    def quantize_4bit(self, weight: torch.Tensor, **_: object) -> tuple[torch.Tensor, object]:
        codes = torch.randint(0, 16, (weight.numel(),), dtype=torch.uint8)
        scales = torch.rand(weight.numel() // 64)
        self.dense = (self.values[codes.long()].view(-1, 64) * scales[:, None]).view(weight.shape)
        packed = (codes[::2] << 4 | codes[1::2])[:, None]
        return packed, SimpleNamespace(absmax=scales, code=self.values)


@pytest.mark.parametrize("shape", [(96, 192), (130, 64), (7, 1088)])
@pytest.mark.parametrize("rows", [1, 7, 150])
def test_panels_of_4_bits_give_the_bits_of_plain_panels(shape, rows, monkeypatch):
    if library() is None:
        pytest.skip("needs a C compiler")
    fake = FakeBitsandbytes()
    monkeypatch.setattr(quantized, "_functional", lambda: fake)
    layout = quantized._NF4Panels(torch.zeros(shape))
    assert torch.equal(layout.dense(), fake.dense)
    plain, x, bias = _Panels(fake.dense), torch.randn(rows, shape[1]), torch.randn(shape[0])
    term = LowRank(torch.randn(5, shape[1]), torch.randn(shape[0], 5))
    assert torch.equal(layout.product(x, bias), plain.product(x, bias))
    for found, expected in zip(
        layout.trained(x, bias, term), plain.trained(x, bias, term), strict=True
    ):
        assert torch.equal(found, expected)
    gradient = torch.randn(rows, shape[0])
    torch.testing.assert_close(layout.transposed().product(gradient), gradient @ fake.dense)


@pytest.mark.slow
def test_the_checks_pass_with_bitsandbytes():
    """A minute, and 60 MB for the environment of the first run."""
    python = python_with("quantized")
    printed = run_in(python, "-m", "pytest", "-q", str(CHECKS), "-p", "no:cacheprovider")
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_vl"])
def test_a_quantised_layout_computes_with_its_weights(kind, tmp_path, monkeypatch):
    """3 s: log-probabilities and gradients of peft on a model of the same rounded weights."""
    folder = ref.make_model(kind, tmp_path / "base")
    monkeypatch.setattr(base_model, "quantized_layout", lambda _: Rounded)
    monkeypatch.setattr(quantized, "quantize_tables", partial(quantize_tables, make=Rounded))
    base = BaseModel(str(folder), folder, ref.CPU, torch.float32, "nf4")
    plain = model_class(folder).from_pretrained(folder, dtype=torch.float32)
    for name, parameter in plain.named_parameters():
        if parameter.dim() > 1 and "gate.weight" not in name and "visual" not in name:
            parameter.data = parameter.data.bfloat16().float()
    plain.save_pretrained(tmp_path / "rounded")
    run = ref.make_run(base)
    data = ref.supervised(np.random.default_rng(0), base, (20, 11, 27))
    prompt, images = data[0].tokens[:5], ()
    if base.vision is not None:
        data += group_of(base)
        prompt, images = prompt_of(base, 2)
    output = run.forward_backward(data, "cross_entropy")
    settings = SamplingSettings(max_tokens=8, seed=1)
    (sample,) = ref.draw(Sampler(base, run.snapshot()), prompt, 1, settings, images=images)
    base.folder = tmp_path / "rounded"  # what the reference loads
    ref.errors_of(run, base, tmp_path, data, ref.weighted(data), output, print).check()
    item = example_of((np.concatenate([prompt, sample.tokens]), images))
    trained = run.forward_backward([item], "cross_entropy", backward=False).logprobs[0]
    np.testing.assert_allclose(trained[len(prompt) - 1 :], sample.logprobs, atol=1e-4)


def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(quantized, "import_module", missing)
    expected = r"base_dtype: got 'nf4'.*bitsandbytes.*pip install -e '.*\[quantized\]'"
    with pytest.raises(ConfigurationError, match=expected):
        Engine("cpu", "float32", "nf4")


def test_checkpoints_that_are_quantised_already_are_refused(tmp_path):
    def stored(method: str) -> None:
        config = {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(config))

    stored("bitsandbytes")
    expected = r"org/m is stored quantised \(quantization_config: bitsandbytes\).*base_dtype=nf4"
    with pytest.raises(ConfigurationError, match=expected):
        dequantized("org/m", tmp_path)
    stored("mxfp4")  # gpt-oss, which transformers converts
    assert dequantized("org/m", tmp_path)["quantization_config"].dequantize
    (tmp_path / "config.json").write_text("{}")
    assert dequantized("org/m", tmp_path) == {}
    check_architecture("org/m", tmp_path)


@pytest.mark.parametrize("inputs", [130, 192])  # an odd and an even number of pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_of_8_bits_compute_exactly_with_their_codes(dtype, inputs):
    if library() is None:
        pytest.skip("needs a C compiler")
    torch.manual_seed(0)
    codes, scales = torch.randint(-127, 128, (200, inputs), dtype=torch.int8), torch.rand(200, 1)
    panels = quantized._Int8Panels(codes, scales, dtype)
    assert torch.equal(panels.dense(), (codes * scales).to(dtype))
    x = torch.randn(300, inputs).to(dtype)
    found = panels.product_fp32(x)
    exact = x.double() @ codes.double().t() * scales.double().t()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-3)
    for count in (1, 5, 20):  # a row has equal bits in every batch
        assert torch.equal(panels.product_fp32(x[:count]), found[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_computes_in_parts_with_its_rows(dtype, monkeypatch):
    monkeypatch.setattr(quantized, "_PART_BYTES_CPU", 4 * 24 * 100)  # 100 rows of 301
    torch.manual_seed(0)
    weight = torch.randn(301, 24).to(dtype)
    weight[7] = 0
    table = quantized.Int8Table(weight)
    dense = table.dense()
    largest = weight.float().abs().amax(1, keepdim=True)
    error = (dense.float() - weight.float()).abs() / largest.clamp(min=1e-9)
    # Half a step of 1/127, and the rounding of the product with the scale.
    assert error.max() <= 1 / 254 + (0 if dtype == torch.float32 else 1 / 128)
    assert error.max() > 1 / 300
    ids = torch.tensor([[3, 7], [300, 3]])
    assert torch.equal(table.rows(ids), dense[ids])
    x, gradient = torch.randn(5, 24).to(dtype), torch.randn(5, 301).to(dtype)
    torch.testing.assert_close(
        table.product(x), x @ dense.t(), rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 0.1
    )
    torch.testing.assert_close(
        table.product_fp32(x), x.double() @ dense.double().t(), check_dtype=False,
        rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 0.05,
    )  # fmt: skip
    exact = gradient.double() @ dense.double()
    found = table.transposed().product(gradient)
    torch.testing.assert_close(
        found, exact.to(dtype), rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 0.1
    )


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_embeddings_are_read_in_8_bits_and_scaled_as_before(kind, tmp_path):
    folder = ref.make_model(kind, tmp_path)
    model, plain = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    head = quantize_tables(model)
    tokens = torch.arange(20)[None]
    found, exact = (one.get_input_embeddings()(tokens) for one in (model, plain))
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02 * exact.abs().max().item())
    assert not torch.equal(found, exact)
    tied = model.config.tie_word_embeddings
    assert tied == (head.forward is model.get_input_embeddings()._table)
    left = [name for name, one in model.named_parameters() if one.dim() > 1 and one.numel()]
    assert all(".layers." in name for name in left)
