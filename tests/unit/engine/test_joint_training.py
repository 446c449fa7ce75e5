"""Passes of several runs as one: the numbers of separate passes, and each run's own errors."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace

import engine_reference as ref
import numpy as np
import pytest
import tinker
import torch
from device_jobs import LOSSES, examples
from image_prompts import example_of, group_of, prompt_of
from pretended_device import DEVICE, PretendedDevice
from tinker import types

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.extensions import joint, stacked_terms
from tinker_cookbook.engine.extensions.joint import PassRequest, run_together
from tinker_cookbook.engine.extensions.stacked_terms import StackedTerms
from tinker_cookbook.engine.memory import KnownLimits
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.model.low_rank import GroupedLowRank
from tinker_cookbook.engine.training.micro_batch import MicroBatchPass
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import LossOutput, TrainingRun
from tinker_cookbook.exceptions import DataValidationError, TrainingError

SPECS = (
    AdapterSpec(4),
    AdapterSpec(2, train_mlp=False),
    AdapterSpec(6, train_unembed=False),
    AdapterSpec(3, train_attn=False),
)
EQUAL_RANKS = tuple(replace(spec, rank=8) for spec in SPECS)
SECONDS = 60
SLOW = pytest.mark.slow


def runs_on(base, count: int = 4, budget: int = 10_000, specs=SPECS) -> list[TrainingRun]:
    """Runs with adapters of different layers and, unless given ``specs``, of different ranks."""
    adapters = (ref.random_adapter(base, specs[n], seed=n) for n in range(count))
    return [TrainingRun(f"run {n}", base, each, budget) for n, each in enumerate(adapters)]


def data_of(base, count: int, loss: str, shared: bool) -> list[list]:
    """Each run has the sequences of the one before and one more: a run that used the prefix of
    another would get its numbers."""
    return [examples(base.vocab_size, loss, shared=shared, count=2 + n) for n in range(count)]


def requests_of(runs, data, loss: str) -> list[PassRequest]:
    return [
        PassRequest(lambda run=run: run, lambda own=own: own, loss, LOSSES[loss])
        for run, own in zip(runs, data, strict=True)
    ]


def together(runs, data, loss: str = "ppo") -> list:
    found = dict(run_together(requests_of(runs, data, loss)))
    return [found[number] for number in range(len(runs))]


def separately(runs, data, loss: str = "ppo") -> list[LossOutput]:
    pairs = zip(runs, data, strict=True)
    return [run.forward_backward(own, loss, LOSSES[loss]) for run, own in pairs]


@pytest.fixture
def joined(monkeypatch) -> list[list[str]]:
    """Names of the runs of each joint pass that was completed."""
    passes, original = [], joint._compute

    def noting(group):
        found = original(group)
        passes.append([one.run.run_id for one in group])
        return found

    monkeypatch.setattr(joint, "_compute", noting)
    return passes


def assert_equal(outputs, runs, expected, twins, bound: float = 1e-5) -> None:
    for output, run, wanted, twin in zip(outputs, runs, expected, twins, strict=True):
        assert isinstance(output, LossOutput), output
        scale = max(float(np.abs(row).max()) for row in wanted.logprobs)
        for row, other in zip(output.logprobs, wanted.logprobs, strict=True):
            assert row.dtype == np.float32
            np.testing.assert_allclose(row, other, atol=bound * scale, rtol=0)
        terms = sum(float(np.square(row).sum()) for row in wanted.logprobs) ** 0.5
        assert output.metrics.keys() == wanted.metrics.keys()
        difference = abs(output.metrics["loss:sum"] - wanted.metrics["loss:sum"])
        assert difference <= bound * terms
        assert ref.relative_error(run._gradients, twin._gradients) <= bound
        assert all(gradient.is_contiguous() for gradient in run._gradients.values())


@pytest.mark.parametrize(("kind", "loss"), [
    pytest.param(kind, loss, marks=() if quick else pytest.mark.slow)
    for loss in ("cross_entropy", "importance_sampling", "ppo", "gspo")
    for kind, quick in (("llama", loss in ("cross_entropy", "ppo")), ("qwen3", loss != "gspo"))
])  # fmt: skip
def test_numbers_are_those_of_separate_passes(tiny_base, joined, kind, loss):
    """Two and four runs; shared and padded rows; gradients of two passes add up."""
    base = tiny_base(kind)
    for shared in (False, True):
        for count in (2, 4):
            joined.clear()
            data = data_of(base, count, loss, shared)
            runs, twins = runs_on(base, count), runs_on(base, count)
            for _ in range(2):
                outputs, expected = together(runs, data, loss), separately(twins, data, loss)
            assert joined == [[run.run_id for run in runs]] * 2
            assert_equal(outputs, runs, expected, twins)


@pytest.mark.parametrize(("kind", "train_vision", "joins"), [
    ("qwen3_vl", False, True), ("smolvlm", False, True), ("qwen3_vl", True, False),
    ("gemma3_vl", False, False),
])  # fmt: skip
def test_runs_with_images_join_unless_they_train_the_tower(
    tiny_base, joined, kind, train_vision, joins
):
    base, spec = tiny_base(kind), AdapterSpec(4, train_vision=train_vision)
    data = [group_of(base), [example_of(prompt_of(base, count, 3)) for count in (2, 0, 1)]]
    runs, twins = ([ref.make_run(base, spec=spec, seed=n) for n in (1, 2)] for _ in range(2))
    outputs = together(runs, data, "cross_entropy")
    expected = separately(twins, data, "cross_entropy")
    assert bool(joined) == joins
    assert_equal(outputs, runs, expected, twins)


@pytest.mark.slow  # 8 s
def test_numbers_on_a_device_are_those_of_separate_passes_on_the_cpu(tiny_base, tmp_path, joined):
    cases = [("ppo", False), ("cross_entropy", True), ("importance_sampling", True)]
    with PretendedDevice(liger=True):
        base = ref.load_base(ref.make_model("qwen3", tmp_path), torch.float32, DEVICE)
        found = {}
        for loss, shared in cases:
            runs = runs_on(base)
            outputs = together(runs, data_of(base, 4, loss, shared), loss)
            for run in runs:
                run._gradients = {n: t.cpu() for n, t in run._gradients.items()}
            found[loss, shared] = outputs, runs
    assert len(joined) == len(cases)
    base = tiny_base("qwen3")
    for (loss, shared), (outputs, runs) in found.items():
        twins = runs_on(base)
        expected = separately(twins, data_of(base, 4, loss, shared), loss)
        assert_equal(outputs, runs, expected, twins, bound=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=SLOW), "qwen3_moe"])
def test_grouped_products_give_the_numbers_of_separate_passes(
    tiny_base, tmp_path, joined, monkeypatch, kind
):
    """Adapters of equal rank, also of routed experts. The first pass is out of memory and halved,
    so that runs have no tokens in a micro-batch. 10 s."""
    monkeypatch.setattr(stacked_terms, "MOST_MASKED", 0)
    monkeypatch.setattr(stacked_terms, "_can_group", lambda base, adapters: True)
    original, most = MicroBatchPass.run, {"ppo": 4, "cross_entropy": 100}

    def short_of_memory(self, loss, *args, **kwargs):
        if len(self._examples) > most[loss.name]:
            raise torch.OutOfMemoryError("out of memory")
        original(self, loss, *args, **kwargs)

    monkeypatch.setattr(MicroBatchPass, "run", short_of_memory)
    cases = [("ppo", False), ("cross_entropy", True)]
    found = {}
    with PretendedDevice(liger=True) as device:
        base = ref.load_base(ref.make_model(kind, tmp_path), torch.float32, DEVICE)
        monkeypatch.setattr(base, "limits", KnownLimits())
        for loss, shared in cases:
            runs = runs_on(base, specs=EQUAL_RANKS)
            device.used.clear()
            outputs = together(runs, data_of(base, 4, loss, shared), loss)
            assert device.used["_grouped_mm"]
            for run in runs:
                run._gradients = {n: t.cpu() for n, t in run._gradients.items()}
            found[loss, shared] = outputs, runs
    assert len(joined) == len(cases)
    base = tiny_base(kind)
    for (loss, shared), (outputs, runs) in found.items():
        twins = runs_on(base, specs=EQUAL_RANKS)
        expected = separately(twins, data_of(base, 4, loss, shared), loss)
        assert_equal(outputs, runs, expected, twins, bound=1e-4)


@pytest.mark.parametrize("machine", [
    pytest.param(PretendedDevice, marks=SLOW),  # 10 s
    pytest.param(nullcontext, marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device")]),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_many_runs_in_bfloat16_are_grouped_and_round_as_separate_passes(
    tiny_base, tmp_path, joined, machine, kind, record_property
):
    """Both differ from float32 by as much; a router may choose other experts in either."""
    count = 18

    def runs_of(base) -> list[TrainingRun]:
        return runs_on(base, count, specs=[EQUAL_RANKS[0]] * count)

    def errors(runs, outputs) -> np.ndarray:
        """Mean errors of gradients and of log-probabilities."""
        pairs = []
        for run, output, true, wanted in zip(runs, outputs, truth, expected, strict=True):
            own = {name: gradient.float().cpu() for name, gradient in run._gradients.items()}
            rows = zip(output.logprobs, wanted.logprobs, strict=True)
            off = np.concatenate([np.abs(row - other) for row, other in rows])
            pairs.append((ref.relative_error(own, true._gradients), off.mean()))
        return np.mean(pairs, 0)

    exact = tiny_base(kind)
    data = [data_of(exact, 2, "cross_entropy", False)[n % 2] for n in range(count)]
    truth = runs_of(exact)
    expected = separately(truth, data, "cross_entropy")
    with machine():
        base = ref.load_base(ref.make_model(kind, tmp_path), torch.bfloat16, DEVICE)
        runs, twins = runs_of(base), runs_of(base)
        of_grouped = errors(runs, together(runs, data, "cross_entropy"))
        of_separate = errors(twins, separately(twins, data, "cross_entropy"))
        stacked = StackedTerms(base, [run.adapter for run in runs]).of(np.arange(count))
        grouped = any(isinstance(term, GroupedLowRank) for term in stacked.values())
        has_kernel = torch.cuda.get_device_capability()[0] in (9, 10)
    assert grouped == has_kernel
    assert len(joined) == (kind == "qwen3" or has_kernel)
    record_property("errors, grouped and separate", f"{of_grouped} {of_separate}")
    assert (of_grouped < 1.3 * of_separate).all()


def test_incompatible_runs_are_computed_separately(tiny_base, joined, monkeypatch):
    """Other losses or settings, another base model, too many tokens or ranks, routed experts."""
    base, other, routed = (tiny_base(kind) for kind in ("llama", "qwen3", "qwen3_moe"))
    runs = [*runs_on(base), *runs_on(other, 1), *runs_on(routed, 2)]
    data = [examples(run.base.vocab_size, "ppo", shared=False) for run in runs]
    requests = requests_of(runs, data, "ppo")
    changed = PassRequest(requests[1].run, requests[1].examples, "ppo", {"clip_low_threshold": 0.5})
    loss = PassRequest(requests[2].run, requests[2].examples, "importance_sampling")
    found = dict(run_together([requests[0], changed, loss, *requests[3:]]))
    assert joined == [["run 0", "run 3"]]
    assert all(isinstance(found[n], LossOutput) for n in range(7))
    joined.clear()
    small = runs_on(base, 4, budget=2 * sum(map(len, data[0])))
    together(small, data[:4])
    assert joined == [["run 0", "run 1"], ["run 2", "run 3"]]
    joined.clear()
    # Experts that are not computed by one call, as in a quantised base model.
    with monkeypatch.context() as patched:
        patched.setattr(stacked_terms, "_can_group", lambda base, adapters: True)
        routed = runs_on(routed, 2)
        together(routed, [examples(routed[0].base.vocab_size, "ppo", shared=False)] * 2)
    assert not joined
    wide = [ref.make_run(base, spec=AdapterSpec(40, train_unembed=False)) for _ in range(14)]
    together(wide, [data[0][:1]] * 14)
    assert [len(names) for names in joined] == [12, 2]


def test_error_of_one_run_affects_no_other(tiny_base, joined):
    base = tiny_base("llama")
    runs, twins = runs_on(base), runs_on(base)
    data = data_of(base, 4, "ppo", False)
    broken = dict(data[1][0].inputs, advantages=np.full(len(data[1][0]), np.nan))
    expected = separately([twins[0], twins[2]], [data[0], data[2]])
    data[1] = [ref.example(data[1][0].tokens, **broken)]
    requests = requests_of(runs, data, "ppo")

    def missing() -> TrainingRun:
        raise RuntimeError("the run could not be created")

    requests[3] = PassRequest(missing, requests[3].examples, "ppo")
    found = dict(run_together(requests))
    assert joined == [["run 0", "run 2"]]
    assert_equal([found[0], found[2]], [runs[0], runs[2]], expected, [twins[0], twins[2]])
    assert isinstance(found[1], DataValidationError)
    assert "datum 0: advantages is nan" in str(found[1])
    assert "could not be created" in str(found[3])
    with pytest.raises(TrainingError, match="datum 0: advantages is nan"):
        runs[1].optim_step(AdamSettings())
    for run in (runs[0], runs[2]):
        run.optim_step(AdamSettings())


def test_diverged_run_affects_no_other(tiny_base, joined):
    base = tiny_base("llama")
    runs, twins = runs_on(base, 3), runs_on(base, 3)
    for group in (runs, twins):
        with torch.no_grad():
            next(iter(group[1].adapter.tensors.values()))[1].fill_(torch.nan)
    data = data_of(base, 3, "ppo", False)
    outputs, expected = together(runs, data), separately(twins, data)
    assert not joined
    for number in (0, 2):
        assert np.array_equal(outputs[number].logprobs[0], expected[number].logprobs[0])
        assert ref.relative_error(runs[number]._gradients, twins[number]._gradients) == 0
    assert np.isnan(outputs[1].metrics["loss:sum"])


def test_out_of_memory_halves_the_pass_then_separates_the_runs(tiny_base, joined, monkeypatch):
    base, original = tiny_base("llama"), MicroBatchPass.run
    monkeypatch.setattr(base, "limits", KnownLimits())
    data, sizes = data_of(base, 2, "ppo", False), []
    twins = runs_on(base, 2)
    expected = separately(twins, data)
    limit = 3

    def short_of_memory(self, *args, **kwargs):
        sizes.append(len(self._examples))
        if len(self._examples) > limit:
            raise torch.OutOfMemoryError("out of memory")
        original(self, *args, **kwargs)

    monkeypatch.setattr(MicroBatchPass, "run", short_of_memory)
    runs = runs_on(base, 2)
    assert_equal(together(runs, data), runs, expected, twins)
    assert sizes == [5, 2, 3]
    assert len(joined) == 1

    def fails_jointly(self, *args, **kwargs):
        if any(term.owners is not None for term in self._terms.values()):
            raise torch.OutOfMemoryError("out of memory")
        original(self, *args, **kwargs)

    monkeypatch.setattr(MicroBatchPass, "run", fails_jointly)
    runs = runs_on(base, 2)
    assert_equal(together(runs, data), runs, expected, twins)
    assert len(joined) == 1


def test_operations_of_several_lanes_join_in_the_order_of_each(stories_model, tmp_path, joined):
    """Through the service client; with the option off they take turns and give the same."""

    def train(setting: str) -> tuple[list[list[str]], list]:
        engine = Engine("cpu", "float32", joint_training=setting)
        with LocalServiceClient(engine, CheckpointStore(tmp_path / setting)) as service:
            clients = [
                service.create_lora_training_client(stories_model, rank, seed=rank)
                for rank in (4, 8, 3)
            ]
            for client in clients:
                client.get_info()
            joined.clear()
            go_on = threading.Event()
            engine.submit(go_on.wait, SECONDS)
            futures: list[Future] = []
            datums = [datum(np.random.default_rng(number)) for number in range(3)]
            for number in range(2):
                for client, one in zip(clients, datums, strict=True):
                    if client is clients[2] and not number:
                        client.optim_step(types.AdamParams())  # is refused: there is no gradient
                    futures.append(client.forward_backward([one], "cross_entropy").future())
                    client.optim_step(types.AdamParams(learning_rate=1e-3))
            go_on.set()
            outputs = [future.result(SECONDS) for future in futures]
            return list(joined), outputs

    apart, expected = train("false")
    assert not apart
    passes, outputs = train("true")
    first, second = passes  # the third client's first pass was not the next of its lane
    assert [name[-1] for name in first] == ["0", "1"]
    assert sorted(name[-1] for name in second) == ["0", "1", "2"]
    for output, wanted in zip(outputs, expected, strict=True):
        (found,), (other,) = output.loss_fn_outputs, wanted.loss_fn_outputs
        np.testing.assert_allclose(found["logprobs"].data, other["logprobs"].data, atol=2e-4)
        assert output.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-5)


def datum(rng: np.random.Generator) -> tinker.Datum:
    tokens = [1, *rng.integers(3, 400, 20).tolist()]
    inputs = {
        "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[20]),
        "weights": tinker.TensorData(data=[1.0] * 20, dtype="float32", shape=[20]),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
