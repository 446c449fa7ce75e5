"""The examination of a machine (about 8 s: three tiny engines)."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from tinker_cookbook import exceptions
from tinker_cookbook.doctor import __main__ as program
from tinker_cookbook.doctor import parity, report
from tinker_cookbook.doctor.fits import SHAPES, largest_fits, needs_of
from tinker_cookbook.engine.training.optimizer import AdamW

GIB = 1 << 30


def test_more_memory_fits_larger_models_and_training_needs_more_than_sampling():
    small, large = largest_fits(4 * GIB, 2, "cuda"), largest_fits(80 * GIB, 2, "cuda")
    for less, more in zip(small, large, strict=True):
        assert less.needs_bytes <= 4 * GIB
        assert more.needs_bytes <= 80 * GIB
        assert SHAPES[less.model or ""].parameters < SHAPES[more.model or ""].parameters
    for shape in SHAPES.values():
        needs = needs_of(shape, 2, "cuda")
        assert needs.sft_recomputed < needs.sft < needs.rl
        assert needs.sampling < needs.rl
        quantised = needs_of(shape, 2, "cuda", "nf4")
        matrices = shape.attention_weights + shape.mlp_weights
        # Two tables in bfloat16, one or two in 8 bits.
        tables = shape.vocab * shape.hidden * (4 - (1 if shape.tied else 2))
        saved = matrices * (2 - 4.5 / 8) + tables
        assert needs.sft - quantised.sft == pytest.approx(saved, rel=1e-6)
        assert shape.weights_bytes(2, "nf4") < 0.34 * 2 * shape.parameters
        assert needs_of(shape, 2, "cpu", "nf4").sft >= 2 * shape.parameters
    assert {fit.model for fit in largest_fits(1 << 20, 2, "cpu")} == {None}
    # 70B in bfloat16 is 131 GiB: no card of 80 GiB holds it.
    assert needs_of(SHAPES["meta-llama/Llama-3.3-70B-Instruct"], 2, "cuda").sampling > 131 * GIB


def test_a_wrong_step_fails_and_half_precision_is_compared_too(monkeypatch):
    step = AdamW.step

    def smaller(self, gradients, settings):
        return step(self, gradients, dataclasses.replace(settings, learning_rate=8e-3))

    monkeypatch.setattr(AdamW, "step", smaller)
    checks = parity.check_parity("cpu", torch.bfloat16)
    passed = {check.name.split(" against")[0]: check.passed for check in checks}
    assert passed == {
        "float32: log-probabilities": True,
        "float32: adapter after 2 steps of AdamW": False,
        "float32: sampled tokens": False,  # of another adapter
        "bfloat16: log-probabilities": True,
        "bfloat16: sampled tokens": True,
    }


def test_failures_are_shown_and_end_with_status_1(monkeypatch, capsys):
    checks = [
        parity.ParityCheck("a", 1e-6, 1e-4),
        parity.ParityCheck("b", float("nan"), 1e-4),
        parity.ParityCheck("c", 0.0, 0, "RuntimeError: no kernel"),
    ]
    assert [check.passed for check in checks] == [True, False, False]
    monkeypatch.setattr(report, "check_parity", lambda *_: checks)
    with pytest.raises(SystemExit) as ended:
        program.main(program.Config(device="cpu", dtype="float32", json=True))
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert [check["difference"] for check in found["parity"]] == [1e-6, None, 0.0]

    text = io.StringIO()
    report.print_report(report.examine("cpu", "float32"), Console(file=text, width=80))
    assert "no kernel" in text.getvalue()
    assert "would be wrong" in text.getvalue()
    assert max(map(len, text.getvalue().split("\n"))) <= 80


@pytest.mark.parametrize(
    ("noted", "address"),
    [
        ('{"url": "file:///w.whl", "archive_info": {}}', "file:///w.whl"),
        (
            '{"url": "https://h/r", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}',
            "git+https://h/r@12ab",
        ),
        (None, "ADDRESS_OF_THE_WHEEL"),
    ],
)
def test_without_a_checkout_the_command_for_extras_names_the_wheel(
    noted, address, monkeypatch, tmp_path
):
    class Installed:
        def read_text(self, name):
            return noted

    monkeypatch.setattr(exceptions, "__file__", str(tmp_path / "tinker_cookbook" / "exceptions.py"))
    monkeypatch.setattr(exceptions.metadata, "distribution", lambda name: Installed())
    command = exceptions.install_command("plot")
    assert command == f"pip install 'tinker_cookbook[plot] @ {address}'"
