"""Judges: label probabilities, retries, cache, limits, a chat API, agreement (under 3 s)."""

from __future__ import annotations

import asyncio
import math
import pickle

import pytest
from json_server import json_server

from tinker_cookbook.exceptions import (
    BackendError,
    ConfigurationError,
    EvalGradingError,
)
from tinker_cookbook.judges.agreement import cohen_kappa
from tinker_cookbook.judges.judge import CarefulJudge, Judge, Judgement, LabelJudge, read_number
from tinker_cookbook.judges.labels import mean_logprobs
from tinker_cookbook.judges.settings import JudgeSettings, LazyJudge
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = [{"role": "user", "content": "Is it good?"}]


def test_a_label_judge_gives_the_probabilities_of_the_whole_model(stories_model):
    """Against transformers' own forward pass over the rendered prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    from tinker_cookbook.backends import connect

    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_sampling_client(base_model=stories_model).result()
        judge = LabelJudge(client, renderer)
        found = asyncio.run(judge(QUESTION, float))
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32)
    prompt = torch.tensor([judge.labels.prompt(QUESTION).to_ints()])
    tokens = [judge.labels.tokens["Yes"], judge.labels.tokens["No"]]
    expected = model(prompt).logits[0, -1, tokens].softmax(0)[0].item()
    assert found.score == pytest.approx(expected, abs=1e-5)
    assert found.text.startswith(f"Yes {expected:.4f}")


def test_position_bias_cancels_in_both_orders():
    honest = {"A": 0.3, "B": -0.3}
    biased = [{label: v + b for (label, v), b in zip(honest.items(), (2, -2), strict=True)}]
    biased.append({"A": honest["A"] - 2, "B": honest["B"] + 2})
    found = mean_logprobs(biased)
    assert found["A"] - found["B"] == pytest.approx(0.6)
    assert math.exp(found["A"]) + math.exp(found["B"]) == pytest.approx(1)


class Scripted(Judge):
    """Gives one result after the other; counts calls and how many run at once."""

    def __init__(self, *results):
        self.results, self.calls, self.running, self.most = list(results), 0, 0, 0

    async def __call__(self, messages, read):
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.005)
            result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
            if isinstance(result, Exception):
                raise result
            return Judgement(result, str(result))
        finally:
            self.running -= 1


def careful(judge, **settings):
    return CarefulJudge(judge, retry_pause_seconds=0.001, **settings)


def grade(judge, count=1):
    async def run():
        prompts = [[{"role": "user", "content": str(i)}] for i in range(count)]
        return await asyncio.gather(*(judge(prompt, float) for prompt in prompts))

    return [one.score for one in asyncio.run(run())]


def test_errors_and_unreadable_verdicts_are_tried_again():
    judge = Scripted(BackendError("busy"), EvalGradingError("no number"), 0.7)
    assert grade(careful(judge, max_retries=2)) == [0.7]
    assert judge.calls == 3


@pytest.mark.parametrize("result", [BackendError("down"), math.nan])
def test_failing_judge_gives_no_score(result):
    judge = Scripted(result)
    with pytest.raises(EvalGradingError, match="no score after 3 attempts; the last error"):
        grade(careful(judge, max_retries=2))


def test_no_more_requests_run_at_once_than_the_limit():
    judge = Scripted(0.5)
    assert grade(careful(judge, max_concurrency=3), 10) == [0.5] * 10
    assert judge.most == 3


def test_equal_prompts_are_one_request_and_the_file_outlives_the_run(tmp_path):
    path = tmp_path / "cache" / "judgements.jsonl"
    judge = Scripted(0.25)

    async def twice():
        return await asyncio.gather(*(cached(QUESTION, float) for _ in range(4)))

    cached = careful(judge, cache_path=path)
    assert [one.score for one in asyncio.run(twice())] == [0.25] * 4
    assert judge.calls == 1
    # A run that was killed while it wrote leaves a torn line.
    path.write_bytes(path.read_bytes() + b'{"key": "torn')
    other = Scripted(0.9)
    cached = careful(other, cache_path=path)
    assert [one.score for one in asyncio.run(twice())] == [0.25] * 4
    assert other.calls == 0
    other.name = "another judge"
    cached = careful(other, cache_path=path)
    assert [one.score for one in asyncio.run(twice())] == [0.9] * 4


@pytest.fixture
def server():
    """(URL, requests) of a chat API whose first token is Yes with 0.6, and which writes a score."""
    requests: list[dict] = []

    def answer(body, headers):
        requests.append({**body, "key": headers["Authorization"]})
        choice = {"message": {"content": "I think <score>0.75</score>"}}
        if body.get("logprobs"):
            shares = {"Yes": 0.5, " yes": 0.1, "No": 0.3, "Maybe": 0.1}
            top = [{"token": t, "logprob": math.log(p)} for t, p in shares.items()]
            choice["logprobs"] = {"content": [{"token": "Yes", "top_logprobs": top}]}
        return 200, {"choices": [choice]}

    with json_server(answer) as url:
        yield f"{url}/v1", requests


def test_any_openai_url_is_a_judge(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    url, requests = server
    settings = JudgeSettings(model_name="big", url=url, api_key_env="MY_KEY", max_retries=0)
    labels = asyncio.run(settings()(QUESTION, float))
    assert labels.score == pytest.approx(0.6 / 0.9)
    found = [requests[0][name] for name in ("max_tokens", "top_logprobs", "key")]
    assert found == [1, 20, "Bearer secret"]
    # As groups in other processes and threads have it: pickled, on an event loop of its own.
    text = JudgeSettings(model_name="big", url=url, mode="text")
    judge = pickle.loads(pickle.dumps(LazyJudge(text)))
    read = read_number(r"<score>(.*?)</score>", 0, 1)
    assert [asyncio.run(judge(QUESTION, read)).score for _ in range(2)] == [0.75, 0.75]
    with pytest.raises(EvalGradingError, match="got 'inf'"):
        read_number(r"<score>(.*?)</score>", -math.inf, math.inf)("<score>inf</score>")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "yes"}, "mode: got 'yes'"),
        ({"url": "localhost"}, "url: got 'localhost'"),
        ({"url": "http://x", "model_path": "tinker://a"}, "with url="),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        JudgeSettings(model_name="m", **settings).check()


def test_kappa_of_the_textbook():
    """Both raters say yes to 20 and no to 15 of 50; one alone says yes to 5, the other to 10."""
    kappa, (low, high) = cohen_kappa(agreed=35, positive_a=25, positive_b=30, total=50)
    assert kappa == pytest.approx(0.4)
    assert low < 0.4 < high
    # A judge that says the same of everything agrees by chance alone.
    assert cohen_kappa(30, 50, 30, 50)[0] == pytest.approx(0)
    assert cohen_kappa(50, 50, 50, 50) == (0.0, (0.0, 0.0))
    assert cohen_kappa(50, 25, 25, 50)[1][0] < 1  # perfect agreement on 50 is not certainty
