"""Checks of the integration of Inspect AI; run by ``test_inspect.py`` in an environment with it.

    python -m pytest tests/conformance/inspect_checks.py -p no:xdist

No connection to another machine is possible in them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from tinker import types

inspect_ai = pytest.importorskip("inspect_ai")

from inspect_ai import Epochs, Task, eval_async  # noqa: E402
from inspect_ai.dataset import MemoryDataset, Sample  # noqa: E402
from inspect_ai.log import read_eval_log  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentDocument,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    get_model,
)
from inspect_ai.scorer import includes, match  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import (  # noqa: E402
    ToolCall,
    ToolCallError,
    ToolFunction,
    ToolInfo,
    ToolParam,
    ToolParams,
    tool,
)

from tinker_cookbook.backends import connect  # noqa: E402
from tinker_cookbook.eval.inspect_evaluators import (  # noqa: E402
    InspectEvaluatorBuilder,
    metrics_of,
)
from tinker_cookbook.eval.inspect_utils import (  # noqa: E402
    DEFAULT_MAX_TOKENS,
    InspectAPIFromTinkerSampling,
    convert_inspect_messages,
    get_model_usage,
)
from tinker_cookbook.exceptions import ConfigurationError, DataError, EvalError, RendererError  # noqa: E402
from tinker_cookbook.renderers import get_renderer  # noqa: E402
from tinker_cookbook.tokenizer_utils import get_tokenizer  # noqa: E402

WEATHER = ToolInfo(
    name="get_weather",
    description="Weather of a city.",
    parameters=ToolParams(
        properties={"city": ToolParam(type="string", description="City")}, required=["city"]
    ),
)
CLOCK = ToolInfo(name="clock", description="The time.", parameters=ToolParams())
ASK = [ChatMessageUser(content="What is the weather in Rome?")]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Inspect must not need another machine, for example to count tokens."""
    connect_socket = socket.socket.connect

    def refuse(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError(f"connection to {address}")
        return connect_socket(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


def sequence(tokens: list[int], stop_reason: str) -> types.SampledSequence:
    return types.SampledSequence(
        stop_reason=stop_reason,
        sequence_id="0",
        tokens_np=np.array(tokens, dtype=np.int32),
        logprobs_np=np.full(len(tokens), -0.5, dtype=np.float32),
    )


class Scripted:
    """A sampling client that answers with given texts and remembers what it was asked."""

    def __init__(self, tokenizer, *answers: str, stop_reason: str = "stop") -> None:
        self.tokenizer, self.answers, self.stop_reason = tokenizer, list(answers), stop_reason
        self.prompts: list[list[int]] = []
        self.params: list[types.SamplingParams] = []

    async def sample(self, prompt, num_samples, sampling_params, **kwargs):
        self.prompts.append(prompt.to_ints())
        self.params.append(sampling_params)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return types.SampleResponse(sequences=[sequence(tokens, self.stop_reason)] * num_samples)

    def text(self, index: int = -1) -> str:
        return self.tokenizer.decode(self.prompts[index])


@pytest.fixture
def scripted(tokenizer_folder):
    """(client, api) of a chat format, with the answers that the client gives."""

    def make(family: str, *answers: str, renderer: str = "", stop_reason="stop", **settings):
        folder = tokenizer_folder(family)
        client = Scripted(get_tokenizer(folder), *answers, stop_reason=stop_reason)
        api = InspectAPIFromTinkerSampling(
            renderer_name=renderer or family, model_name=folder, sampling_client=client, **settings
        )
        return client, api

    return make


def ask(api, messages=ASK, tools=(), choice="auto", **config):
    return asyncio.run(api.generate(list(messages), list(tools), choice, GenerateConfig(**config)))


@pytest.fixture(scope="module")
def stories(stories_model):
    connection = connect("local", device="cpu", dtype="float32")
    yield connection.service.create_sampling_client(base_model=stories_model).result()
    connection.close()


def story_api(client, model: str, **settings):
    return InspectAPIFromTinkerSampling(
        renderer_name="role_colon", model_name=model, sampling_client=client, **settings
    )


def story_task(n: int = 4, **settings) -> Task:
    samples = [Sample(id=i, input=f"Once there was a cat {i}", target="a") for i in range(n)]
    dataset = MemoryDataset(samples, name="cats")
    return Task(dataset=dataset, solver=generate(), **{"scorer": includes(), **settings})


# Messages


def test_messages_keep_text_reasoning_images_and_calls():
    call = ToolCall(id="c1", function="get_weather", arguments={"city": "Ré"})
    converted = convert_inspect_messages(
        [
            ChatMessageSystem(content="Be brief."),
            ChatMessageUser(content=[ContentText(text="see"), ContentImage(image="data:x")]),
            ChatMessageAssistant(
                content=[ContentReasoning(reasoning="hm"), ContentText(text="ok")],
                tool_calls=[call],
            ),
            ChatMessageTool(content="sunny", tool_call_id="c1", function="get_weather"),
            ChatMessageTool(
                content="", tool_call_id="c2", error=ToolCallError("timeout", "took too long")
            ),
        ]
    )
    assert converted[0] == {"role": "system", "content": "Be brief."}
    assert converted[1]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "data:x"},
    ]
    assert converted[2]["content"][0] == {"type": "thinking", "thinking": "hm"}
    assert converted[2]["tool_calls"][0].function.arguments == '{"city": "Ré"}'
    assert converted[3] == {
        "role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"
    }  # fmt: skip
    assert converted[4]["content"] == "took too long"


