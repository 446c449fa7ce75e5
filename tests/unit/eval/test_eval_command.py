"""The commands eval, show and compare, on a real model and on a fake chat API (under 15 s)."""

from __future__ import annotations

import asyncio
import io
import json

import chz
import pytest
from json_server import json_server
from PIL import Image

from tinker_cookbook.eval import compare, show
from tinker_cookbook.eval.__main__ import Config, main
from tinker_cookbook.eval.benchmarks import (
    BenchmarkConfig,
    load_result,
    load_trajectories,
    run_benchmark,
)
from tinker_cookbook.eval.benchmarks.questions import OwnQuestions
from tinker_cookbook.exceptions import (
    BackendError,
    BenchmarkNotFoundError,
    ConfigurationError,
    DataError,
    EvalGradingError,
    RendererError,
)
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.sandbox import launch
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTIONS = [("2 + 2", 4), ("3 + 4", 7), ("5 + 5", 10), ("1 + 8", 9)]


@pytest.fixture
def data(tmp_path):
    """GSM8K's layout with problems of our own."""
    rows = [{"question": q, "answer": f"It is {a}.\n#### {a}"} for q, a in QUESTIONS]
    folder = tmp_path / "data" / "gsm8k"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def local(stories_model, data, out, **more):
    return Config(
        model_name=stories_model,
        renderer_name="role_colon",
        backend="local",
        device="cpu",
        dtype="float32",
        tasks="gsm8k",
        data_path=str(data),
        out=str(out),
        max_tokens=6,
        **more,
    )


def test_a_base_model_is_evaluated_and_the_same_command_samples_nothing(
    stories_model, data, tmp_path, capsys
):
    config = local(stories_model, data, tmp_path / "out", num_samples=3, limit=2, seed=1)
    asyncio.run(main(config))
    shown = capsys.readouterr().out
    assert "renderer: role_colon" in shown
    assert "2 x 3" in shown
    assert "0.0% to " in shown
    assert "pass@k" in shown
    assert "2 problems never get the full reward, 0 always; only the 0% whose" in shown
    assert "6 answers were cut off" in shown
    assert f"eval.show {tmp_path}/out task=gsm8k" in shown
    before = (tmp_path / "out/gsm8k/trajectories.jsonl").read_bytes()
    asyncio.run(main(config))
    assert "2 of 2 problems were answered before" in capsys.readouterr().out
    assert (tmp_path / "out/gsm8k/trajectories.jsonl").read_bytes() == before
    asyncio.run(main(chz.replace(config, temperature=0.9)))
    assert len((tmp_path / "out/gsm8k/trajectories.jsonl").read_bytes()) > len(before)


def test_errors_come_before_a_model_is_loaded(stories_model, data, tmp_path, monkeypatch):
    with pytest.raises(BenchmarkNotFoundError, match=r"'gsm9k'.*did you mean 'gsm8k'"):
        asyncio.run(main(Config(tasks="gsm9k", model_name="no/model")))
    problems = {"bubblewrap": "the program bwrap is not installed"}
    monkeypatch.setattr(launch, "tier_problems", lambda: problems)
    with pytest.raises(ConfigurationError, match=r"humaneval: runs programs .*bwrap is not inst"):
        asyncio.run(main(Config(tasks="humaneval", model_name="no/model")))
    with pytest.raises(ConfigurationError, match="limit: got 0"):
        asyncio.run(main(Config(tasks="gsm8k", model_name="no/model", limit=0)))
    with pytest.raises(ConfigurationError, match="tasks: got none"):
        asyncio.run(main(Config(tasks=",", model_name="no/model")))
    with pytest.raises(ConfigurationError, match="openai_url: expected model_name="):
        asyncio.run(main(Config(tasks="gsm8k", openai_url="http://localhost:1/v1")))
    api = {"openai_url": "http://localhost:1/v1", "model_name": "x"}
    with pytest.raises(ConfigurationError, match="openai_url: mt_bench has several turns"):
        asyncio.run(main(Config(tasks="mt_bench", judge_name="no/model", **api)))
    # The name of the default folder is a valid run id.
    assert Config(tasks="gsm8k", model_name="./no model").folder.name == "no_model"
    assert Config(tasks="gsm8k", model_name="..").folder.name == "model"
    with pytest.raises(DataError, match="which has no data of openai/gsm8k"):
        asyncio.run(main(local(stories_model, tmp_path / "none", tmp_path / "out")))


