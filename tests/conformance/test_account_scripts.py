"""The programs of ``tinker_cookbook.scripts``, mostly through the SDK against our server (10 s)."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace

import pytest
import tinker
from homes import new_home

from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.renderers import ToolCall, get_renderer
from tinker_cookbook.scripts import (
    copy_checkpoint,
    get_access_token,
    save_audit_log,
    test_tool_calling_e2e,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

PROMPT = tinker.ModelInput.from_ints([1, 44, 101, 7])
GREEDY = tinker.SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(params=["local", "server"])
def account(request, tmp_path, monkeypatch):
    """What ``connect()`` finds in the environment: nothing, or a server and a key for it."""
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "server":
        serving = request.getfixturevalue("serving")
        monkeypatch.setenv("TINKER_API_KEY", serving.key())
        monkeypatch.setenv("TINKER_BASE_URL", serving.url)
    return request.param


def greedy(client):
    return client.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens


def test_a_copy_has_the_weights_of_its_source(account, stories_model, tmp_path, capsys):
    with connect() as connection:
        made = connection.service.create_lora_training_client(stories_model, rank=4, seed=0)
        training = made.result()
        fields = {"target_tokens": [44, 101, 7, 9], "weights": [1.0] * 4}
        training.forward_backward([tinker.Datum(PROMPT, fields)], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        source = training.save_state("000001").result().path
        sampled = training.save_weights_for_sampler("000001").result().path
        expected = greedy(training.save_weights_and_get_sampling_client().result())
    row = {"name": "000001", "batch": 1, "state_path": source, "sampler_path": sampled}
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
    kinds = ["--output-kind", "training", "--output-name", "mine"]
    copy_checkpoint.main(["--source-path", source])
    copy_checkpoint.main(["--source-path", f"{tmp_path}@1", *kinds])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert printed["sampler_path:"].endswith("/sampler_weights/000001")
    assert printed["training_path:"].endswith("/weights/mine")
    with connect() as connection:
        service = connection.service
        copy = service.create_sampling_client(model_path=printed["sampler_path:"]).result()
        assert greedy(copy) == expected
        state = service.create_training_client_from_state(printed["training_path:"]).result()
        assert greedy(state.save_weights_and_get_sampling_client().result()) == expected
        base = service.create_sampling_client(base_model=stories_model).result()
        assert greedy(base) != expected
    for path, more, message in (
        (sampled, {}, "the training checkpoint of the same step"),
        ("/nowhere", {}, "no such folder: /nowhere"),
        (source, {"output_kind": "both"}, "output_kind: got 'both'"),
        *([(source, {"destination_project_id": "p"}, "no projects")] * (account == "local")),
    ):
        names = ("source_access_token", "destination_project_id", "output_name")
        given = dict.fromkeys(names) | {"output_kind": "sampler"} | more
        with pytest.raises(ConfigurationError, match=message):
            copy_checkpoint.copy_checkpoint(path, **given)


def test_a_token_replaces_the_key(serving, monkeypatch, capsys):
    monkeypatch.setenv("TINKER_BASE_URL", f"{serving.url}/")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {serving.key()}")
    get_access_token.main()
    name, _, token = capsys.readouterr().out.strip().partition("=")
    assert name == "export TINKER_API_KEY"
    assert token != serving.key()
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD")
    monkeypatch.setenv("TINKER_API_KEY", token)
    with connect() as connection:
        assert connection.service.get_server_capabilities().supported_models
    for command, url, error, message in (
        ("", serving.url, ConfigurationError, "TINKER_CREDENTIAL_CMD: got none"),
        ("exit 3", serving.url, ConfigurationError, "status 3"),
        ("echo two words", serving.url, ConfigurationError, "printed 2 words"),
        ("echo tml-wrong", serving.url, BackendError, "status 401"),
        ("echo tml-a", "http://127.0.0.1:1", BackendError, "no token from it"),
    ):
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
        monkeypatch.setenv("TINKER_BASE_URL", url)
        with pytest.raises(error, match=message):
            get_access_token.main()


class AuditLog:
    """An admin client with one event a day."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_audit_log(self, day: date) -> SimpleNamespace:
        self.asked.append(day.isoformat())
        event = SimpleNamespace(model_dump_json=lambda: json.dumps({"day": day.isoformat()}))
        return SimpleNamespace(result=lambda: SimpleNamespace(entries=[event]))