def test_a_part_that_no_format_has_is_an_error():
    document = ChatMessageUser(content=[ContentDocument(document="data:application/pdf;base64,")])
    with pytest.raises(RendererError, match=r"messages\[0\].content\[0\].*document"):
        convert_inspect_messages([document])


def test_usage_counts_the_prompt_once_and_cached_tokens_apart():
    sequences = [sequence([1] * n, "stop") for n in (3, 4)]
    usage = get_model_usage([1] * 10, sequences, cached_prompt_tokens=6)
    counted = usage.input_tokens, usage.input_tokens_cache_read, usage.output_tokens
    assert counted == (4, 6, 7)
    assert usage.total_tokens == 17


# Rendering and stop reasons


def test_the_prompt_is_the_renderers(scripted):
    client, api = scripted("qwen3", "Hello.<|im_end|>")
    ask(api, [ChatMessageSystem(content="Be brief."), *ASK])
    renderer = get_renderer("qwen3", client.tokenizer)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Rome?"},
    ]
    assert client.prompts == [renderer.build_generation_prompt(messages).to_ints()]
    params = client.params[0]
    assert (params.max_tokens, params.temperature) == (DEFAULT_MAX_TOKENS, 1.0)
    assert list(params.stop) == renderer.get_stop_sequences()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "stopped", "window", "reason"),
    [
        ("It rains.<|im_end|>", "stop", 9999, "stop"),
        ("It rains", "length", 9999, "max_tokens"),
        (f"{CALL}<|im_end|>", "stop", 9999, "tool_calls"),
        ('<tool_call>\n{"name": "get_w', "length", 9999, "max_tokens"),
        ("It rains", "length", None, "model_length"),
    ],
)
def test_stop_reasons_are_true(scripted, answer, stopped, window, reason):
    client, api = scripted("qwen3", answer, stop_reason=stopped)
    if window is None:  # exactly what prompt and answer need
        ask(api)
        window = len(client.prompts[0]) + len(client.tokenizer.encode(answer))
    _, api = scripted("qwen3", answer, stop_reason=stopped, context_window=window)
    assert ask(api).stop_reason == reason


def test_a_prompt_beyond_the_context_says_so_without_a_request(scripted):
    client, api = scripted("qwen3", "x", context_window=5)
    output = ask(api)
    assert (output.stop_reason, client.prompts) == ("model_length", [])
    assert "leave no room in the model's context of 5" in output.error