OWN = [
    # row, match, right answers, wrong answers
    (
        {"question": "2 + 2?", "answer": 4},
        "math",
        [r"\boxed{4}", "It is 4.0"],
        ["5", r"\boxed{44}"],
    ),
    ({"input": "Hi", "target": ["Hello", "Hi!"]}, "exact", ["hello.", "Hi!"], ["Hello you", ""]),
    ({"prompt": "A digit", "completion": r"^\d$"}, "regex", ["7"], ["77", "x"]),
    (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
        "exact",
        ["yes", " Yes. "],
        ["Yes, it is"],
    ),
    ({"messages": [{"role": "user", "content": "Hi"}], "answer": "b"}, "exact", ["B"], ["a"]),
    ({"question": "E?", "answer": "cafe\u0301"}, "exact", ["Caf\u00e9"], ["cafe"]),
    ({"question": "A stop", "answer": "."}, "exact", ["."], ["", "a"]),
    ({"instruction": "Add", "input": "1, 2", "output": "3"}, "math", ["3"], ["4"]),
    (
        {"question": "Colour?", "options": ["red", "blue"], "answer": "B"},
        "letter",
        ["B", "The answer is (B).", r"\boxed{B}"],
        ["A", "C", "blue or red"],
    ),
    ({"question": "?", "choices": ["red", "blue"], "answer": 1}, "letter", ["B"], ["A"]),
    ({"question": "?", "options": "['red', 'blue']", "answer": "blue"}, "letter", ["B"], ["A"]),
    ({"question": "A or B?", "answer": "(b)"}, "letter", ["B"], ["A"]),
]


@pytest.mark.parametrize(("row", "match", "right", "wrong"), OWN)
def test_own_questions_are_graded(row, match, right, wrong, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(row))
    benchmark = OwnQuestions(file, match)
    (example,) = benchmark.examples(BenchmarkConfig())
    assert example.messages[-1]["role"] == "user"
    assert [benchmark.grade(text, example).reward for text in right] == [1.0] * len(right)
    assert [benchmark.grade(text, example).reward for text in wrong] == [0.0] * len(wrong)
    assert benchmark.validate() == []


@pytest.mark.parametrize(
    ("row", "match", "words"),
    [
        ({"question": "Hi"}, "exact", "own.jsonl:1: .*question and answer"),
        ({"question": "Hi", "answer": "("}, "regex", "own.jsonl:1: .*regular expression"),
        ({"question": "Hi", "answer": ["a", " "]}, "regex", "own.jsonl:1: got an empty answer"),
        ({"question": "Hi", "answer": [True]}, "exact", "own.jsonl:1: answer: got True"),
        ("text", "exact", "own.jsonl:1: got a JSON str"),
        (
            {"question": "Hi", "options": ["a"], "answer": "B"},
            "letter",
            "answer: got 'B', expected",
        ),
        ({"question": "Hi", "options": "a, b", "answer": "A"}, "letter", "options: got 'a, b'"),
        ({"question": "Hi", "image": "no.png", "answer": "B"}, "letter", "1: messages.*no.png"),
        ({"question": "<image 2>", "image_1": "x", "answer": "A"}, "letter", "mark <image 2> with"),
        ({"question": "Hi", "answer": "b"}, "fuzzy", "match: got 'fuzzy', expected one of exact"),
        ({"question": "Hi", "answer": "b"}, "judge:", "expected one of exact"),
    ],
)
def test_own_questions_that_cannot_be_used(row, match, words, tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    with pytest.raises((ConfigurationError, DataError), match=words):
        Config(tasks=f"{tmp_path}/own.jsonl", match=match, model_name="no/model").check()


def test_images_of_questions_stand_at_their_marks(vision_tokenizer, tmp_path):
    colours = ["red", "lime", "blue"]
    for colour in colours:
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"{colour}.png")
    images = {f"image_{i}": f"{colour}.png" for i, colour in enumerate(colours, start=1)}
    row = {"question": "Like <image 2>?", "options": ["<image 3>", "<image 1>"], "answer": "B"}
    own = {"question": "Which?", "image": "blue.png", "options": ["red", "blue"], "answer": "B"}
    (tmp_path / "own.jsonl").write_text(f"{json.dumps(row | images)}\n{json.dumps(own)}\n")
    renderer = get_renderer("qwen3_vl_instruct", get_tokenizer(vision_tokenizer))
    found, logged = [], []
    for example in OwnQuestions(tmp_path / "own.jsonl", "letter").examples(BenchmarkConfig()):
        chunks = renderer.build_generation_prompt(example.messages).chunks
        shown = [
            Image.open(io.BytesIO(c.data)).getpixel((0, 0)) for c in chunks if c.type == "image"
        ]
        found.append(shown)
        logged.append(example.logs["input"])
    red, lime, blue = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert found == [[lime, blue, red], [blue]]
    assert logged[1].startswith(f"<image>{tmp_path}/blue.png</image>\nWhich?")


