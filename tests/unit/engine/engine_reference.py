"""Independent references for the engine: plain transformers, peft, autograd, loss formulas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_prompts import group_of
from safetensors.torch import save_file
from tiny_vlm import KINDS, WHOLE_KINDS, tiny_vlm
from torch import distributed

from tinker_cookbook.engine.extensions.parallel.launch import (
    ProcessRank,
    end_process_group,
    start_process_group,
)
from tinker_cookbook.engine.kernels.cpu import linear
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.loading import model_class
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.sampling import paged_cache
from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import (
    PromptScores,
    Sample,
    SampleRequest,
    SamplingSettings,
    sample_request,
    score_request,
)
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.sampling.scoring import Scorer
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.training.run import TrainingRun
from tinker_cookbook.engine.vision.images import ImageInput, is_image

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "granite", "qwen2_bias")
SLIDING = ("gemma2", "gemma3")
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
VLMS = {"gemma3_vl" if kind == "gemma3" else kind: kind for kind in (*KINDS, *WHOLE_KINDS)}
ROUTED = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def make_model(kind: str, folder: Path) -> Path:
    """Saves a small random model whose logits are far from uniform."""
    if kind in VLMS or kind == "llava":
        return tiny_vlm(folder, VLMS.get(kind, kind))
    import transformers as tf

    configs = {
        "llama": lambda: tf.LlamaConfig(**SHAPE, tie_word_embeddings=False),
        "qwen3": lambda: tf.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
        "gemma2": lambda: tf.Gemma2Config(
            **SHAPE, head_dim=16, query_pre_attn_scalar=16, sliding_window=8
        ),
        "gemma3": lambda: tf.Gemma3TextConfig(
            **SHAPE, head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "granite": lambda: tf.GraniteConfig(
            **SHAPE, logits_scaling=4.0, embedding_multiplier=6.0, residual_multiplier=0.5,
            attention_multiplier=0.1, tie_word_embeddings=True,
        ),
        "qwen2_bias": lambda: tf.Qwen2Config(**SHAPE, tie_word_embeddings=True),
        "gpt_oss": lambda: tf.GptOssConfig(
            **SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        ),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, num_experts=4),
        "qwen3_next": lambda: tf.Qwen3NextConfig(
            **{**SHAPE, "num_hidden_layers": 4}, head_dim=16, num_experts=0,
            linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16,
        ),
        "deepseek_v3": lambda: tf.DeepseekV3Config(
            **{**SHAPE, "num_key_value_heads": 4}, **EXPERTS, n_routed_experts=4,
            n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
            q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8,
        ),
    }  # fmt: skip
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(configs[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
            elif name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def load_base(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> BaseModel:
    return BaseModel(str(folder), Path(folder), device, dtype)


def random_adapter(
    base: BaseModel, spec: AdapterSpec | None = None, seed: int = 0, size: float = 0.02
) -> Adapter:
    """An adapter whose B is not zero, so that it changes every layer it covers."""
    adapter = Adapter.create(spec or AdapterSpec(rank=4), base.targets, seed, base.device)
    generator = torch.Generator().manual_seed(seed + 1)
    for _, b in adapter.tensors.values():
        b.copy_(torch.randn(b.shape, generator=generator) * size)
    return adapter


def make_run(base: BaseModel, budget: int = 10_000, **kwargs: Any) -> TrainingRun:
    return TrainingRun("run", base, random_adapter(base, **kwargs), budget)


def group_of_one() -> Iterator[None]:
    """A process group of this process alone, for a fixture."""
    start_process_group(distributed.HashStore(), ProcessRank(0, 1))
    yield
    end_process_group()


def assert_trains_equally(base: BaseModel, reference: BaseModel) -> None:
    """Compares log-probabilities and gradients of a pass of several micro-batches."""
    (logprobs, gradients), (expected, exact) = _trained(base), _trained(reference)
    for found, one in zip(logprobs, expected, strict=True):
        np.testing.assert_allclose(found, one, atol=1e-5)
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        scale = max(1e-3, exact[name].abs().max().item())
        torch.testing.assert_close(gradient, exact[name], rtol=1e-5, atol=1e-5 * scale)


def _trained(base: BaseModel) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    data = []
    for length in (9, 30, 17, 30):
        tokens = rng.integers(3, 300, length)
        inputs = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(length, np.float32)}
        data.append(Example(tokens, inputs))
    if base.vision is not None:
        data += group_of(base)
    run = make_run(base, budget=64)
    output = run.forward_backward(data, "cross_entropy")
    return output.logprobs, run.take_gradients()


def peft_model(base: BaseModel, adapter: Adapter, folder: Path, dtype: Any = torch.float32) -> Any:
    """The same adapter, written as peft files and loaded by peft onto a plain model."""
    from peft import PeftModel

    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(adapter.peft_config(str(base.folder)))
    (folder / "adapter_config.json").write_text(config)
    tensors = {name: t.detach().contiguous() for name, t in adapter.parameters().items()}
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    # A loop over experts: the grouped product of torch has no float64.
    plain = model_class(base.folder).from_pretrained(
        base.folder, dtype=dtype, experts_implementation="eager"
    )
    return PeftModel.from_pretrained(plain, str(folder), is_trainable=True).eval()


def with_images(
    model: Any, tokens: np.ndarray, images: Sequence[ImageInput]
) -> dict[str, torch.Tensor]:
    """What transformers takes for a sequence: tokens, with its own id at the images, and pixels."""
    at = is_image(tokens)
    ids = torch.from_numpy(np.where(at, getattr(model.config, "image_token_id", 0), tokens))[None]
    if not images:
        return {"input_ids": ids}
    pixels = [image.pixels() for image in images]
    axis = int("pixel_attention_mask" in pixels[0])  # Idefics has [prompts, tiles, ...]
    if model.config.model_type == "mistral3":  # in a batch, images of different sizes are padded
        sides = np.max([one["image_sizes"][0] for one in pixels], 0)
        for one in pixels:
            blank = (*((0, 0),) * 2, *((0, n) for n in sides - one["image_sizes"][0]))
            one["pixel_values"] = np.pad(one["pixel_values"], blank)
    arrays = {name: np.concatenate([one[name] for one in pixels], axis) for name in pixels[0]}
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    kinds = {"qwen": "mm_token_type_ids", "gemma": "token_type_ids"}
    name = next((name for k, name in kinds.items() if model.config.model_type.startswith(k)), None)
    more = {} if name is None else {name: torch.from_numpy(at).int()[None]}
    return {"input_ids": ids, **inputs, **more}


def reference_logprobs(
    model: Any, tokens: np.ndarray, targets: np.ndarray, images: Sequence[ImageInput] = ()
) -> torch.Tensor:
    """Log-probabilities [T] or [T, K] by a plain forward of one sequence."""
    logits = model(**with_images(model, tokens, images), use_cache=False).logits[0]
    index = torch.from_numpy(targets).long()
    picked = logits.log_softmax(-1).gather(1, index if index.dim() == 2 else index[:, None])
    return picked if index.dim() == 2 else picked[:, 0]


def reference_loss(
    name: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor], config: dict[str, float]
) -> torch.Tensor:
    """The loss of one sequence, token by token, as its definition reads."""
    if name == "cross_entropy":
        return sum(-lp_i * w for lp_i, w in zip(lp.flatten(), inputs["weights"].flatten()))  # noqa: B905
    q, adv = inputs["logprobs"], inputs["advantages"]
    mask = inputs.get("sequence_ratio_mask")
    total = torch.zeros(())
    if name == "gspo":
        chosen = [i for i in range(len(lp)) if mask[i] == 1]
        mean = sum(lp[i].detach() - q[i] for i in chosen) / len(chosen)
    for i in range(len(lp)):
        a = adv[i]
        low = inputs.get("clip_low_threshold", {i: config.get("clip_low_threshold")})[i]
        high = inputs.get("clip_high_threshold", {i: config.get("clip_high_threshold")})[i]
        ratio = (lp[i] - q[i]).exp()
        if name == "gspo":
            ratio = (mean + lp[i] - lp[i].detach()).exp()
        if name == "importance_sampling":
            term = ratio * a
        elif name == "dro":
            term = lp[i] * a - 0.5 * config["beta"] * (lp[i] - q[i]) ** 2
        else:
            clipped = ratio
            if ratio < low:
                clipped = torch.tensor(float(low))
            elif ratio > high:
                clipped = torch.tensor(float(high))
            if name == "stable_reinforce":
                kl = 0.5 * config["kl_coeff"] * (lp[i] - q[i]) ** 2
                term = clipped.detach() * (lp[i] * a - kl)
            elif name == "cispo":
                term = clipped.detach() * lp[i] * a
            else:
                term = ratio * a if ratio * a <= clipped * a else clipped * a
        total = total - term
    return total


def example(tokens: np.ndarray, **inputs: Any) -> Example:
    """Next-token targets, unless given."""
    arrays = {
        name: np.asarray(value, dtype=np.int64 if name == "target_tokens" else np.float32)
        for name, value in inputs.items()
    }
    if "target_tokens" not in arrays:
        arrays["target_tokens"] = tokens[1:]
        tokens = tokens[:-1]
    return Example(tokens, arrays)


def draw(
    sampler: Sampler, prompt: Any, count: int, settings: SamplingSettings, **kwargs: Any
) -> list[Sample]:
    """Samples of one request, in a batch of its own."""
    request = sample_request(sampler, prompt, count, settings, **kwargs)
    run_batch(sampler.base, [request])
    return request.future.result(timeout=0)


def run_batch(base: BaseModel, requests: list[SampleRequest]) -> Scheduler:
    """Samples all requests together."""
    shapes = base.kv_shapes
    assert shapes is not None, "this model cannot be batched"
    scheduler = Scheduler(base, shapes)
    finish(scheduler, *requests)
    return scheduler


def finish(scheduler: Scheduler | FallbackSampler, *requests: SampleRequest) -> None:
    """Adds requests, and samples until there is nothing left to do."""
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()


def run_now(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Does what the engine's worker would do in its turn."""
    future: Future[Any] = Future()
    future.set_result(work(*arguments))
    return future


