"""Images in the engine against plain transformers, peft and autograd."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import engine_reference as ref
import numpy as np
import pytest
import torch
from image_prompts import example_of, group_of, prompt_of
from tiny_vlm import tiny_vlm

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import (
    SamplingSettings,
    sample_request,
    score_request,
)
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.sampling.scoring import Scorer
from tinker_cookbook.engine.training.examples import Example
from tinker_cookbook.engine.vision import processing
from tinker_cookbook.engine.vision.images import image_at, is_image
from tinker_cookbook.engine.vision.processing import image_reader
from tinker_cookbook.exceptions import ConfigurationError


@pytest.fixture
def base(request: Any, tiny_base: Callable[..., BaseModel]) -> BaseModel:
    return tiny_base(request.param)


EVERY_VLM = pytest.mark.parametrize("base", ref.VLMS, indirect=True)


@pytest.mark.parametrize("base", [*ref.VLMS, "llava"], indirect=True)
@pytest.mark.parametrize("budget", [10_000, 1], ids=["one batch", "one row each"])
def test_training_equals_peft(base, budget, tmp_path, record_property):
    """0, 1 and 3 images of different sizes in one batch."""
    data = [example_of(prompt_of(base, count, count), count) for count in (1, 0, 3)]
    run = ref.make_run(base, budget)
    output = run.forward_backward(data, "cross_entropy")
    ref.errors_of(run, base, tmp_path, data, ref.weighted(data), output, record_property).check()
    # What is compared depends on the pixels.
    other = [example_of(prompt_of(base, 1, 1, pixels=99), 1)]
    found = run.forward_backward(other, "cross_entropy", backward=False).logprobs[0]
    assert np.abs(found - output.logprobs[0])[-12:].max() > 0.01


@EVERY_VLM
def test_a_shared_prefix_with_images_equals_separate_rows(base, tmp_path, record_property):
    """A group of answers to one prompt: the row has the images once."""
    data, run = group_of(base), ref.make_run(base)
    micros = run._plan(data)
    assert micros[0].shared
    output = run.forward_backward(data, "cross_entropy")
    ref.errors_of(run, base, tmp_path, data, ref.weighted(data), output, record_property).check()


@pytest.mark.parametrize("base", ["gemma3_vl", "smolvlm"], indirect=True)
def test_images_without_text_between_them(base, tmp_path, record_property):
    """transformers makes one block of Gemma 3's, in which each image sees the later ones, so the
    prompts share no image although they begin with the same ones."""
    prompts = [prompt_of(base, count, 20, adjacent=True) for count in (1, 2, 3)]
    prompts.append((np.append(prompts[2][0], [5, 6]), prompts[2][1]))
    data = [example_of(prompt, number) for number, prompt in enumerate(prompts)]
    run = ref.make_run(base)
    output = run.forward_backward(data, "cross_entropy")
    ref.errors_of(run, base, tmp_path, data, ref.weighted(data), output, record_property).check()
    sampler, settings = Sampler(base, run.adapter), SamplingSettings(max_tokens=3, seed=1)
    found = {}
    for step_tokens in (10_000, 9):
        assert base.kv_shapes is not None
        scheduler = Scheduler(base, base.kv_shapes)
        scheduler._step_tokens = step_tokens
        for turn in range(2):  # the second time, prefixes are found in the cache
            requests = [sample_request(sampler, t, 1, settings, images=i) for t, i in prompts]
            ref.finish(scheduler, *requests)
            found[step_tokens, turn] = [r.future.result(timeout=0)[0] for r in requests]
    for samples in found.values():
        assert [s.logprobs for s in samples] == [s.logprobs for s in found[9, 1]]
    for (tokens, images), sample in zip(prompts, found[9, 1], strict=True):
        whole = np.concatenate([tokens, sample.tokens]), images
        item = example_of(whole)
        (trained,) = run.forward_backward([item], "cross_entropy", backward=False).logprobs
        np.testing.assert_allclose(trained[-3:], sample.logprobs, atol=1e-5)
        scored = ref.score(sampler, whole[0], logprobs=True, images=images).logprobs
        assert scored is not None
        np.testing.assert_allclose(scored[-3:], sample.logprobs, atol=1e-5)


@EVERY_VLM
def test_greedy_samples_equal_generate(base):
    from tinker_cookbook.engine.model.loading import model_class

    plain = model_class(base.folder).from_pretrained(base.folder, dtype=torch.float32).eval()
    prompts = [prompt_of(base, count, 10 + count) for count in (0, 1, 3)]
    settings = SamplingSettings(max_tokens=12, temperature=0)
    requests = [
        sample_request(Sampler(base, None), tokens, 2, settings, images=images)
        for tokens, images in prompts
    ]
    ref.run_batch(base, requests)
    for request, (tokens, images) in zip(requests, prompts, strict=True):
        inputs = ref.with_images(plain, tokens, images)
        expected = plain.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
        for sample in request.future.result(timeout=0):
            assert sample.tokens == expected[0, len(tokens) :].tolist()


@EVERY_VLM
def test_sampler_and_trainer_agree(base):
    """Also over two turns, the second of which continues a cached prefix and adds an image."""
    adapter = ref.random_adapter(base)
    sampler = Sampler(base, adapter)
    settings = SamplingSettings(max_tokens=10, seed=3)
    tokens, images = prompt_of(base, 2, 20)
    (first,) = ref.draw(sampler, tokens, 1, settings, images=images)
    more, others = prompt_of(base, 1, 30)
    tokens = np.concatenate([tokens, first.tokens, more])
    images += others
    (second,) = ref.draw(sampler, tokens, 1, settings, images=images)
    whole = np.concatenate([tokens, second.tokens])
    targets = np.where(is_image(whole), 0, whole)[1:]
    run = ref.TrainingRun("run", base, adapter, 10_000)
    weights = np.zeros(len(targets), np.float32)
    item = Example(whole[:-1], {"target_tokens": targets, "weights": weights}, images)
    (trained,) = run.forward_backward([item], "cross_entropy", backward=False).logprobs
    np.testing.assert_allclose(trained[-10:], second.logprobs, atol=1e-4)
    scores = ref.score(sampler, whole, logprobs=True, images=images)
    text, scored = ~is_image(whole)[1:], scores.logprobs
    assert scored is not None
    np.testing.assert_allclose(scored[1:][text], trained[text], atol=1e-4)
    assert np.isnan(scored[1:][~text]).all()


@pytest.mark.parametrize("base", ["qwen3_vl", "qwen2_5_vl", "internvl"], indirect=True)
def test_adapters_on_the_vision_tower(base, tmp_path, record_property):
    """Gradients of tower and connector, and a sampler that has the trained features."""
    spec = AdapterSpec(rank=4, train_vision=True)
    data = [example_of(prompt_of(base, count, count), count) for count in (1, 0, 3)]
    run = ref.make_run(base, spec=spec)
    output = run.forward_backward(data, "cross_entropy")
    gradient = run._pending or run._gradients
    assert any("vis" in name and g.abs().max() > 1e-4 for name, g in gradient.items())
    ref.errors_of(run, base, tmp_path, data, ref.weighted(data), output, record_property).check()
    # Two samplers with different towers in one batch, and one without an adapter.
    adapters = [ref.random_adapter(base, spec, seed, 0.2) for seed in (1, 2)]
    samplers = [Sampler(base, adapter) for adapter in (*adapters, None)]
    tokens, images = prompt_of(base, 2, 40)
    settings = SamplingSettings(max_tokens=6, temperature=0)
    alone = [ref.draw(one, tokens, 1, settings, images=images)[0] for one in samplers]
    requests = [sample_request(one, tokens, 1, settings, images=images) for one in samplers]
    ref.run_batch(base, requests)
    for request, expected in zip(requests, alone, strict=True):
        (found,) = request.future.result(timeout=0)
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert len({tuple(sample.logprobs) for sample in alone}) == 3
    for adapter, sample in zip(adapters, alone, strict=False):
        whole = np.concatenate([tokens, sample.tokens])
        trainer = ref.TrainingRun("run", base, adapter, 10_000)
        item = example_of((whole, images))
        (trained,) = trainer.forward_backward([item], "cross_entropy", backward=False).logprobs
        np.testing.assert_allclose(trained[-6:], sample.logprobs, atol=1e-4)


@EVERY_VLM
def test_batch_invariance(base, monkeypatch):
    """Alone, with others, in chunks of a few tokens, and after a cached prefix."""
    sampler = Sampler(base, ref.random_adapter(base))
    settings = SamplingSettings(max_tokens=6, seed=1)
    prompts = [prompt_of(base, count, 50 + count) for count in (0, 1, 3)]
    # An image that begins in one block of the cache and ends in the next.
    prompts.append((np.concatenate([np.arange(3, 56), prompts[1][0]]), prompts[1][1]))
    computed = ref.count_computed(base, monkeypatch)
    alone = [ref.draw(sampler, t, 2, settings, images=images) for t, images in prompts]

    def together(step_tokens: int) -> None:
        requests = [sample_request(sampler, t, 2, settings, images=i) for t, i in prompts]
        assert base.kv_shapes is not None
        scheduler = Scheduler(base, base.kv_shapes)
        scheduler._step_tokens = step_tokens
        computed.clear()
        ref.finish(scheduler, *requests)
        for request, expected in zip(requests, alone, strict=True):
            for found, one in zip(request.future.result(timeout=0), expected, strict=True):
                assert (found.tokens, found.logprobs) == (one.tokens, one.logprobs)

    together(10_000)
    # A group's prompt, with its images, is computed once, and each sample's tokens but the last.
    assert sum(computed) == sum(len(tokens) for tokens, _ in prompts) + 4 * 2 * 5
    for step_tokens in (9, 17):
        together(step_tokens)
        assert len(computed) > 12


def test_a_prompt_is_prefilled_again_after_an_error(tiny_base, monkeypatch):
    """Before its first token is sampled."""
    base = tiny_base("qwen3_vl")
    sampler, settings = Sampler(base, None), SamplingSettings(max_tokens=4, temperature=0)
    tokens, images = prompt_of(base, 2, 75)
    (expected,) = ref.draw(sampler, tokens, 1, settings, images=images)
    requests = [
        sample_request(sampler, t, 1, settings, images=images) for t in (tokens, tokens[5:])
    ]
    compute, calls = base.hidden_of_batch, []

    def failing_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return compute(*arguments)

    monkeypatch.setattr(base, "hidden_of_batch", failing_once)
    ref.run_batch(base, requests)
    (found,) = requests[0].future.result(timeout=0)
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


@EVERY_VLM
def test_scores_of_a_prompt_that_ends_in_an_image(base):
    """Together with a prompt that goes on after the image."""
    sampler = Sampler(base, ref.random_adapter(base))
    longer, images = prompt_of(base, 1, 60)
    prompts = [longer[:-15], longer]
    alone = [ref.score(sampler, tokens, logprobs=True, images=images) for tokens in prompts]
    requests = [score_request(sampler, t, logprobs=True, images=images) for t in prompts]
    scorer = Scorer(lambda _: 10_000)
    for request in requests:
        scorer.add(request)
    scorer.serve(requests[0])
    for request, expected in zip(requests, alone, strict=True):
        found = request.future.result(timeout=0).logprobs
        np.testing.assert_array_equal(found, expected.logprobs)


def test_images_for_models_that_take_none(tmp_path):
    with pytest.raises(ConfigurationError, match="is a text model"):
        image_reader("llama", ref.make_model("llama", tmp_path / "llama"))
    folder = tiny_vlm(tmp_path / "qwen", "qwen3_vl")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigurationError, match="has no image processor"):
        image_reader("qwen", folder)
    base = ref.load_base(folder)  # text alone works
    assert base.vision is None
    sample, *_ = ref.draw(Sampler(base, None), [5, 6], 1, SamplingSettings(max_tokens=3, seed=0))
    assert len(sample.tokens) == 3


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("qwen3_vl", "family", "differ from the model's own"),  # positions on three axes
        ("llava", "settings", "the model fails for .* do not match"),
    ],
)
def test_images_that_differ_are_refused(tmp_path, monkeypatch, kind, change, why):
    """Of models that the engine reads by transformers' processor; text works."""
    folder = tiny_vlm(tmp_path / "model", kind, seed=2)
    if change == "family":
        monkeypatch.delitem(processing.FAMILIES, kind)
    elif change == "settings":
        settings = folder / "processor_config.json"
        settings.write_text(settings.read_text().replace('"default"', '"full"'))
    base = ref.load_base(folder)
    assert base.vision is None
    prompt, sampler = prompt_of(base, 1), Sampler(base, None)
    why = rf"\(model_type '{kind}'\) takes no images: .*{why}.*\. Text alone works"
    item = example_of(prompt)
    for refused in (
        lambda: sample_request(sampler, prompt[0], 1, SamplingSettings(), images=prompt[1]),
        lambda: score_request(sampler, prompt[0], images=prompt[1]),
        lambda: ref.make_run(base).forward_backward([item], LOSS),
        lambda: ref.make_run(base).forward_backward_custom([item], lambda *_: None),
    ):
        with pytest.raises(ConfigurationError, match=why):
            refused()
    sample, *_ = ref.draw(sampler, [5, 6], 1, SamplingSettings(max_tokens=3, seed=0))
    assert len(sample.tokens) == 3


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="log-probabilities depend on later tokens, by"):
        ref.load_base(tiny_vlm(tmp_path / "model", "paligemma"))


