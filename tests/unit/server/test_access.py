"""Who gets in, what they see, and what they cannot reach."""

from __future__ import annotations

import json
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest


def test_health_needs_no_key_and_all_else_does(serving, caller):
    assert httpx.get(f"{serving.url}/healthz").json()["status"] == "ok"
    assert caller(None).get("healthz")[0] == 200
    paths = httpx.get(f"{serving.url}/openapi.json").json()["paths"]
    asked = 0
    for path, methods in paths.items():
        for method in methods:
            if path.endswith("healthz") or "/files/" in path:
                continue
            url = serving.url + path.replace("{kind}", "weights").replace("{", "").replace("}", "")
            for headers in ({}, {"X-API-Key": "tml-wrong"}, {"Authorization": "Bearer tml-wrong"}):
                answer = httpx.request(method, url, headers=headers, json={})
                assert answer.status_code == 401, (method, path)
                asked += 1
    assert asked > 60


def test_owners_are_isolated(caller, stories_model):
    mine, other = caller("local"), caller("ann")
    session = mine.session()
    model = mine.model(stories_model, session)
    saved = mine.result(mine.post("save_weights", model_id=model, seq_id=1, path="a"))["path"]
    asked = mine.post("create_sampling_session", session_id=session, sampling_session_seq_id=0,
                      base_model=stories_model)[1]["sampling_session_id"]  # fmt: skip
    for path in (f"sessions/{session}", f"samplers/{asked}", f"training_runs/{model}",
                 f"training_runs/{model}/checkpoints"):  # fmt: skip
        assert mine.get(path)[0] == 200, path
        assert other.get(path)[0] == 404, path
    assert other.get("training_runs")[1]["training_runs"] == []
    assert other.get("checkpoints")[1]["checkpoints"] == []
    assert len(mine.get("checkpoints")[1]["checkpoints"]) == 1
    for path, body in {
        "session_heartbeat": {"session_id": session},
        "get_info": {"model_id": model},
        "optim_step": {"model_id": model, "seq_id": 2, "adam_params": {}},
        "retrieve_future": {"request_id": f"{model}:1"},
        "weights_info": {"tinker_path": saved},
        "create_sampling_session": {
            "session_id": other.session(), "sampling_session_seq_id": 0, "model_path": saved,
        },
    }.items():  # fmt: skip
        assert other.post(path, **body)[0] == 404, path
    loaded = other.post("load_weights", session_id=other.session(), model_seq_id=0, path=saved)
    assert "error" in other.result(loaded)
    assert other.http.delete(f"training_runs/{model}/checkpoints/weights/a").status_code == 404
    other.post("cancel_future", request_id=f"{model}:1")
    assert mine.result((200, {"request_id": f"{model}:1"}))["path"] == saved


@pytest.mark.parametrize("name", ["../../out", "a/b", "..", ".x", "a" * 200, "\0", "/etc/x"])
def test_no_name_leaves_the_folder_of_checkpoints(serving, caller, stories_model, name):
    mine = caller("ann")
    model = mine.model(stories_model)
    for number, path in enumerate(("save_weights", "save_weights_for_sampler"), 1):
        answer = mine.result(mine.post(path, model_id=model, seq_id=number, path=name))
        assert answer["category"] == "user", answer
        assert "checkpoint name" in answer["error"]
    inside = {
        "server_keys.json",
        "server_keys.json.lock",
        "server",
        "owners",
        "runs",
        "native",
        "locks",
    }
    assert {path.name for path in serving.root.iterdir()} <= inside
    for path in ("../../server_keys.json", f"tinker://../weights/{name}", f"tinker://{name}"):
        assert mine.post("weights_info", tinker_path=path)[0] in (404, 422)
    for run in ("%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd"):
        assert mine.http.get(f"training_runs/{run}/checkpoints").status_code == 404


def test_models_that_are_not_served_are_not_loaded(caller, tmp_path):
    mine = caller()
    for name in (str(tmp_path), "/etc", "gpt2"):
        status, said = mine.post(
            "create_model", session_id=mine.session(), model_seq_id=0, base_model=name
        )
        assert status == 400
        assert "does not serve" in said["detail"]