@pytest.mark.parametrize("keep", [True, False])
def test_reasoning_is_kept_on_request(scripted, keep):
    answer = "<think>\nIt is autumn.\n</think>\n\nIt rains.<|im_end|>"
    _, api = scripted("qwen3", answer, include_reasoning=keep)
    message = ask(api).message
    assert message.text == "It rains."
    kinds = [part.type for part in message.content] if keep else []
    assert kinds == (["reasoning", "text"] if keep else [])
    if keep:
        assert "It is autumn." in message.content[0].reasoning


def test_a_stop_sequence_is_not_part_of_the_text(scripted):
    client, api = scripted("qwen3", "It rains. END of it")
    output = ask(api, stop_seqs=[" END"])
    assert output.completion == "It rains."
    assert list(client.params[0].stop) == [" END", "<|im_end|>"]


def test_settings_that_a_sampling_client_lacks_are_refused(scripted):
    _, api = scripted("qwen3", "x")
    with pytest.raises(ConfigurationError, match="frequency_penalty: got"):
        ask(api, frequency_penalty=0.5)
    ask(api, frequency_penalty=0.0, best_of=1)


# Tools


def test_tools_are_declared_and_calls_parsed(scripted):
    client, api = scripted("qwen3", f"Let me see.\n{CALL}<|im_end|>")
    output = ask(api, [ChatMessageSystem(content="Be brief."), *ASK], [WEATHER, CLOCK])
    assert "Be brief.\n\n# Tools" in client.text()
    assert '"name": "get_weather"' in client.text()
    assert '"required": ["city"]' in client.text()
    (call,) = output.message.tool_calls
    assert (call.function, call.arguments, call.parse_error) == (
        "get_weather", {"city": "Rome"}, None
    )  # fmt: skip
    assert output.completion == "Let me see."


def test_a_call_that_cannot_be_parsed_is_reported_and_rendered_as_it_was(scripted):
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {city}}\n</tool_call>'
    client, api = scripted("qwen3", f"{broken}<|im_end|>")
    output = ask(api, tools=[WEATHER])
    (call,) = output.message.tool_calls
    assert call.parse_error.startswith("Invalid JSON")
    ask(api, [*ASK, output.message, ChatMessageTool(content="no", tool_call_id=call.id)], [WEATHER])
    assert broken in client.text()


@pytest.mark.parametrize(
    ("renderer", "answer"),
    [
        ("qwen3", ' {"city": "Rome"}}\n</tool_call><|im_end|>'),
        ("qwen3_5", "<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>"),
    ],
)
def test_a_named_tool_is_forced_by_the_beginning_of_its_call(scripted, renderer, answer):
    client, api = scripted("qwen3", answer, renderer=renderer)
    output = ask(api, tools=[WEATHER, CLOCK], choice=ToolFunction("get_weather"))
    assert "<tool_call>\n" in client.text().rpartition("assistant")[2]
    assert client.text().rstrip().endswith(('"arguments":', "<function=get_weather>"))
    assert output.stop_reason == "tool_calls"
    assert output.message.tool_calls[0].arguments == {"city": "Rome"}


def test_any_tool_lets_the_model_choose_the_name(scripted):
    client, api = scripted("qwen3", 'clock", "arguments": {}}\n</tool_call><|im_end|>')
    output = ask(api, tools=[WEATHER, CLOCK], choice="any")
    assert client.text().endswith('<tool_call>\n{"name": "')
    assert output.message.tool_calls[0].function == "clock"
    client, api = scripted("qwen3", "It rains.<|im_end|>")
    ask(api, tools=[WEATHER], choice="none")
    assert "# Tools" not in client.text()


def test_only_the_first_of_parallel_calls_is_kept_where_they_are_off(scripted):
    _, api = scripted("qwen3", f"{CALL}\n{CALL}<|im_end|>")
    assert len(ask(api, tools=[WEATHER]).message.tool_calls) == 2
    assert len(ask(api, tools=[WEATHER], parallel_tool_calls=False).message.tool_calls) == 1


