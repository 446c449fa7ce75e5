"""Repeated, misordered, failing and abandoned requests; crashes."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import Caller, Serving

pytestmark = pytest.mark.slow


def loss(answer) -> float:
    return answer["metrics"]["loss:sum"]


def test_a_request_sent_twice_runs_once(caller, stories_model):
    mine = caller()
    losses = []
    for times in (1, 3):
        model = mine.model(stories_model)
        for _ in range(times):
            mine.result(mine.train(model, 1))
        for _ in range(times):
            mine.result(mine.step(model, 2))
        losses.append(loss(mine.result(mine.train(model, 3))))
    assert losses[0] == losses[1]


def test_operations_run_in_the_order_of_their_numbers(caller, stories_model):
    mine = caller()
    straight, turned = mine.model(stories_model), mine.model(stories_model)
    for model, order in ((straight, (1, 2, 3)), (turned, (2, 3, 1))):
        asked = {}
        for number in order:
            asked[number] = (mine.step if number == 2 else mine.train)(model, number)
        results = [mine.result(asked[number]) for number in (1, 3)]
        if model == straight:
            expected = [loss(one) for one in results]
    assert [loss(one) for one in results] == expected
    assert expected[1] < expected[0]


def test_a_bad_request_disturbs_neither_its_run_nor_others(caller, stories_model):
    mine = caller()
    good, bad = mine.model(stories_model), mine.model(stories_model)
    first = mine.result(mine.train(good, 1))
    refused = mine.result(mine.train(bad, 1, loss_fn="nonsense"))
    assert refused["category"] == "user"
    assert "cross_entropy" in refused["error"]
    assert "error" in mine.result(mine.step(bad, 2))  # the pass before it failed
    assert loss(mine.result(mine.train(bad, 3))) == loss(first)
    mine.result(mine.step(bad, 4))
    mine.result(mine.step(good, 2))
    assert loss(mine.result(mine.train(bad, 5))) == loss(mine.result(mine.train(good, 3)))


@pytest.mark.parametrize(
    ("kind", "asked", "said"),
    [
        ("optim_step", {"optimizer_params": {"type": "muon"}}, "got 'muon'"),
        ("optim_step", {"adam_params": {"learning_rat": 1}}, "got 'learning_rat'"),
        ("save_weights", {}, "path: got none"),
        ("save_weights_for_sampler", {"path": ""}, "path: got none"),
        ("save_weights_for_sampler", {}, "got neither path nor sampling_session_seq_id"),
        (
            "save_weights_for_sampler",
            {"sampling_session_seq_id": 0, "kind": "weekly"},
            "got 'weekly'",
        ),
        (
            "load_weights",
            {"path": "tinker://a:train:0/weights/b", "weights_access_token": "t"},
            "token",
        ),
    ],
)
def test_refused_operation_gives_up_its_turn(serving, caller, stories_model, kind, asked, said):
    mine = caller()
    model = mine.model(stories_model)
    refused = mine.result(mine.post(kind, model_id=model, seq_id=1, **asked))
    assert refused["category"] == "user"
    assert said in refused["error"]
    assert loss(mine.result(mine.train(model, 2))) > 0
    assert not any("never arrived" in line for line in serving.said)  # nothing was waited for


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("optim_step", {"adam_params": 7}),
        ("save_weights", {"ttl_seconds": "soon"}),
        ("load_weights", {"path": ""}),
    ],
)
def test_a_body_without_form_is_refused_at_once_and_gives_up_its_turn(
    serving, caller, stories_model, kind, asked
):
    mine = caller()
    model = mine.model(stories_model)
    # Nobody else's refused body is taken for one of this model's.
    assert caller("ann").post(kind, model_id=model, seq_id=1, **asked)[0] == 422
    assert mine.post(kind, model_id=model, seq_id=2, **asked)[0] == 422
    first = mine.train(model, 1)
    assert loss(mine.result(mine.train(model, 3))) > 0
    assert loss(mine.result(first)) > 0
    assert not any("never arrived" in line for line in serving.said)


def test_many_clients_at_once_get_what_each_gets_alone(caller, stories_model):
    mine = caller()

    def run(_: int) -> list[float]:
        client = caller()
        model = client.model(stories_model)
        asked = []
        for number in range(1, 7, 2):
            asked.append(client.train(model, number))
            client.step(model, number + 1)
        return [loss(client.result(one)) for one in asked]

    alone = run(0)
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(run, range(32)))
    assert together == [alone] * 32
    assert len(mine.get("sessions?limit=100")[1]["sessions"]) >= 32


def _long(rows: int):
    """Data of a pass that takes a while: ``rows`` of 128 tokens, no two of which begin alike."""
    texts = [[row + 3, *range(100, 227)] for row in range(rows)]
    return [(tokens, tokens) for tokens in texts]


def test_a_client_that_submits_much_keeps_no_other_waiting(caller, stories_model):
    greedy, modest = caller("local"), caller("ann")
    large, small = greedy.model(stories_model), modest.model(stories_model)
    begin = time.monotonic()
    asked = [greedy.train(large, number, data=_long(8)) for number in range(1, 41)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: (greedy.result(asked[-1]), time.monotonic() - begin)[1])
        for number in range(1, 7, 2):
            modest.result(modest.train(small, number))
            modest.result(modest.step(small, number + 1))
        waited = time.monotonic() - begin
        assert not ended.done()
        assert waited < 0.5 * ended.result()


def test_a_finished_session_frees_its_models(caller, stories_model):
    mine = caller()
    session = mine.session()
    model = mine.model(stories_model, session)
    assert mine.http.post(f"sessions/{session}/finish", json={}).status_code == 204
    for status, said in (mine.train(model, 1), mine.post("session_heartbeat", session_id=session)):
        assert status == 404
        assert "create_training_client_from_state" in said["detail"]


@pytest.fixture
def own_server(stories_model, tmp_path):
    running = Serving(tmp_path, {"model_name": stories_model, "session_seconds": 10}).start()
    yield running
    if running.process.poll() is None:
        running.stop()


def test_kill_9_loses_nothing_saved_and_a_lapsed_client_frees_its_run(own_server, stories_model):
    mine = Caller(own_server, own_server.key())
    model = mine.model(stories_model)
    mine.result(mine.train(model, 1))
    mine.result(mine.step(model, 2))
    saved = mine.result(mine.post("save_weights", model_id=model, seq_id=3, path="a"))["path"]
    expected = loss(mine.result(mine.train(model, 4)))
    own_server.stop(signal.SIGKILL)
    own_server.start()
    mine = Caller(own_server, own_server.key())
    status, said = mine.train(model, 5)
    assert status == 404
    assert "the server restarted" in said["detail"]
    listed = mine.get("checkpoints")[1]["checkpoints"]
    assert [one["tinker_path"] for one in listed] == [saved]
    session = mine.session()
    loaded = mine.post(
        "load_weights", session_id=session, model_seq_id=0, path=saved, optimizer=True
    )
    again = mine.result(loaded)["model_id"]
    assert loss(mine.result(mine.train(again, 1))) == expected
    until = time.monotonic() + 60
    while session in mine.get("sessions")[1]["sessions"]:
        assert time.monotonic() < until
        time.sleep(0.5)
    assert mine.train(again, 2)[0] == 404
    assert own_server.stop() == 0
    assert _is_said(own_server, "(no heartbeat for 10 s); 1 runs freed")


def test_a_stop_finishes_the_step_in_hand_and_tells_its_client(own_server, stories_model):
    mine = Caller(own_server, own_server.key())
    model = mine.model(stories_model)
    in_hand = mine.train(model, 1, data=_long(200))[1]
    queued = mine.train(model, 2, data=_long(200))[1]
    with ThreadPoolExecutor(2) as pool:
        ask = mine.http.post
        polls = [pool.submit(ask, "retrieve_future", json=one) for one in (in_hand, queued)]
        time.sleep(0.5)
        assert not polls[0].done()
        assert own_server.stop() == 0
        answer = polls[0].result()
        assert (answer.status_code, "protobuf" in answer.headers["content-type"]) == (200, True)
        assert polls[1].result().status_code == 408


def _is_said(server: Serving, text: str) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if any(text in line for line in server.said):
            return True
        time.sleep(0.1)
    return False
