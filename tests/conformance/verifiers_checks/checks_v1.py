"""Checks in the environment of verifiers 0.4: ``python checks_v1.py MODEL URL FOLDER TOKENIZER``.

URL is that of a server of the model; its key is in ``KEY``. Prints ``ok NAME`` for each check.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.recipes.verifiers_rl import evaluate, train
from tinker_cookbook.recipes.verifiers_rl.v1 import env as v1
from tinker_cookbook.recipes.verifiers_rl.v1.renderer import (
    custom_renderer,
    tokenizer_folder,
)
from tinker_cookbook.recipes.verifiers_rl.v1.traces import trajectories_of_trace
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL, URL, FOLDER, TOKENIZER = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
GROUP = 4


def spec(name: str, **settings) -> v1.VerifiersSpec:
    return v1.VerifiersSpec(
        taskset_id=name, model_name=MODEL, renderer_name="role_colon", settings=json.dumps(settings)
    )


async def group_of(chosen: v1.VerifiersSpec, policy):
    """Runs a group; returns it and its environments."""
    builder, kept = v1.VerifiersTaskGroupBuilder(chosen, 0, GROUP), []
    make = builder.make_envs

    async def make_envs():
        kept.extend(await make())
        return kept

    builder.make_envs = make_envs
    return await do_group_rollout(builder, policy), kept


def turns_of(trajectory, *, trained=True):
    """Observation, tokens and log-probabilities of each turn that is trained."""
    return [
        (turn.ob.to_ints(), turn.ac.tokens, turn.ac.logprobs)
        for turn in trajectory.transitions
        if not trained or not (turn.masked or turn.metrics.get("parse_error_masked"))
    ]


async def check_scores(client, trajectories) -> None:
    """The log-probabilities of all turns are those of scoring their tokens again."""
    count = 0
    for trajectory in trajectories:
        for ob, tokens, logprobs in turns_of(trajectory, trained=False):
            whole = tinker.ModelInput.from_ints([*ob, *tokens])
            scores = await client.compute_logprobs(whole)
            np.testing.assert_allclose(logprobs, scores[len(ob) :], atol=1e-4)
            count += len(tokens)
    assert count > 50, count


async def one_turn(client, policy) -> None:
    group, envs = await group_of(spec("story_letters"), policy)
    assert len(set(group.get_total_rewards())) > 1
    for trajectory, one, reward in zip(
        group.trajectories_G, envs, group.get_total_rewards(), strict=True
    ):
        assert set(trajectory.transitions[-1].metrics) == {"length", "reward/share"}
        (trace,) = one.episode.traces
        (found,) = trajectories_of_trace(trace)
        assert turns_of(found) == turns_of(trajectory)
        assert found.reward == reward == trace.reward
    await check_scores(client, group.trajectories_G)


async def turns(client, policy) -> None:
    group, envs = await group_of(spec("story_turns"), policy)
    for trajectory, one, reward in zip(
        group.trajectories_G, envs, group.get_total_rewards(), strict=True
    ):
        masked = [turn.metrics.get("parse_error_masked", 0) for turn in trajectory.transitions]
        assert masked == [0, 1, 0, 1, 0]
        (agent,) = [trace for trace in one.episode.traces if trace.agent.name == "agent"]
        # Each turn is in one branch; a branch that continues another repeats its turns, masked.
        parts = trajectories_of_trace(agent)
        found = [turn for part in parts for turn in turns_of(part)]
        assert turns_of(trajectory) == found
        assert reward == agent.reward
        assert trajectory.transitions[-1].metrics["turns"] == 3
    await check_scores(client, group.trajectories_G)


class Caller(TokenCompleter):
    """Calls the tool, then answers with its result."""

    async def __call__(self, model_input, stop, *, max_tokens=None) -> TokensWithLogprobs:
        tokenizer = get_tokenizer(TOKENIZER)
        prompt = tokenizer.decode(model_input.to_ints())
        text = "42"
        if "<tool_response>" not in prompt:
            assert '"name": "sums_add"' in prompt, prompt
            call = {"name": "sums_add", "arguments": {"a": 19, "b": 23}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        tokens = tokenizer.encode(f"{text}<|im_end|>")
        return TokensWithLogprobs(tokens, [-0.25] * len(tokens))


async def tools(client, policy) -> None:
    """A call of a tool that the library serves by MCP, and its result in the next prompt."""
    chosen = v1.VerifiersSpec(
        taskset_id="sum_tools", model_name=TOKENIZER, renderer_name="qwen3_disable_thinking"
    )
    group, envs = await group_of(chosen, Caller())
    assert group.get_total_rewards() == [1.0] * GROUP
    for trajectory, one in zip(group.trajectories_G, envs, strict=True):
        second = trajectory.transitions[1]
        assert second.metrics == {"results": 1.0, "reward/right": 1.0}
        (trace,) = one.episode.traces
        parts = trajectories_of_trace(trace)
        assert turns_of(trajectory) == [turn for part in parts for turn in turns_of(part)]
        assert [message.content for message in trace.tool_messages] == ["42"]


async def failures(client, policy) -> None:
    with pytest.raises(BackendError, match="the world is broken"):
        await group_of(spec("story_turns", fail=True), policy)
    for wrong, names in (
        (spec("no_such_taskset"), "no_such_taskset"),
        (spec("story_letters", taskset={"leter": "a"}), "leter"),
    ):
        with pytest.raises(ConfigurationError, match=names):
            await v1.VerifiersTaskGroupBuilder(wrong, 0, 1).make_envs()


async def served(client, policy) -> None:
    """The library alone against the server: tokens by its train client, text by its eval client."""
    train_client = TrainClientConfig(
        base_url=f"{URL}/v1", api_key_var="KEY", renderer=custom_renderer(MODEL, "role_colon"),
        renderer_model_name=tokenizer_folder(MODEL),
    )  # fmt: skip
    sampling = vf.Sampling(max_tokens=20, temperature=0.9, stop=["\n\nUser:"])
    chosen = spec("story_turns")
    environment = v1.environment(chosen)
    async with environment.serving():
        context = ModelContext(model=MODEL, client=train_client, sampling=sampling)
        tasks = v1.tasks_of(chosen)[:2]
        episodes = await asyncio.gather(*(environment.run_episode(task, context) for task in tasks))
        for episode in episodes:
            assert episode.ok, episode
        traces = [trace for episode in episodes for trace in episode.traces]
        await check_scores(
            client, [part for trace in traces for part in trajectories_of_trace(trace)]
        )
        eval_client = EvalClientConfig(base_url=f"{URL}/oai/api/v1", api_key_var="KEY")
        greedy = vf.Sampling(max_tokens=12, temperature=0.0, renderer_name="role_colon")
        context = ModelContext(model=MODEL, client=eval_client, sampling=greedy)
        episode = await environment.run_episode(tasks[0], context)
        assert episode.ok, episode.errors
        # A prompt that is too long is refused before it is sent, by max_model_len.
        long = tasks[0].with_data(prompt="word " * 600)
        context = ModelContext(model=MODEL, client=train_client, sampling=sampling)
        episode = await environment.run_episode(long, context)
        errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
        messages = [error.message for error in errors]
        assert any("exceeds maximum context length (512)" in one for one in messages), messages


async def learning(client, policy) -> None:
    """A run of two steps equals one of a single step that is continued."""

    def config(name: str, steps: int) -> train.CLIConfig:
        return train.CLIConfig(
            model_name=MODEL, renderer_name="role_colon", vf_env_id="story_letters",
            log_path=str(FOLDER / name), behavior_if_log_dir_exists="resume", device="cpu",
            dtype="float32", group_size=8, groups_per_batch=3, max_tokens=12, max_steps=steps,
            learning_rate=3e-3, save_every=1, eval_every=1, num_test=2, lora_rank=8,
        )  # fmt: skip

    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        await train.main(config(name, steps))

    def rows(name: str):
        lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
        keep = ("step", "env/all/reward/total", "test/env/all/reward/total", "optim/grad_norm")
        return [{k: v for k, v in json.loads(line).items() if k in keep} for line in lines]

    assert rows("whole") == rows("parts"), (rows("whole"), rows("parts"))
    assert len(rows("whole")) == 3
    (path,) = [
        json.loads(line)["sampler_path"]
        for line in (FOLDER / "whole" / "checkpoints.jsonl").read_text().splitlines()
        if json.loads(line).get("final")
    ] or [None]
    found = await evaluate.evaluate(
        "story_turns", {}, None if path else MODEL, 2, 2, 4, 12, 1.0, path, device="cpu",
        dtype="float32",
    )  # fmt: skip
    assert len(found["reward"]) == len(found["metrics"]["turns"]) == 4


async def documented(client, policy) -> None:
    """The two examples of the page."""
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    taskset, program = [
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "verifiers" in text
    ]
    (FOLDER / "documented_letters.py").write_text(taskset)
    sys.path.insert(0, str(FOLDER))
    chosen = spec("documented_letters")
    group, _ = await group_of(chosen, policy)
    assert set(group.trajectories_G[0].transitions[-1].metrics) == {"reward/share"}
    program = program.replace("http://127.0.0.1:8000", URL).replace("TINKER_API_KEY", "KEY")
    program = program.replace('"tinker://RUN/sampler_weights/NAME"', "MODEL")
    names = {
        "MODEL": MODEL,
        "environment": v1.environment(chosen),
        "task": v1.tasks_of(chosen)[0],
    }
    body = "\n".join(f"    {line}" for line in program.splitlines())
    exec(f"async def run():\n{body}\n    return trajectories\n", names)
    await check_scores(client, await names["run"]())


async def main() -> None:
    connection = connect("local", device="cpu", dtype="float32")
    client = connection.service.create_sampling_client(base_model=MODEL)
    policy = TinkerTokenCompleter(client, max_tokens=16, seed=1)
    for check in (one_turn, turns, tools, failures, served, documented, learning):
        await check(client, policy)
        print(f"ok {check.__name__}", flush=True)


assert os.environ["KEY"]
asyncio.run(main())