def test_a_task_with_tools_runs_to_the_answer(scripted, tmp_path):
    @tool
    def get_weather():
        async def execute(city: str):
            """Weather of a city.

            Args:
                city: City
            """
            return f"storm in {city}"

        return execute

    broken = "<tool_call>\nnothing\n</tool_call><|im_end|>"
    client, api = scripted("qwen3", broken, f"{CALL}<|im_end|>", "A storm.<|im_end|>")
    task = Task(
        dataset=[Sample(input="Weather in Rome?", target="storm")],
        solver=[use_tools(get_weather()), generate()],
        scorer=includes(),
    )
    (log,) = asyncio.run(
        eval_async(task, model=Model(api, GenerateConfig()), log_dir=str(tmp_path))
    )
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert len(client.prompts) == 3
    assert "storm in Rome" in client.text()
    assert "tool call: expected" in client.text(1) or "Invalid JSON" in client.text(1)


# The engine


def test_logprobs_are_the_engines(stories, stories_model):
    api = story_api(stories, stories_model)
    output = ask(
        api, logprobs=True, top_logprobs=3, num_choices=2, max_tokens=12, seed=5, prompt_logprobs=2
    )
    first, second = output.choices
    assert first.message.text != second.message.text
    tokenizer = get_tokenizer(stories_model)
    renderer = get_renderer("role_colon", tokenizer)
    prompt = renderer.build_generation_prompt([{"role": "user", "content": ASK[0].content}])
    assert [e.token for e in first.prompt_logprobs.content] == [
        renderer.codec.decode([token]) for token in prompt.to_ints()[1:]
    ]
    expected = stories.compute_logprobs(prompt).result()[1:]
    found = [entry.logprob for entry in first.prompt_logprobs.content]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    entries = first.logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(entries)
    # Recomputed from the text: the tokens after the prompt have these log-probabilities.
    sample = stories.sample(
        prompt, 2, types.SamplingParams(max_tokens=12, seed=5, stop=renderer.get_stop_sequences())
    ).result()
    tokens = list(sample.sequences[0].tokens)
    scored = stories.compute_logprobs(types.ModelInput.from_ints(prompt.to_ints() + tokens))
    np.testing.assert_allclose(
        [entry.logprob for entry in entries], scored.result()[-len(tokens) :], atol=1e-3
    )
    assert output.usage.output_tokens == sum(len(s.tokens) for s in sample.sequences)


def test_a_long_answer_ends_at_the_models_context(stories, stories_model):
    api = story_api(stories, stories_model)
    long = [ChatMessageUser(content="the cat sat " * 60)]
    output = ask(api, long, max_tokens=5000, stop_seqs=["\x00"])
    assert output.stop_reason == "model_length"
    used = output.usage
    assert used.total_tokens == 512
    assert ask(api, max_tokens=5, temperature=0.0).stop_reason == "max_tokens"


def test_several_epochs_with_a_seed_are_several_samples_and_repeatable(
    stories, stories_model, tmp_path
):
    def completions() -> list[str]:
        model = Model(story_api(stories, stories_model), GenerateConfig(max_tokens=16, seed=3))
        task = story_task(2, epochs=Epochs(3, ["mean", "pass_at_2"]))
        (log,) = asyncio.run(eval_async(task, model=model, log_dir=str(tmp_path)))
        samples = read_eval_log(log.location).samples
        return [s.output.completion for s in sorted(samples, key=lambda s: (s.id, s.epoch))]

    first = completions()
    assert len(set(first)) == 6
    assert completions() == first