def without_compiler(monkeypatch: Any, base: BaseModel) -> None:
    """Samples from ``base`` as on a machine without a compiler, except for the packed matrices."""
    assert base.kv_shapes  # sets the list of operations
    monkeypatch.setattr(base, "_steps", None)
    monkeypatch.setattr(paged_cache, "page_tokens", lambda *_: None)
    monkeypatch.setattr(linear, "library", lambda: None)


def assert_same_samples(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal to the bit; without the C kernels log-probabilities may differ by rounding."""
    assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]
    bound = 0 if linear.library() is not None else 1e-4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=bound)


def count_computed(base: BaseModel, monkeypatch: Any) -> list[int]:
    """Tokens of each forward pass of a batch."""
    computed: list[int] = []
    forward = base.hidden_of_batch

    def counting(tokens: Any, positions: Any, layout: Any, segments: Any) -> torch.Tensor:
        computed.append(sum(run.count for run in layout.runs))
        return forward(tokens, positions, layout, segments)

    monkeypatch.setattr(base, "hidden_of_batch", counting)
    return computed


def score(sampler: Sampler, prompt: Any, **kwargs: Any) -> PromptScores:
    """Scores of one prompt, by itself."""
    request = score_request(sampler, prompt, **kwargs)
    scorer = Scorer(lambda _: 10_000)
    scorer.add(request)
    scorer.serve(request)
    return request.future.result(timeout=0)


def text(base: BaseModel, rng: np.random.Generator, length: int) -> np.ndarray:
    """Tokens [length] drawn from the model: of random ids a trained model is so sure that they
    are wrong (log-probabilities of -30) that fp32 itself rounds at the bounds tested."""
    settings = SamplingSettings(max_tokens=length - 1, seed=int(rng.integers(1 << 30)))
    (sample,) = draw(Sampler(base, None), [1], 1, settings)
    return np.array([1, *sample.tokens])


def supervised(
    rng: np.random.Generator, base: BaseModel, lengths: tuple[int, ...]
) -> list[Example]:
    """Sequences with signed weights and, at the front, zeros."""
    out = []
    for length in lengths:
        weights = rng.normal(size=length).astype(np.float32)
        weights[: length // 3] = 0
        out.append(example(text(base, rng, length + 1), weights=weights))
    return out


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest ``|found - expected| / |expected|`` (Frobenius) over all tensors."""
    assert set(found) == set(expected)
    scale = max(float(e.norm()) for e in expected.values())
    return max(
        float((found[n] - expected[n]).norm()) / max(float(expected[n].norm()), 1e-3 * scale)
        for n in found
    )


def weighted(data: list[Example]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Cross-entropy of ``data`` as a function of their log-probabilities."""
    weights = [torch.from_numpy(item.inputs["weights"]) for item in data]

    def loss_of(lps: list[torch.Tensor]) -> torch.Tensor:
        terms = [(lp * w).sum() for lp, w in zip(lps, weights, strict=True)]
        return -torch.stack(terms).sum()

    return loss_of


@dataclass
class Errors:
    """Distances of a training pass from transformers + peft + autograd in float64.

    ``of_float32`` are those of the same reference in float32: on the trained model rounding alone
    comes to 1e-5, more or less by the processor, and the engine rounds in another order.
    """

    logprobs: float
    gradients: float
    loss: float
    of_float32: Errors | None = None

    def check(self, bound: float = 1e-5) -> None:
        """Each is within ``bound``, or five times the reference's loss by rounding."""
        rounding = self.of_float32 or Errors(0, 0, 0)
        for name in ("logprobs", "gradients", "loss"):
            # Up to three times on CPUs with bfloat16 instructions, 3.9 times on one without.
            allowed = max(bound, 5 * getattr(rounding, name))
            assert getattr(self, name) <= allowed, f"{name}: {self}"


def errors_of(
    run: TrainingRun,
    base: BaseModel,
    folder: Path,
    data: list[Example],
    loss_of: Callable[[list[torch.Tensor]], torch.Tensor],
    output: Any,
    record: Callable[[str, object], None],
) -> Errors:
    """Compares ``output`` and the gradients that ``run`` holds; takes them from it.

    ``loss_of`` makes the loss from the log-probabilities [T] or [T, K] of each sequence.
    """
    taken, run._gradients = run._gradients, {}
    found = [torch.from_numpy(lp) for lp in output.logprobs], output.metrics["loss:sum"], taken
    exact, rounded = (
        _reference_pass(base, run.adapter, folder, data, loss_of, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    errors = _distance(found, exact)
    errors.of_float32 = _distance(rounded, exact)
    record("errors", str(errors))
    return errors


_Pass = tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]


def _reference_pass(
    base: BaseModel, adapter: Adapter, folder: Path, data: list[Example], loss_of: Any, dtype: Any
) -> _Pass:
    model = peft_model(base, adapter, folder).to(dtype)
    lps = [reference_logprobs(model, item.tokens, item.targets, item.images) for item in data]
    loss = loss_of(lps)
    return [lp.detach() for lp in lps], float(loss.detach()), peft_gradients(model, loss)


def _distance(found: _Pass, exact: _Pass) -> Errors:
    worst = max(float((a - b).abs().max()) for a, b in zip(found[0], exact[0], strict=True))
    # Of terms that cancel: rounding is as large as they are, not as what they leave.
    terms = sum(float(lp.square().sum()) for lp in exact[0]) ** 0.5
    loss = abs(found[1] - exact[1]) / max(1.0, abs(exact[1]), terms)
    return Errors(worst, relative_error(found[2], exact[2]), loss)


def peft_gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Adapter gradients by the names of the files."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name.replace(".default.weight", ".weight"): torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }
