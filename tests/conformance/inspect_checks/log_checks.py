"""Our own answers as Inspect's logs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from inspect_ai.log import read_eval_log

from tinker_cookbook.exceptions import DataError


@pytest.fixture
def stored(tmp_path) -> Path:
    """The save_dir of a benchmark with two answers to each of three problems."""
    from tinker_cookbook.eval.benchmarks import StoredTrajectory, StoredTurn
    from tinker_cookbook.eval.run.answers import AnswerFile, summarize

    model = "tinker://run/sampler_weights/last"
    file = AnswerFile(tmp_path / "sums", {"model": model, "max_tokens": 64, "temperature": 0.5})
    for idx in range(3):
        for sample in range(2):
            prompt = [
                StoredTurn("user", "Be brief.", 0, {"role": "system"}),
                StoredTurn("user", f"What is {idx} + 1?", 12),
            ]
            failed = (idx, sample) == (2, 1)
            answer = StoredTurn("assistant", f"It is {idx + sample}.", 7, {"thinking": "hm"})
            file.add(
                StoredTrajectory(
                    idx=idx,
                    benchmark="sums",
                    example_id=f"e{idx}",
                    sample=sample,
                    turns=prompt if failed else [*prompt, answer],
                    reward=float(sample == 1 and not failed),
                    metrics={"max_tokens_reached": float(idx == 1)},
                    logs={"expected": str(idx + 1), "extracted": str(idx + sample)},
                    error="sampling: no connection" if failed else None,
                    time_seconds=0.5,
                )
            )
    file.write_result(summarize("sums", list(file.rows.values())))
    return tmp_path


def test_stored_answers_become_a_log_that_inspect_reads(stored):
    from tinker_cookbook.eval.inspect_bridge.logs import write_inspect_logs

    for form in ("eval", "json"):
        (path,) = write_inspect_logs(stored, stored / "logs", form)
        (again,) = write_inspect_logs(stored, stored / "logs", form)
        assert again == path
        log = read_eval_log(str(path))
        assert (log.status, log.eval.task) == ("success", "sums")
        assert log.eval.model == "tinker://run/sampler_weights/last"
        assert log.eval.model_generate_config.temperature == 0.5
        (score,) = log.results.scores
        assert score.metrics["accuracy"].value == pytest.approx(2 / 5)
        assert 0 < score.metrics["ci_low"].value < 0.4 < score.metrics["ci_high"].value
        assert (log.results.total_samples, log.results.completed_samples) == (6, 5)
        by_id = {(sample.id, sample.epoch): sample for sample in log.samples}
        right = by_id["e0", 2]
        assert [message.role for message in right.messages] == ["system", "user", "assistant"]
        assert [message.role for message in right.input] == ["system", "user"]
        assert (right.target, right.output.completion) == ("1", "It is 1.")
        assert right.output.message.content[0].reasoning == "hm"
        assert (right.scores["sums"].value, right.scores["sums"].answer) == (1.0, "1")
        assert right.output.usage.total_tokens == 19
        assert by_id["e1", 1].output.stop_reason == "max_tokens"
        failed = by_id["e2", 2]
        assert (failed.error.message, failed.scores) == ("sampling: no connection", None)
        assert len(failed.input) == 2
    assert len(list((stored / "logs").iterdir())) == 2


def test_inspect_view_shows_them(stored):
    from tinker_cookbook.eval.inspect_bridge.logs import write_inspect_logs

    write_inspect_logs(stored, stored / "logs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["view", "--log-dir", str(stored / "logs"), "--port", str(port)]
    viewer = subprocess.Popen([sys.executable, "-m", "inspect_ai", *words])
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                page = httpx.get(url)
                break
            except httpx.ConnectError:
                assert viewer.poll() is None
                assert time.monotonic() < until
                time.sleep(0.2)
        assert "<html" in page.text
        (file,) = httpx.get(f"{url}/api/logs").json()["files"]
        log = httpx.get(f"{url}/api/logs/{quote(file['name'], safe='')}").json()
        assert len(log["samples"]) == 6
    finally:
        viewer.terminate()
        viewer.wait()


def test_a_folder_without_answers_is_an_error(tmp_path):
    from tinker_cookbook.eval.inspect_bridge.logs import write_inspect_logs

    with pytest.raises(DataError, match=r"no trajectories.jsonl in it"):
        write_inspect_logs(tmp_path, tmp_path / "logs")


def test_the_command_names_the_folder_first(stored):
    words = [sys.executable, "-m", "tinker_cookbook.eval.inspect_bridge.logs", str(stored)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0.4000" in done.stdout
    assert len(list((stored / "inspect-logs").glob("*.eval"))) == 1