def test_an_image_that_the_model_refuses_is_named(vision_tokenizer, tmp_path):
    """Its shape is known to be wrong only with the model's processor."""
    Image.new("RGB", (2000, 2)).save(tmp_path / "long.png")
    row = {"id": "a", "question": "What?", "image": "long.png", "answer": "B"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    renderer = get_renderer("qwen3_vl_instruct", get_tokenizer(vision_tokenizer))
    benchmark = OwnQuestions(tmp_path / "own.jsonl", "letter")
    config = BenchmarkConfig(context_window=1000)
    with pytest.raises(RendererError, match=r"^own/a: .*long\.png': .* refuses 2000 x 2 pixels"):
        asyncio.run(run_benchmark(benchmark, None, renderer, config))


def test_a_pattern_has_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("tinker_cookbook.eval.benchmarks.questions._PATTERN_SECONDS", 0.2)
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "Hi", "answer": "^(a|aa)+$"}))
    benchmark = OwnQuestions(tmp_path / "own.jsonl", "regex")
    (example,) = benchmark.examples(BenchmarkConfig())
    with pytest.raises(EvalGradingError, match=r"took longer than 0\.2 s"):
        benchmark.grade("a" * 60 + "!", example)


def test_own_tasks_on_the_command_line(stories_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "Hi"}))
    (tmp_path / "own_bench.py").write_text(
        "from tinker_cookbook.eval.benchmarks import Example, ExampleBenchmark, Grade\n"
        "class Own(ExampleBenchmark):\n"
        "    name = 'mine'\n"
        "    def load_examples(self, config):\n"
        "        return [Example('a', [{'role': 'user', 'content': 'Hi'}], None, None)]\n"
        "    def grade(self, response, example):\n"
        "        return Grade(1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'own_bench:Other'.* has no attribute 'Other'"):
        Config(tasks="own_bench:Other", model_name="no/model").check()
    config = local(stories_model, tmp_path, tmp_path / "out")
    tasks = f"own_bench:Own,{tmp_path}/own.jsonl"
    judge = {"judge_name": stories_model, "judge_renderer_name": "role_colon"}
    config = chz.replace(config, tasks=tasks, match="judge:Polite?", data_path=None, **judge)
    asyncio.run(main(config))
    assert load_result(str(tmp_path / "out"), "mine").score == 1
    (row,) = load_trajectories(str(tmp_path / "out"), "own")
    assert row.error is None
    assert row.reward == float(row.metrics["judge/yes"] > 0.5)
    # A corrected answer is graded again, without sampling.
    config = chz.replace(config, tasks=f"{tmp_path}/own.jsonl", match="regex", out=f"{tmp_path}/o2")
    scores = []
    for answer in ("never said", "(?s).*"):
        (tmp_path / "own.jsonl").write_text(json.dumps({"question": "Hi", "answer": answer}))
        asyncio.run(main(config))
        scores.append(load_result(f"{tmp_path}/o2", "own").score)
    assert scores == [0, 1]
    assert "1 of 1 problems were answered before" in capsys.readouterr().out


