"""Samples and training operations of the bundled engine in a store (about 6 s)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker

pytest.importorskip("aiohttp")

from tinker_cookbook.backends import connect
from tinker_cookbook.capture import capture
from tinker_cookbook.capture.store import CaptureDB, StoreSink, capture_to_store, ensure_daemon

PROMPT = tinker.ModelInput.from_ints([1, 403, 407])
PARAMS = tinker.SamplingParams(max_tokens=8, seed=0)


@pytest.fixture
def service(stories_model):
    with connect("local", device="cpu", dtype="float32").service as service:
        yield service


@pytest.fixture
def data_dir(tmp_path):
    yield tmp_path / "store"
    end_daemon(tmp_path / "store")


def end_daemon(data_dir):
    pid = json.loads((data_dir / "daemon.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_what_the_engine_samples_and_trains_is_in_the_database(service, stories_model, data_dir):
    client = service.create_sampling_client(base_model=stories_model)
    training = service.create_lora_training_client(base_model=stories_model, rank=4)
    datum = tinker.Datum(
        model_input=PROMPT,
        loss_fn_inputs={"target_tokens": [403, 407, 2], "weights": [1.0, 1.0, 1.0]},
    )
    responses = {}

    async def use_async_names():
        with capture(iteration=2):
            coroutine = client.sample_async(PROMPT, 1, PARAMS)
        responses[2] = await coroutine  # outside of its block
        await (await training.forward_backward_async([datum], "cross_entropy"))

    with capture_to_store("story", data_dir=data_dir, split="train"):
        with capture(iteration=0, worker="a"):
            responses[0] = client.sample(PROMPT, 2, PARAMS).result()
        with capture(iteration=1), ThreadPoolExecutor(1) as pool:
            responses[1] = pool.submit(lambda: client.sample("Once", 1, PARAMS).result()).result()
        asyncio.run(use_async_names())
        training.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
        with pytest.raises(Exception, match="999999"):
            client.sample(tinker.ModelInput.from_ints([999999]), 1, PARAMS).result()
    client.sample(PROMPT, 1, PARAMS).result()  # after the block

    # Read with plain SQL, as a user does.
    with sqlite3.connect(data_dir / "capture.sqlite") as database:
        rows = database.execute(
            "SELECT iteration, sample_idx, run_id, split, prompt_tokens, sampled_tokens, logprobs, "
            "metadata FROM wire_rows ORDER BY iteration, sample_idx"
        ).fetchall()
        records = [json.loads(r) for (r,) in database.execute("SELECT payload FROM annotations")]
    assert [row[:4] for row in rows] == [
        (iteration, sample, "story", "train")
        for iteration, sample in ((0, 0), (0, 1), (1, 0), (2, 0))
    ]
    text = client.get_tokenizer().encode("Once")
    for iteration, sample, _, _, *values, metadata in rows:
        sequence = responses[iteration].sequences[sample]
        prompt = text if iteration == 1 else PROMPT.to_ints()
        assert [json.loads(v) for v in values] == [prompt, sequence.tokens, sequence.logprobs]
        assert json.loads(metadata)["stop_reason"] == sequence.stop_reason
    assert json.loads(rows[0][-1])["scope"] == {"worker": "a"}
    found = [(r.get("op"), r["status"]) for r in records]
    # A call is recorded when its result arrives, in a thread of its own.
    expected = [("forward_backward", "ok"), ("optim_step", "ok"), (None, "error")]
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert records[0]["num_data"] == 1
    assert records[0]["metrics"]["loss:sum"] > 0
    assert records[1]["hyperparams"]["learning_rate"] == 0.5
    assert "999999" in records[2]["error"]


def test_a_killed_store_has_what_it_acknowledged_and_starts_again(data_dir):
    sink, batch = StoreSink(ensure_daemon(data_dir)), 20
    acknowledged = []

    def send():
        for i in range(10**6):
            record = {"kind": "sample", "sampling_session_id": "s", "seq_id": i}
            record["samples"] = [{"tokens": [i] * 200, "logprobs": [-0.5] * 200}] * batch
            sink.export([record | {"scope": {"run_id": "killed"}}])
            acknowledged.append(i)
            if i == 10:
                ready.set()

    ready = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        assert ready.wait(20)
        end_daemon(data_dir)
        assert isinstance(sending.exception(20), OSError)
    database = CaptureDB(data_dir / "capture.sqlite")
    counts: dict[int, int] = {}
    for row in database.query_rows("killed", limit=10**6):
        assert row["sampled_tokens"] == [row["seq_id"]] * 200
        counts[row["seq_id"]] = counts.get(row["seq_id"], 0) + 1
    database.close()
    assert set(acknowledged) <= set(counts)
    assert set(counts.values()) == {batch}  # no part of a batch
    # The file still names the killed process.
    StoreSink(ensure_daemon(data_dir)).export([{"kind": "note", "scope": {"run_id": "next"}}])
    database = CaptureDB(data_dir / "capture.sqlite")
    assert [run.run_id for run in database.list_runs()] == ["killed", "next"]
    # A record that the store refuses is no loss of the others.
    good = [{"kind": "note", "event_id": str(i), "scope": {"run_id": "next"}} for i in range(5)]
    bad = {"kind": "sample", "samples": [{"tokens": [1]}], "scope": {"iteration": "three"}}
    records = [*good, bad, bad | {"scope": {"run_id": "after"}}]
    with pytest.raises(urllib.error.HTTPError, match=r"'iteration': .* valid integer"):
        StoreSink(ensure_daemon(data_dir)).export(records)
    assert [run.num_annotations for run in database.list_runs()] == [0, 0, 6]
    database.close()