def test_each_request_is_counted_and_has_a_line_without_texts_ids_and_keys(
    serving, caller, stories_model
):
    mine, key = caller("ann"), serving.key("ann")
    log, before = serving.root / "server" / "access.log", serving.metrics()
    model = mine.model(stories_model)
    mine.result(mine.train(model, 1))
    ask = {"model": stories_model, "prompt": "Once upon", "max_tokens": 5, "seed": 0}
    url = f"{serving.url}/v1/completions"
    for more in ({}, {"stream": True}, {"model": "tml-not-served"}):
        httpx.post(url, json={**ask, **more}, headers={"X-API-Key": key})
    for path in ("/v1/completions", "/api/v1/samplers/tml-secret", "/tml-secret"):
        httpx.get(serving.url + path)
    at, made, token = "/api/v1/", (stories_model, None, None), (stories_model, 2, 5)
    expected = [
        ("ann", "POST", f"{at}create_session", 200, None, None, None),
        ("ann", "POST", f"{at}create_model", 200, None, None, None),
        ("ann", "POST", f"{at}retrieve_future", 200, *made),
        ("ann", "POST", f"{at}forward_backward", 200, stories_model, 3, None),
        ("ann", "POST", f"{at}retrieve_future", 200, *made),
        ("ann", "POST", "/v1/completions", 200, *token),
        ("ann", "POST", "/v1/completions", 200, *token),
        ("ann", "POST", "/v1/completions", 404, None, None, None),
        *[(None, "GET", "unknown", 401, None, None, None)] * 3,
    ]
    names = ("owner", "method", "route", "status", "model", "tokens_in", "tokens_out")
    until = time.monotonic() + 60
    lines: list[bytes] = []
    while len(lines) < len(expected) and time.monotonic() < until:
        time.sleep(0.1)
        lines = log.read_bytes().rpartition(b'"/metrics"')[2].splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    assert [tuple(row[name] for name in names) for row in rows] == expected
    assert {(row["client"], row["ms"] > 0) for row in rows} == {("127.0.0.1", True)}
    for hidden in (key, "tml-secret", "Once", model, "tml-not-served"):
        assert hidden.encode() not in b"".join(lines), hidden
    text = httpx.get(f"{serving.url}/metrics", headers={"X-API-Key": key}).text
    after = serving.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after if "process" not in name}
    for name, value in {
        "training_tokens_total": 3,
        "prompt_tokens_total": 4,
        "generation_tokens_total": 10,
        "request_success_total": 2,
        "time_to_first_token_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 2,
        "operations_total": 2,
        "operation_duration_seconds_count": 2,
        "runs": 1,
    }.items():
        assert grown[f"tinker_cookbook_{name}"] == value, name
    assert grown["tinker_cookbook_http_requests_total"] >= len(expected)
    assert grown["tinker_cookbook_errors_total"] >= 4
    for label in (
        'status="404"',
        'owner="ann"',
        f'model="{stories_model}"',
        'error="ModelNotFoundError"',
    ):
        assert label in text
    assert "secret" not in text


def test_files_are_fetched_by_signed_addresses_alone(serving, caller, stories_model):
    mine = caller()
    model = mine.model(stories_model)
    saved = mine.post("save_weights_external", model_id=model, seq_id=1, path="out")
    answer = mine.result(saved)
    assert answer["path"] == f"tinker://{model}/external_weights/out"
    place = f"training_runs/{model}/checkpoints/external_weights/out"
    assert caller("ann").get(f"{place}/external_weights_urls")[0] == 404
    urls = mine.get(f"{place}/external_weights_urls")[1]["urls"]
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    for url in urls.values():
        assert httpx.get(url).status_code == 200
        others = [("until=", "until=9"), ("/local/", "/ann/"), ("/out/", "/other/")]
        changed = [url[:-1], url.split("?")[0], *(url.replace(*change) for change in others)]
        assert [httpx.get(wrong).status_code for wrong in changed] == [404] * 5


def test_files_of_the_server_are_private(serving, caller, stories_model):
    mine = caller("ann")
    model = mine.model(stories_model)
    mine.result(mine.post("save_weights", model_id=model, seq_id=1, path="a"))
    written = [path for path in serving.root.rglob("*") if "weights" in path.parts]
    assert len(written) > 3
    for path in [*written, *serving.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) in (0o600, 0o700), path


def test_clients_elsewhere_are_told_the_models_name_and_no_folder(caller, stories_model):
    mine = caller()
    body = {"model_id": mine.model(stories_model)}
    folder = str(Path(stories_model).resolve())
    here = mine.http.post("get_info", json=body).json()
    assert here["model_data"]["tokenizer_id"] == folder  # where the tokenizer is read from
    elsewhere = mine.http.post("get_info", json=body, headers={"X-Forwarded-For": "10.0.0.9"})
    assert elsewhere.json()["model_data"]["tokenizer_id"] == here["model_name"]


def test_an_idle_server_ends_soon(serving):
    start = last = serving.cpu_seconds()
    serving.process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # it has ended
        while serving.process.poll() is None:
            last = serving.cpu_seconds()
            time.sleep(0.01)
    assert serving.process.wait(60) == 0
    assert last - start < 2  # 0.5 s; Python's own end took 2 to 7 s