def test_a_model_is_opened_by_its_name(stories_model, tmp_path):
    model = get_model(
        f"tinker-sampling/{stories_model}", renderer_name="role_colon", backend="local",
        device="cpu", config=GenerateConfig(max_tokens=8),
    )  # fmt: skip
    assert isinstance(model.api, inspect_ai.model.ModelAPI)
    (log,) = asyncio.run(eval_async(story_task(3), model=model, log_dir=str(tmp_path)))
    assert log.status == "success"
    assert log.eval.model == f"tinker-sampling/{stories_model}"

    async def count_and_close():
        counted = await model.count_tokens("Once upon a time")
        counted_messages = await model.count_tokens(list(ASK))
        await model.api.aclose()
        return counted, counted_messages

    counted, counted_messages = asyncio.run(count_and_close())
    assert counted == len(get_tokenizer(stories_model).encode("Once upon a time"))
    assert counted_messages > counted


# The evaluator


def evaluate(builder: InspectEvaluatorBuilder, client) -> dict[str, float]:
    return asyncio.run(builder()(client))


def builder(model: str, tasks, folder, **settings) -> InspectEvaluatorBuilder:
    fields = {"max_tokens": 12, "temperature": 0.0, "log_dir": str(folder), **settings}
    return InspectEvaluatorBuilder(
        tasks=tasks, renderer_name="role_colon", model_name=model, **fields
    )


def test_metrics_are_those_of_every_scorer_and_reducer(stories, stories_model, tmp_path):
    tasks = [
        story_task(4, scorer=[includes(), match()], name="both"),
        Task(
            dataset=[Sample(input="Once", target="a")], solver=generate(), scorer=includes(),
            epochs=Epochs(2, ["mean", "max"]), name="reduced",
        ),
    ]  # fmt: skip
    evaluator = builder(stories_model, tasks, tmp_path)()
    metrics = asyncio.run(evaluator(stories))
    assert metrics["cats/accuracy"] == metrics["cats/includes/accuracy"]
    assert metrics["cats/match/accuracy"] == 0.0
    assert metrics["cats/num_examples"] == 4
    assert metrics["cats/num_errors"] == 0
    assert {"reduced/includes/mean/accuracy", "reduced/includes/max/accuracy"} <= set(metrics)
    logs = [read_eval_log(log.location) for log in evaluator.last_logs]
    assert metrics_of(logs) == metrics
    assert len(logs[0].samples) == 4


def test_it_runs_inside_a_loop_without_blocking_it(stories, stories_model, tmp_path):
    async def run() -> tuple[dict[str, float], float]:
        longest, last = 0.0, asyncio.get_running_loop().time()

        async def beat():
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.005)
                now = asyncio.get_running_loop().time()
                longest, last = max(longest, now - last), now

        evaluator = builder(stories_model, story_task(16), tmp_path, max_tokens=200)()
        await evaluator(stories)  # imports
        longest, last = 0.0, asyncio.get_running_loop().time()
        task = asyncio.create_task(beat())
        metrics = await evaluator(stories)
        task.cancel()
        return metrics, longest

    metrics, longest = asyncio.run(run())
    assert metrics["cats/num_examples"] == 16
    assert longest < 1.0


def test_an_error_in_a_scorer_ends_it_or_is_counted(stories, stories_model, tmp_path):
    from inspect_ai.scorer import Score, accuracy, scorer

    @scorer(metrics=[accuracy()])
    def breaks() -> Callable:
        async def score(state, target):
            if state.sample_id == 1:
                raise ValueError("no score for this one")
            return Score(value="C")

        return score

    task = story_task(3, scorer=breaks())
    with pytest.raises((ValueError, EvalError), match="no score for this one"):
        evaluate(builder(stories_model, task, tmp_path), stories)
    tolerant = builder(stories_model, task, tmp_path, debug_errors=False)
    metrics = evaluate(tolerant, stories)
    assert (metrics["cats/num_examples"], metrics["cats/num_errors"]) == (3, 1)
    assert metrics["cats/accuracy"] == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tasks": "no/such/file.py"}, "no file no/such/file.py"),
        ({"tasks": " , "}, "tasks: got none"),
        ({"limit": 0}, "limit: got 0"),
        ({"task_args": "x"}, "task_args: got 'x'"),
    ],
)
def test_wrong_settings_are_errors_before_anything_runs(tmp_path, settings, words):
    with pytest.raises(ConfigurationError, match=words):
        builder("m", **{"tasks": "mmlu", "folder": tmp_path, **settings})()


