"""Sampling by a vLLM server, here one with its API and real numbers (12 s).

``test_sampler`` runs the contract of sampling on it. The slow test of the real vLLM is in
``tests/recipes/test_vllm_recipe.py``.
"""

from __future__ import annotations

import gc
import os
import signal
import stat
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import engine_reference as ref
import fake_vllm
import numpy as np
import pytest
import tinker
import torch
from fake_vllm import FakeVLLM, Transformers

from tinker_cookbook.backends import connect
from tinker_cookbook.engine import sampler_settings as vllm_settings
from tinker_cookbook.engine.extensions.vllm.sampler import VLLMSampler
from tinker_cookbook.engine.memory import release_cached_memory
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import BackendError, ConfigurationError

SECONDS = 120
PROMPT = [1, 5, 6, 7]


def settings(**kwargs) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": 12, "seed": 1, **kwargs})


def make(url: str, timeout: float = SECONDS) -> VLLMSampler:
    return VLLMSampler(
        SamplerSettings(sampler=url, vllm_timeout=timeout), ref.CPU, torch.float32, ref.run_now
    )


@pytest.fixture
def fake():
    """A server without a model: it answers at once."""
    with FakeVLLM() as running:
        yield running


@pytest.fixture
def base(tiny_base, fake):
    """A base model that ``fake`` has by its name."""
    fake.root = str(tiny_base("llama").folder)
    return tiny_base("llama")


@pytest.fixture
def vllm(fake, base):
    made = make(fake.url)
    yield made
    made.close()


def ask(vllm: VLLMSampler, sampler: Sampler, count: int = 2, on_token=None, **how):
    request = sample_request(sampler, PROMPT, count, settings(**how))
    request.on_token = on_token
    return vllm.sample(request)


def wait_until(condition) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.005)


def test_adapters_in_one_batch_equal_the_engines_scores(stories_base):
    """Also with an update of the head; each is loaded once, and removed with its sampler."""
    with FakeVLLM(Transformers(str(stories_base.folder)), root=str(stories_base.folder)) as server:
        vllm = make(server.url)
        adapters = [ref.random_adapter(stories_base, seed=i, size=0.1) for i in (0, 1)]
        samplers = [Sampler(stories_base, adapter) for adapter in (*adapters, None)]
        futures = [ask(vllm, one, 3) for one in (*samplers, *samplers)]
        found = [future.result(SECONDS) for future in futures]
        assert found[:3] == found[3:]
        for sampler, samples in zip(samplers, found, strict=False):
            for sample in samples:
                scores = ref.score(sampler, [*PROMPT, *sample.tokens], logprobs=True).logprobs
                np.testing.assert_allclose(sample.logprobs, scores[len(PROMPT) :], atol=1e-4)
        assert len({tuple(samples[0].tokens) for samples in found[:3]}) == 3
        names = [event for event in server.events if event.startswith("load")]
        assert len(names) == len(server.adapters) == 2
        folders = [Path(folder) for folder in server.adapters.values()]
        assert all(folder.is_relative_to("/dev/shm") for folder in folders)
        # The weights of a client that is gone are removed, those of the other stay.
        del samplers[0], sampler, futures
        gc.collect()
        wait_until(lambda: len(server.adapters) == 1 and sum(f.exists() for f in folders) == 1)
        vllm.close()
        assert not server.adapters
        assert not folders[0].parent.exists()


def test_what_a_request_says_reaches_the_server(vllm, fake, base):
    sampler = Sampler(base, None)
    how = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.2,
           "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 2}  # fmt: skip
    stops = {"stop_tokens": frozenset([7, 2]), "logit_bias": {3: -1.0}}
    ask(vllm, sampler, 3, **how, **stops).result(SECONDS)
    (body,) = fake.bodies
    assert body.items() >= how.items()
    assert body["stop_token_ids"] == [2, 7]
    assert body["logit_bias"] == {"3": -1.0}
    assert (body["n"], body["max_tokens"], body["prompt"]) == (3, 12, PROMPT)
    assert (body["model"], body["logprobs"], body["ignore_eos"]) == ("base", 0, True)
    # Sample 1 of a seed is not sample 0 of the next one; without a seed none is sent.
    for seed in (0, 1, None):
        ask(vllm, sampler, seed=seed).result(SECONDS)
    first, second, free = (body.get("seed") for body in fake.bodies[1:])
    assert abs(first - second) > 1000
    assert max(first, second) < 2**63 - 1000
    assert free is None
    ask(vllm, sampler, top_k=-1, seed=3).result(SECONDS)
    assert fake.bodies[-1]["top_k"] == 0


