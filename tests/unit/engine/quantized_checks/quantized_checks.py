"""Checks of quantised bases; run by ``test_quantized.py`` in an environment with bitsandbytes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.extensions import quantized
from tinker_cookbook.engine.extensions.parallel.sharding import Sharding
from tinker_cookbook.engine.extensions.quantized import Int8Table
from tinker_cookbook.engine.kernels import FrozenWeight, quantized_layout
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.requests import SamplingSettings
from tinker_cookbook.engine.sampling.sampler import Sampler

WEIGHT = torch.randn(480, 256, generator=torch.Generator().manual_seed(0))
BOTH = pytest.mark.parametrize("base_dtype", ["nf4", "int8"])


def _base(folder: Path, base_dtype: str, dtype: torch.dtype = torch.float32) -> BaseModel:
    return BaseModel(str(folder), folder, ref.CPU, dtype, base_dtype)


def _data(base: BaseModel) -> list:
    return ref.supervised(np.random.default_rng(0), base, (20, 31, 9))


def test_nf4_equals_bitsandbytes_with_peft(tmp_path):
    """Log-probabilities and gradients of transformers' own 4-bit layers under peft (QLoRA)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

    # Widths that bitsandbytes computes on a CPU.
    sizes = {**ref.SHAPE, "hidden_size": 64, "intermediate_size": 128}
    folder = tmp_path / "base"
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, initializer_range=0.15)).save_pretrained(
        folder
    )
    base = _base(folder, "nf4")
    run, data = ref.make_run(base), _data(base)
    output = run.forward_backward(data, "cross_entropy")
    ref.peft_model(base, run.adapter, tmp_path / "adapter")  # writes the files
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config, device_map="cpu"
    )
    # Embeddings and head in the engine's 8 bits; the head's adapter is peft's.
    for table in (plain.get_input_embeddings(), plain.get_output_embeddings()):
        table.weight.data = Int8Table(table.weight.data).dense()
    model = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), is_trainable=True)
    model.train()  # in evaluation bitsandbytes rounds inputs to bfloat16; there is no dropout
    expected = [ref.reference_logprobs(model, item.tokens, item.targets) for item in data]
    for found, wanted in zip(output.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=2e-5)
    gradients = ref.peft_gradients(model, ref.weighted(data)(expected))
    assert ref.relative_error(run._gradients, gradients) < 1e-4
    # Far from what the unquantised model computes: the comparison above means something.
    unquantised = ref.make_run(ref.load_base(folder)).forward_backward(data, "cross_entropy")
    assert np.abs(unquantised.logprobs[0] - output.logprobs[0]).max() > 0.05


@BOTH
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_sampler_and_trainer_agree(kind, base_dtype, tmp_path):
    base = _base(ref.make_model(kind, tmp_path), base_dtype)
    run = ref.make_run(base)
    prompt = np.arange(5, 25)
    settings = SamplingSettings(max_tokens=20, seed=1)
    for sample in ref.draw(Sampler(base, run.snapshot()), prompt, 4, settings):
        tokens = np.concatenate([prompt, sample.tokens])
        item = ref.example(tokens, weights=np.zeros(len(tokens) - 1))
        trained = run.forward_backward([item], "cross_entropy", backward=False).logprobs[0]
        np.testing.assert_allclose(trained[len(prompt) - 1 :], sample.logprobs, atol=1e-4)


@BOTH
def test_int8_and_nf4_round_as_their_bits_allow(base_dtype, tmp_path):
    """The engine's numbers are those of a plain model with the dequantised weights."""
    folder = ref.make_model("qwen3", tmp_path / "base")
    base = _base(folder, base_dtype)
    plain = ref.load_base(folder)._model
    for name, module in base._model.named_modules():
        if type(module).__name__ == "AdapterLinear":
            weight, exact = module.weight, plain.get_submodule(name).weight
            error = (weight - exact).abs().mean() / exact.abs().mean()
            assert 0.05 < error < 0.12 if base_dtype == "nf4" else 0.002 < error < 0.02


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_copy_serves_both_directions(base_dtype, dtype):
    weight = FrozenWeight(WEIGHT.to(dtype), quantized_layout(base_dtype))
    x, gradient = torch.randn(8, 256).to(dtype), torch.randn(8, 480).to(dtype)
    dense = weight.forward.dense()
    # Panels of 8 bits scale sums in fp32; ``dense`` has weights rounded to bfloat16.
    rounded = base_dtype == "int8" and dtype == torch.bfloat16
    bounds = {"rtol": 2e-2, "atol": 0.5} if rounded else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(weight.forward.product(x), x @ dense.t(), **bounds)
    torch.testing.assert_close(weight.backward.product(gradient), gradient @ dense)
    assert weight.backward._of is weight.forward
    held = [value for value in vars(weight.forward).values() if isinstance(value, torch.Tensor)]
    if base_dtype == "nf4":  # as bitsandbytes rounds it
        state = quantized._functional().quantize_4bit(WEIGHT.to(dtype), quant_type="nf4")
        assert torch.equal(dense, quantized._functional().dequantize_4bit(*state))
    bytes_each = sum(tensor.nbytes for tensor in held) / dense.numel()
    assert bytes_each < (0.57 if base_dtype == "nf4" else 1.05)


group = pytest.fixture(scope="module")(ref.group_of_one)


@pytest.mark.parametrize(
    ("kind", "base_dtype"),
    [("llama", "int8"), ("qwen3_moe", "int8"), ("qwen3_moe", "nf4"), ("gpt_oss", "nf4")],
)
def test_a_base_that_fsdp_divides_trains_as_the_whole_one(group, tmp_path, kind, base_dtype):
    """In a group of one process; two are in ``test_data_parallel``."""
    folder = ref.make_model(kind, tmp_path)
    whole, sharded = (
        BaseModel(str(folder), folder, ref.CPU, torch.float32, base_dtype, sharding=sharding)
        for sharding in (None, Sharding(base_dtype))
    )
    ref.assert_trains_equally(sharded, whole)


def test_the_engine_loads_and_says_it(tmp_path):
    engine = Engine("cpu", "float32", "nf4")
    folder = ref.make_model("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    base = engine.submit(engine.base_model, str(folder)).result()
    assert type(base._model.model.layers[0].mlp.up_proj.frozen.forward).__name__ == "_NF4"
    assert type(base.head.weight.forward).__name__ == "Int8Table"
    engine.close()