def test_it_evaluates_in_a_training_loop_and_logs_into_the_runs_folder(stories_model, tmp_path):
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    ask_and_answer = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey"}]
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps({"messages": ask_and_answer}) + "\n") * 4)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=stories_model,
        renderer_name="role_colon",
        max_length=128,
        batch_size=2,
    )
    inline = builder(stories_model, story_task(2), None, log_dir=None)
    config = train.Config(
        log_path=str(tmp_path / "run"),
        model_name=stories_model,
        recipe_name="inline",
        renderer_name="role_colon",
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(data)),
        learning_rate=1e-3,
        lora_rank=2,
        eval_every=1,
        save_every=0,
        backend="local",
        device="cpu",
        evaluator_builders=[inline],
    )
    asyncio.run(train.main(config))
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in written]
    assert [row["cats/num_examples"] for row in metrics if "cats/num_examples" in row] == [2, 2, 2]
    assert len(list((tmp_path / "run" / "inspect-logs").glob("*.eval"))) == 3


# Our own answers as logs


@pytest.fixture
def stored(tmp_path) -> Path:
    """The save_dir of a benchmark with two answers to each of three problems."""
    from tinker_cookbook.eval.benchmarks import StoredTrajectory, StoredTurn
    from tinker_cookbook.eval.benchmarks._files import AnswerFile
    from tinker_cookbook.eval.benchmarks._summary import summarize

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
    from tinker_cookbook.eval.inspect_logs import write_inspect_logs

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
    from tinker_cookbook.eval.inspect_logs import write_inspect_logs

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
    from tinker_cookbook.eval.inspect_logs import write_inspect_logs

    with pytest.raises(DataError, match=r"no trajectories.jsonl in it"):
        write_inspect_logs(tmp_path, tmp_path / "logs")


def test_the_command_names_the_folder_first(stored):
    words = [sys.executable, "-m", "tinker_cookbook.eval.inspect_logs", str(stored)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0.4000" in done.stdout
    assert len(list((stored / "inspect-logs").glob("*.eval"))) == 1


def test_a_benchmark_has_the_same_answers_and_scores_in_both(stories, stories_model, tmp_path):
    from tinker_cookbook.eval.benchmarks import BenchmarkConfig, load_trajectories, run_benchmark

    rows = [{"question": f"{n} cats?", "answer": f"#### {n}"} for n in range(6)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    renderer = get_renderer("role_colon", get_tokenizer(stories_model))
    config = BenchmarkConfig(
        temperature=0.0, max_tokens=40, data_path=str(tmp_path), save_dir=str(tmp_path / "ours"),
        context_window=512,
    )  # fmt: skip
    result = asyncio.run(run_benchmark("gsm8k", stories, renderer, config))
    evaluator = builder(
        stories_model, "tinker_cookbook/eval/inspect_tasks.py@benchmark", tmp_path / "theirs",
        task_args=json.dumps({"name": "gsm8k", "data_path": str(tmp_path)}), max_tokens=40,
    )()  # fmt: skip
    metrics = asyncio.run(evaluator(stories))
    assert metrics["gsm8k/accuracy"] == result.score
    samples = {
        sample.id: sample for sample in read_eval_log(evaluator.last_logs[0].location).samples
    }
    answers = load_trajectories(str(tmp_path / "ours"), "gsm8k")
    assert len(answers) == len(samples) == 6
    for answer in answers:
        sample = samples[answer.example_id]
        assert sample.output.completion == answer.turns[-1].content
        assert sample.scores["benchmark_grader"].value == answer.reward