def test_tokens_arrive_one_by_one(vllm, fake, base):
    seen: list[tuple[int, int]] = []
    sampler = Sampler(base, None)
    stop = {"stop_tokens": frozenset([3])}
    streamed = ask(vllm, sampler, 2, lambda i, s: seen.append((i, len(s.tokens))), **stop)
    whole = ask(vllm, sampler, 2, **stop).result(SECONDS)
    assert streamed.result(SECONDS) == whole
    for index, sample in enumerate(whole):
        assert [n for i, n in seen if i == index] == list(range(1, len(sample.tokens) + 1))
    assert sum(body.get("stream", False) for body in fake.bodies) == 1


def test_cancelling_ends_the_request_in_the_server(vllm, fake, base):
    fake.before = lambda: time.sleep(0.02)
    future = ask(vllm, Sampler(base, None), max_tokens=100, stop_tokens=frozenset())
    wait_until(lambda: fake.bodies)
    assert future.cancel()
    wait_until(lambda: fake.aborted == 1)
    fake.before = lambda: None
    with pytest.raises(CancelledError):
        future.result(0)
    assert len(ask(vllm, Sampler(base, None)).result(SECONDS)) == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((500, "EngineCore died"), r"refused /v1/completions \(500\): EngineCore died"),
        ((401, "Unauthorized"), "set VLLM_API_KEY"),
        ((400, "LoRA rank 64 is greater than max_lora_rank 32"), "larger --max-lora-rank"),
        ((500, "expected target modules in {...}"), "set train_unembed=False"),
    ],
)
def test_a_refusal_says_what_to_do(vllm, fake, base, error, said):
    fake.error = error
    with pytest.raises(BackendError, match=said):
        ask(vllm, Sampler(base, None)).result(SECONDS)


def test_a_server_that_has_ended_ends_the_run_with_advice(vllm, fake, base):
    sampler = Sampler(base, ref.random_adapter(base))
    ask(vllm, sampler).result(SECONDS)
    fake.close()
    with pytest.raises(BackendError, match=r"did not answer .*resumed from its last checkpoint"):
        ask(vllm, sampler).result(SECONDS)


def test_masks_and_other_models_stay_with_the_engine(vllm, base, tiny_base, caplog):
    class Mask:
        start = add = lambda self, *_: self
        allowed = lambda self: np.full(8, 255, dtype=np.uint8)  # noqa: E731

    masked = sample_request(Sampler(base, None), PROMPT, 1, settings(token_mask=Mask()))
    assert not vllm.takes(masked)
    assert vllm.takes(sample_request(Sampler(base, None), PROMPT, 1, settings()))
    other = sample_request(Sampler(tiny_base("qwen3"), None), PROMPT, 1, settings())
    assert not vllm.takes(other)
    assert not vllm.takes(other)
    assert caplog.text.count("is sampled by the built-in sampler") == 1
    with pytest.raises(ConfigurationError, match=r"has the model .*llama.*, but the run trains"):
        vllm.require(tiny_base("qwen3"), AdapterSpec())


def test_adapters_that_vllm_does_not_take(base, tiny_base, monkeypatch, tmp_path, caplog):
    """An explicit choice is refused before the run; with ``auto`` the engine samples."""
    monkeypatch.setenv(vllm_settings.PYTHON_VARIABLE, str(python_with_fake(tmp_path)))
    gemma, body_only = tiny_base("gemma3"), AdapterSpec(4, train_unembed=False)
    asked, auto = (
        VLLMSampler(SamplerSettings(name), ref.CPU, torch.float32, ref.run_now)
        for name in ("vllm", "auto")
    )
    with pytest.raises(ConfigurationError, match=r"sampler=vllm: .*Gemma3ForCausalLM; set train"):
        asked.require(gemma, AdapterSpec())
    with pytest.raises(ConfigurationError, match=r"ranks up to 512; lower lora_rank \(got 600\)"):
        asked.require(base, AdapterSpec(600))
    with pytest.raises(ConfigurationError, match=r"routed experts; set train_mlp=False, or set sa"):
        asked.require(tiny_base("qwen3_moe"), AdapterSpec(4))
    with pytest.raises(
        ConfigurationError, match=r"ignores adapters on vision .*train_vision=False"
    ):
        asked.require(base, AdapterSpec(4, train_vision=True))
    for spec, taken in ((AdapterSpec(4), False), (body_only, True)):
        auto.require(gemma, spec)
        sampler = Sampler(gemma, ref.random_adapter(gemma, spec))
        assert auto.takes(sample_request(sampler, PROMPT, 1, settings())) == taken
    assert "has no adapters on the head of Gemma3ForCausalLM" in caplog.text
    asked.close()
    auto.close()