class Adder:
    """Answers of a chat API to additions: one choice at a time; it is busy at first."""

    wrong = 0  # the first number of additions that it gets wrong

    def __init__(self) -> None:
        self.requests: list[dict] = []

    def __call__(self, body, headers):
        if body is None:
            return 200, {"data": [{"id": "adder", "max_model_len": 512}]}
        self.requests.append({**body, "key": headers["Authorization"]})
        if len(self.requests) == 1:
            return 429, {"error": {"message": "slow down"}}
        a, b = map(int, body["messages"][-1]["content"].split(" + "))
        content = f"<think>{a} and {b}</think>\n\n\\boxed{{{a + b + (a == self.wrong)}}}"
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"completion_tokens": 9}}


@pytest.fixture
def api():
    """(URL, answers)"""
    adder = Adder()
    with json_server(adder) as url:
        yield f"{url}/v1", adder


def test_a_chat_api_is_evaluated_and_compared(api, data, tmp_path, capsys):
    url, adder = api
    settings = {
        "tasks": "gsm8k",
        "openai_url": url,
        "model_name": "adder",
        "data_path": str(data),
        "api_key": "secret",
        "temperature": 0.0,
        "num_samples": 2,
    }
    asyncio.run(main(Config(**settings, out=str(tmp_path / "a"))))
    result = load_result(str(tmp_path / "a"), "gsm8k")
    assert result is not None
    assert (result.score, result.num_examples, result.num_errors) == (1.0, 8, 0)
    # One of them was refused; the server returns one choice of two, so the rest is requested.
    assert len(adder.requests) == 1 + 2 * 4
    request = adder.requests[-1]
    assert request["key"] == "Bearer secret"
    assert request["messages"][0]["role"] == "system"
    # Cut to what the server said its context is.
    assert request["max_tokens"] < 512
    assert {r.get("n") for r in adder.requests} == {2, None}
    row = load_trajectories(str(tmp_path / "a"), "gsm8k")[0]
    assert row.turns[-1].content == "\\boxed{4}"
    assert row.turns[-1].metadata == {"thinking": "2 and 2"}
    assert "secret" not in "".join(p.read_text() for p in (tmp_path / "a").rglob("*.json*"))

    adder.wrong = 2
    asyncio.run(main(Config(**settings, out=str(tmp_path / "b"))))
    capsys.readouterr()
    compare.main(compare.Config(a=str(tmp_path / "a"), b=str(tmp_path / "b")))
    shown = capsys.readouterr().out
    assert "gsm8k: a and b are not distinguishable on 4 examples (paired bootstrap)" in shown
    assert "a 100.0%, b 75.0%: difference -25.0%" in shown
    assert "examples would show it (power 80%)" in shown
    show.main(show.Config(run=str(tmp_path / "b"), incorrect_only=True, limit=1))
    shown = capsys.readouterr().out
    assert "<think>2 and 2</think>" in shown
    assert "\\boxed{5}" in shown
    assert "1 of 2 answers of gsm8k" in shown


def test_a_chat_api_that_cannot_be_used(api, data, tmp_path):
    def config(**more):
        given = {"tasks": "gsm8k", "data_path": str(data), "out": str(tmp_path), **more}
        return Config(**given)

    with pytest.raises(ConfigurationError, match="no model 'ader'; did you mean 'adder'"):
        asyncio.run(main(config(openai_url=api[0], model_name="ader")))
    with pytest.raises(BackendError, match="cannot be reached"):
        asyncio.run(main(config(openai_url="http://127.0.0.1:1/v1", model_name="x")))
    with pytest.raises(ConfigurationError, match="cannot score given texts"):
        asyncio.run(main(config(openai_url=api[0], model_name="adder", scoring="logprob")))


def test_folders_that_cannot_be_compared(tmp_path):
    with pytest.raises(DataError, match="expected the out= folder of an evaluation"):
        compare.main(compare.Config(a=str(tmp_path), b=str(tmp_path)))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "trajectories.jsonl").touch()
    with pytest.raises(DataError, match="no example in common"):
        compare.main(compare.Config(a=str(tmp_path), b=str(tmp_path)))
    with pytest.raises(ConfigurationError, match="did you mean 'gsm8k'"):
        show.main(show.Config(run=str(tmp_path), task="gsm9k"))
