from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.run.jsonl import append_row, read_rows, trim_rows

ROWS = [{"step": step, "loss": 1.0 / (step + 1), "note": "é🦜"} for step in range(5)]


@pytest.fixture
def path(tmp_path):
    for row in ROWS:
        append_row(tmp_path / "metrics.jsonl", row)
    return tmp_path / "metrics.jsonl"


@given(st.integers(min_value=1, max_value=200))
def test_a_file_torn_anywhere_loses_at_most_its_last_row(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    for row in ROWS:
        append_row(path, row)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    remaining = path.read_bytes()
    rows = read_rows(path)
    assert rows == ROWS[: len(rows)]
    assert len(rows) in (remaining.count(b"\n"), remaining.count(b"\n") + 1)

    append_row(path, {"step": 99})  # the next row does not stick to the torn one
    assert read_rows(path) == [*rows, {"step": 99}]
    assert path.read_bytes().count(b"\n") == len(rows) + 1


def test_a_broken_line_elsewhere_is_named(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"step": \n', *lines[2:]]))
    with pytest.raises(DataFormatError, match=r"metrics\.jsonl:3: not JSON"):
        read_rows(path)
    path.write_bytes(b"".join([*lines, b"[1]\n"]))
    with pytest.raises(DataFormatError, match=r"metrics\.jsonl:6: got list"):
        read_rows(path)


def test_not_finite_numbers_stay_readable_json(tmp_path):
    path = tmp_path / "m.jsonl"
    append_row(path, {"step": 0, "train_mean_nll": 2.5})
    append_row(path, {"step": 1, "train_mean_nll": float("nan")})
    append_row(path, {"step": 2, "train_mean_nll": float("-inf"), "deep": {"a": [np.inf]}})

    def refuse(name):
        raise AssertionError(name)

    parsed = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert parsed[1] == {"step": 1, "train_mean_nll": None, "nonfinite": {"train_mean_nll": "nan"}}
    assert parsed[2]["nonfinite"] == {"train_mean_nll": "-inf", "deep/a/0": "inf"}
    frame = pandas.read_json(path, lines=True)
    assert frame["train_mean_nll"].dtype == float
    assert frame["train_mean_nll"].isna().tolist() == [False, True, True]


def test_array_scalars_are_numbers_and_odd_values_are_refused_by_name(tmp_path):
    path = tmp_path / "m.jsonl"
    row = {"a": np.float32(0.5), "b": torch.tensor(3), "c": np.arange(2), "d": tmp_path, "e": True}
    append_row(path, row)
    assert read_rows(path) == [{"a": 0.5, "b": 3, "c": [0, 1], "d": str(tmp_path), "e": True}]
    with pytest.raises(DataFormatError, match="bad/0: got object"):
        append_row(path, {"bad": [object()]})
    assert len(read_rows(path)) == 1


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.booleans()))
def test_any_text_survives(tmp_path_factory, row):
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    append_row(path, row)
    assert read_rows(path) == [row]


def test_a_file_size_limit_leaves_the_earlier_rows_alone(path):
    """A real partial write: the kernel takes the bytes up to the limit and no more."""
    limit = path.stat().st_size + 10
    program = (
        "import resource, signal, sys\n"
        "from tinker_cookbook.run.jsonl import append_row\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"append_row({str(path)!r}, {{'step': 5, 'text': 'x' * 100}})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "TrainingError" in done.stderr
    assert re.search(r"only 10 of 1\d\d bytes fitted", done.stderr)
    assert read_rows(path) == ROWS
    assert path.read_bytes().endswith(b"\n")


def test_trim_cuts_and_keeps_a_copy(path):
    whole = path.read_bytes()
    copy = f"{path}.pre_resume_000002"
    assert trim_rows(path, lambda row: row["step"] <= 2, copy) == 2
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    with open(copy, "rb") as file:
        assert file.read() == whole
    assert trim_rows(path, lambda row: row["step"] <= 2, copy) == 0
    assert trim_rows(path, lambda row: row["step"] <= 1, copy) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "metrics.jsonl", "metrics.jsonl.pre_resume_000002", "metrics.jsonl.pre_resume_000002_1",
    ]  # fmt: skip
    with open(copy, "rb") as file:
        assert file.read() == whole


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.11])
def test_kill_9_in_mid_write_loses_at_most_the_row_in_flight(tmp_path, delay):
    path = tmp_path / "m.jsonl"
    program = (
        "import sys\n"
        "from tinker_cookbook.run.jsonl import append_row\n"
        "text = 'x' * 3_000_000\n"
        "step = 0\n"
        "while True:\n"
        f"    append_row({str(path)!r}, {{'step': step, 'text': text}})\n"
        "    step += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program])
    while not path.exists() or path.stat().st_size < 9_000_000:
        time.sleep(0.002)
        assert child.poll() is None
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait()
    rows = read_rows(path)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 2
    append_row(path, {"step": len(rows)})
    assert [row["step"] for row in read_rows(path)] == list(range(len(rows) + 1))