def test_what_answers_at_a_url_is_checked(fake, base):
    with pytest.raises(ConfigurationError, match="nothing answers there"):
        make("http://127.0.0.1:9")
    fake.paths = ["/v1/completions"]
    with pytest.raises(ConfigurationError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        make(fake.url)
    fake.key = "secret"
    with pytest.raises(ConfigurationError, match="with 401; expected a vLLM server; set VLLM_API"):
        make(fake.url)


def test_the_server_sleeps_while_the_trainer_works(fake, base, caplog):
    vllm = VLLMSampler(SamplerSettings(sampler=fake.url), ref.CPU, torch.float32, ref.run_now)
    object.__setattr__(vllm._settings, "vllm_args", "--enable-sleep-mode")
    sampler = Sampler(base, None)
    vllm.rest()  # nothing runs yet
    first = ask(vllm, sampler).result(SECONDS)
    vllm.rest()
    vllm.rest()
    assert fake.asleep
    assert ask(vllm, sampler).result(SECONDS) == first
    assert fake.events == ["/sleep?level=1", "/wake_up"]
    # A server that samples stays awake.
    going = threading.Event()
    fake.before = lambda: going.wait(SECONDS)
    future = ask(vllm, sampler)
    wait_until(lambda: len(fake.bodies) == 3)
    vllm.rest()
    going.set()
    assert future.result(SECONDS) == first
    # Training goes on without an answer.
    fake.close()
    vllm.rest()
    assert "vLLM keeps its memory during training: the vLLM server at" in caplog.text
    vllm.close()


def python_with_fake(folder: Path) -> Path:
    """A Python in whose environment ``vllm`` is the fake server."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(Path(fake_vllm.__file__).read_text())
    python = folder / "python"
    start = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    run = f'{sys.executable} -c "{start}" {folder}'
    python.write_text(f'#!/bin/sh\nshift\n[ "$1" = -c ] && exit 0\nexec {run} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def test_a_process_is_started_ended_and_started_again(base, tmp_path, caplog):
    """2 s: three processes."""
    python = str(python_with_fake(tmp_path))
    flags = "CUDA_VISIBLE_DEVICES=1 --tensor-parallel-size 2 --delay 0.02 --enable-sleep-mode"
    chosen, released = SamplerSettings("vllm", python, flags), []

    def submit(work, *arguments):
        if work is release_cached_memory:
            released.append([process.running for process in vllm._processes])
        return ref.run_now(work, *arguments)

    vllm = VLLMSampler(chosen, ref.CPU, torch.float32, submit)
    sampler = Sampler(base, ref.random_adapter(base))
    first = ask(vllm, sampler).result(SECONDS)
    process = vllm._server.result().process
    log = process.log.read_text()
    assert "--tensor-parallel-size 2" in log
    assert "--max-lora-rank 32" in log
    assert "device 1" in log
    future = ask(vllm, sampler, 1, max_tokens=120, stop_tokens=frozenset())
    time.sleep(0.5)  # so that the request is in the server
    os.killpg(process._process.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"was ended by signal 9; log: .*server-"):
        future.result(SECONDS)
    wait_until(lambda: not vllm._requests)
    vllm.rest()  # there is nothing to put to sleep
    assert "vLLM keeps its memory" not in caplog.text
    # The next request starts it again, with the adapter.
    assert ask(vllm, sampler).result(SECONDS) == first
    assert released == [[], [False]]  # before each start
    assert "vLLM is started again" in caplog.text
    process = vllm._server.result().process
    vllm.close()
    assert not process.running


def test_a_process_that_does_not_start_says_why_and_is_tried_again(base, tmp_path):
    """At later requests, but not for ever."""
    python, sampler = str(python_with_fake(tmp_path)), Sampler(base, None)

    def made() -> VLLMSampler:
        chosen = SamplerSettings("vllm", python, "--crash")
        return VLLMSampler(chosen, ref.CPU, torch.float32, ref.run_now)

    def fails(vllm: VLLMSampler) -> None:
        said = r"did not start: its process ended with code 1.*\n.*no kernel image is available"
        with pytest.raises(BackendError, match=said):
            ask(vllm, sampler).result(SECONDS)

    def logs() -> int:
        return len(list((Path(os.environ["TINKER_COOKBOOK_HOME"]) / "vllm").glob("*.log")))

    vllm = made()
    for count in (1, 2, 3, 3):
        fails(vllm)
        assert logs() == count
    vllm.close()
    vllm = made()
    fails(vllm)
    object.__setattr__(vllm._settings, "vllm_args", "")
    assert len(ask(vllm, sampler).result(SECONDS)) == 2
    vllm.close()


def test_the_server_is_started_on_the_trainers_gpu(base, monkeypatch):
    def visible(index: int, flags: str = "") -> str | None:
        chosen = SamplerSettings("vllm", "", flags)
        vllm = VLLMSampler(chosen, torch.device("cuda", index), torch.bfloat16, ref.run_now)
        _, variables = vllm._command(Sampler(base, None))
        vllm.close()
        return variables.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert visible(0) is None
    # The others follow, for flags that need several.
    assert visible(2) == "2,0,1,3"
    assert visible(2, "CUDA_VISIBLE_DEVICES=0,3 --tensor-parallel-size 2") == "0,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-1f,4")
    assert visible(1) == "GPU-1f,6,4"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler": "vlm"}, r"sampler: got 'vlm', expected auto, builtin.*did you mean 'vllm'"),
        ({"sampler": "ftp://x"}, "sampler: got 'ftp://x', expected"),
        ({"vllm_args": "--a 'b"}, "vllm_args: got .* no list of words"),
        ({"sampler": "http://a", "vllm_args": "--b"}, "a server that runs already"),
        ({"sampler": "vllm", "vllm_python": sys.executable}, "it has no package vllm"),
    ],
)
def test_invalid_settings_are_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        SamplerSettings(**given).check()


def test_auto_is_vllm_on_cuda_where_it_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    name, reason = SamplerSettings().choose("cpu")
    assert (name, reason) == ("builtin", "sampler: built in, because the device is cpu")
    name, reason = SamplerSettings().choose("cuda")
    assert name == "builtin"
    assert "no vLLM was found" in reason
    with pytest.raises(ConfigurationError, match=r"sampler=vllm: found no vLLM; set vllm_python="):
        SamplerSettings("vllm").check()
    # By ``vllm`` on the path, by the variable, by the setting.
    python = python_with_fake(tmp_path)
    (tmp_path / "bin").mkdir()
    for place in (tmp_path / "bin" / "python", tmp_path / "bin" / "vllm"):
        place.write_text(python.read_text())
        place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert SamplerSettings().python() == str(tmp_path / "bin" / "python")
    monkeypatch.setenv(vllm_settings.PYTHON_VARIABLE, str(python))
    name, reason = SamplerSettings().choose("cuda")
    assert (name, reason) == ("vllm", f"sampler: vLLM of {python}, because the device is cuda")
    assert SamplerSettings("builtin").choose("cuda")[0] == "builtin"
    assert SamplerSettings("http://a:1/").choose("cpu")[0] == "http://a:1"


def test_new_weights_are_used_by_the_next_request(stories_model):
    """Through the client: prompts are scored by the engine, samples come from the server."""
    prompt, params = (
        tinker.ModelInput.from_ints(PROMPT),
        tinker.SamplingParams(max_tokens=8, seed=0),
    )
    tokens = tinker.TensorData.from_numpy(np.arange(5, 13))
    weights = tinker.TensorData.from_numpy(np.ones(8, dtype=np.float32))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(4, 12))),
        loss_fn_inputs={"target_tokens": tokens, "weights": weights},
    )
    with FakeVLLM(Transformers(stories_model), root=stories_model) as server:
        chosen = SamplerSettings(sampler=server.url)
        with connect("local", device="cpu", dtype="float32", sampler=chosen) as connection:
            assert f"sampler: the vLLM server at {server.url}" in connection.describe()
            client = connection.service.create_lora_training_client(stories_model, rank=4, seed=0)
            for _ in range(2):
                client.forward_backward([datum], "cross_entropy")
                client.optim_step(tinker.AdamParams(learning_rate=1e-2))
                sampler = client.save_weights_and_get_sampling_client().result()
                found = sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result()
                (sequence,) = found.sequences
                whole = tinker.ModelInput.from_ints([*PROMPT, *sequence.tokens])
                scores = sampler.compute_logprobs(whole).result()
                np.testing.assert_allclose(sequence.logprobs, scores[len(PROMPT) :], atol=1e-4)
                np.testing.assert_allclose(
                    found.prompt_logprobs[1:], scores[1 : len(PROMPT)], atol=1e-4
                )
            assert connection.service.engine.sampled_tokens == 16
        assert len(server.bodies) == 2
        assert not server.adapters