def test_days_of_the_audit_log_are_fetched_until_they_are_over(tmp_path, monkeypatch, serving):
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    ours = tinker.AdminClient(base_url=serving.url, api_key=serving.key())
    hosted = AuditLog()
    monkeypatch.setattr(tinker, "AdminClient", lambda: hosted)
    today = datetime.now(UTC).date()
    days = [(today - timedelta(days=n)).isoformat() for n in range(3)]
    words = ["--once", "--backfill-days", "2", "--output-dir", str(tmp_path)]
    save_audit_log.main(words)
    assert hosted.asked == days
    assert json.loads((tmp_path / f"audit_log_{days[1]}.jsonl").read_text()) == {"day": days[1]}
    save_audit_log.main(words)  # the days that are over are not fetched again
    assert hosted.asked == [*days, days[0]]
    # The file of a day whose last poll was before its end lacks the events behind it.
    noon = datetime.combine(date.fromisoformat(days[1]), datetime.min.time(), UTC).timestamp()
    os.utime(tmp_path / f"audit_log_{days[1]}.jsonl", (noon, noon))
    due = [day.isoformat() for day in save_audit_log.days_to_fetch(tmp_path, today, 2)]
    assert due == days[:2]
    with pytest.raises(ConfigurationError, match="interval_seconds: got 0"):
        save_audit_log.main(["--interval-seconds", "0"])
    with pytest.raises(tinker.NotFoundError, match="no projects, traces, audit log"):
        save_audit_log.run_once(ours, tmp_path, 0)


class Scripted:
    """A service whose models write these tokens."""

    def __init__(self, tokens):
        self.tokens, self.prompts, self.budgets = tokens, [], []

    async def create_sampling_client(self, base_model):
        return self

    async def sample(self, prompt, num_samples, sampling_params):
        self.prompts.append(prompt.to_ints())
        self.budgets.append(sampling_params.max_tokens)
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=self.tokens)])


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "get_weather", "arguments": {"location": "Paris"}}', True),
        ('{"name": "get_weather", ', False),
    ],
)
def test_a_call_passes_if_its_renderer_reads_it(tokenizer_folder, capsys, body, calls):
    folder = tokenizer_folder("qwen3")
    tokenizer = get_tokenizer(folder)
    text = f"<tool_call>\n{body}\n</tool_call><|im_end|>"
    service = Scripted(tokenizer.encode(text))
    tools, user = test_tool_calling_e2e.SAMPLE_TOOLS, "Weather?"
    asked = service, folder, "qwen3_disable_thinking", tools, "Be kind.", user
    success, message, raw = asyncio.run(test_tool_calling_e2e.test_model(*asked))
    assert (success, raw) == (calls, text)
    renderer = get_renderer("qwen3_disable_thinking", tokenizer)
    messages = renderer.create_conversation_prefix_with_tools(tools, "Be kind.")
    messages.append({"role": "user", "content": user})
    assert service.prompts[0] == renderer.build_generation_prompt(messages).to_ints()
    test_tool_calling_e2e.print_result("the model", success, message, raw)
    printed = capsys.readouterr().out
    assert ("passed: the model" in printed) == calls
    assert ("call that cannot be read" in printed) != calls
    if calls:
        assert [type(call) for call in message["tool_calls"]] == [ToolCall]


def test_inkling_answers_one_question_at_several_efforts(monkeypatch, capsys):
    pytest.importorskip("tml_renderers")
    from tinker_cookbook.scripts.inkling import sample_reasoning

    renderer = get_renderer("tml_v0", get_tokenizer("thinkingmachines/Inkling"))
    messages = [{"role": "user", "content": "6 * 7?"}]
    whole, _ = renderer.build_supervised_example(
        [*messages, {"role": "assistant", "content": "42"}]
    )
    service = Scripted(whole.to_ints()[renderer.build_generation_prompt(messages).length :])
    connection = nullcontext(SimpleNamespace(service=service))
    monkeypatch.setattr(sample_reasoning, "connect", lambda *_, **__: connection)
    efforts = [0.1, 0.5, 0.99]
    sample_reasoning.cli_main(sample_reasoning.Config(prompt="6 * 7?", efforts=efforts))
    expected = [renderer.build_generation_prompt(messages, effort=one).to_ints() for one in efforts]
    assert service.prompts == expected
    assert len(set(map(tuple, expected))) == 3
    assert service.budgets == [4096, 8192, 16384]
    printed = capsys.readouterr().out
    assert [f"effort {one:g} (" in printed for one in efforts] == [True] * 3
    assert printed.count("\n42\n") == 3
    with pytest.raises(ConfigurationError, match="efforts: got none"):
        sample_reasoning.cli_main(sample_reasoning.Config(prompt="6 * 7?", efforts=[]))