LOSS = "cross_entropy"
QWEN = pytest.mark.parametrize("base", ["qwen3_vl"], indirect=True)


@QWEN
def test_images_reach_another_process(base):
    """As ranks get them: nothing else of this process refers to the image."""
    tokens, images = prompt_of(base, 1, 90)
    sent, ids = pickle.dumps(example_of((tokens, images))), tokens[is_image(tokens)]
    expected = images[0].pixels()
    del images
    image_reader.cache_clear()
    gc.collect()
    with pytest.raises(KeyError):
        image_at(int(ids[0]))
    received = pickle.loads(sent)
    assert image_at(int(ids[0])) is received.images[0]
    for name, array in received.images[0].pixels().items():
        np.testing.assert_array_equal(array, expected[name])


def test_the_sampler_of_recurrent_models(tmp_path):
    """Qwen3.5 is sampled one request at a time: as the trainer, alone or with others."""
    base = ref.load_base(tiny_vlm(tmp_path / "qwen", "qwen3_5"))
    assert base.kv_shapes is None
    adapter, run = ref.random_adapter(base), ref.make_run(base)
    run.adapter = adapter
    sampler, settings = Sampler(base, adapter), SamplingSettings(max_tokens=4, seed=1)
    prompts = [prompt_of(base, count, 50 + count) for count in (1, 3)]

    def drawn(chosen):
        requests = [sample_request(sampler, t, 2, settings, images=i) for t, i in chosen]
        scheduler = FallbackSampler()
        ref.finish(scheduler, *requests)
        return [request.future.result(timeout=0) for request in requests]

    together = drawn(prompts)
    for (tokens, images), samples in zip(prompts, together, strict=True):
        (alone,) = drawn([(tokens, images)])
        assert [s.tokens for s in alone] == [s.tokens for s in samples]
        assert len({tuple(sample.tokens) for sample in samples}) == 2
        for sample in samples:
            whole = np.concatenate([tokens, sample.tokens])
            item = example_of((whole, images))
            (trained,) = run.forward_backward([item], "cross_entropy", backward=False).logprobs
            np.testing.assert_allclose(trained[-4:], sample.logprobs, atol=1e-3)
            scored = ref.score(sampler, whole, logprobs=True, images=images).logprobs
            assert scored is not None
            text = ~is_image(whole)[1:]
            np.testing.assert_allclose(scored[1:][text], trained[text], atol=1e-3)
