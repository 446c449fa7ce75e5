"""Checks in the environment of verifiers 0.1.9: ``python checks_legacy.py MODEL URL FOLDER``.

URL is that of a server of the model; its key is in ``KEY``. Prints ``ok NAME`` for each check.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tinker
import verifiers as vf
from openai import AsyncOpenAI

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.recipes.verifiers_rl import evaluate, train, verifiers_env
from tinker_cookbook.recipes.verifiers_rl.tinker_openai import TinkerAsyncOpenAIClient
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL, URL, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
GROUP = 4


async def builder_of(**arguments):
    verifiers_env.set_vf_env(vf.load_environment("old_letters", **arguments))
    make = verifiers_env.VerifiersRLDatasetBuilder(
        vf_env_id="old_letters",
        groups_per_batch=2,
        model_name=MODEL,
        renderer_name="role_colon",
        group_size=GROUP,
    )
    dataset, test_set = await make()
    assert (len(dataset), test_set) == (2, None)
    return dataset.get_batch(0)[0]


def turns_of(trajectory):
    return [(t.ob.to_ints(), t.ac.tokens, t.ac.logprobs) for t in trajectory.transitions]


def check_scores(client, trajectories) -> None:
    count = 0
    for trajectory in trajectories:
        for ob, tokens, logprobs in turns_of(trajectory):
            whole = tinker.ModelInput.from_ints([*ob, *tokens])
            scores = client.compute_logprobs(whole).result()
            np.testing.assert_allclose(logprobs, scores[len(ob) :], atol=1e-4)
            count += len(tokens)
    assert count > 50, count


async def rollouts(client, policy) -> None:
    for turns in (1, 3):
        builder, kept = await builder_of(turns=turns), []
        make = builder.make_envs

        async def make_envs(make=make, kept=kept):
            kept.extend(await make())
            return kept

        builder.make_envs = make_envs
        group = await do_group_rollout(builder, policy)
        # What the library recorded is what the loop trains on.
        recorded = verifiers_env.convert_states_to_trajectory_group([env.state for env in kept])
        for ours, theirs in zip(group.trajectories_G, recorded.trajectories_G, strict=True):
            assert len(ours.transitions) == turns
            assert turns_of(ours) == turns_of(theirs)
            assert ours.stop_reason == theirs.stop_reason
        assert group.get_total_rewards() == recorded.get_total_rewards()
        assert group.metrics_G == recorded.metrics_G
        assert sorted(m["first_of_group"] for m in group.metrics_G) == [0.0, 0.0, 0.0, 1.0]
        check_scores(client, group.trajectories_G)


async def own_client(client, policy) -> None:
    """The library's own run_group with the client of this package, and against the server."""
    builder = await builder_of(turns=2)
    tokenizer = get_tokenizer(MODEL)
    here = TinkerAsyncOpenAIClient(client, get_renderer("role_colon", tokenizer), tokenizer)
    arguments = {"max_tokens": 16, "temperature": 1.0, "logprobs": True}
    extra = {"return_token_ids": True, "renderer_name": "role_colon"}
    server = AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ["KEY"])
    for one, model, settings in (
        (here, "tinker", arguments),
        (server, MODEL, {**arguments, "extra_body": extra}),
    ):
        states = await builder.vf_env.run_group(
            builder.get_rollout_inputs(GROUP), one, model, settings, nullcontext(), nullcontext()
        )
        group = verifiers_env.convert_states_to_trajectory_group(states)
        assert all(len(t.transitions) == 2 for t in group.trajectories_G)
        check_scores(client, group.trajectories_G)


async def failures(client, policy) -> None:
    builder = await builder_of(broken=True)
    with pytest.raises(BackendError, match="InfraError"):
        await do_group_rollout(builder, policy)
    packed = pickle.dumps(builder)
    assert pickle.loads(packed).vf_env is builder.vf_env
    verifiers_env.set_vf_env(None)
    with pytest.raises(RuntimeError, match="set_vf_env"):
        pickle.loads(packed)
    with pytest.raises(ConfigurationError, match="no-such-environment"):
        await verifiers_env.VerifiersRLDatasetBuilder(vf_env_id="no-such-environment")()


async def learning(client, policy) -> None:
    """A run of two steps equals one of a single step that is continued."""
    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        verifiers_env.set_vf_env(None)
        config = train.CLIConfig(
            model_name=MODEL, renderer_name="role_colon", vf_env_id="old_letters",
            vf_env_args='{"turns": 2}', log_path=str(FOLDER / name), max_steps=steps,
            behavior_if_log_dir_exists="resume", device="cpu", dtype="float32", group_size=8,
            groups_per_batch=2, max_tokens=12, learning_rate=3e-3, num_epochs=4, save_every=1,
            eval_every=1, num_test=2, lora_rank=8,
        )  # fmt: skip
        await train.main(config)

    def rows(name: str):
        lines = (FOLDER / name / "metrics.jsonl").read_text().splitlines()
        keep = ("step", "env/all/reward/total", "test/env/all/reward/total", "optim/grad_norm")
        return [{k: v for k, v in json.loads(line).items() if k in keep} for line in lines]

    assert rows("whole") == rows("parts"), (rows("whole"), rows("parts"))
    verifiers_env.set_vf_env(None)
    found = await evaluate.evaluate(
        "old_letters", {}, MODEL, 2, 2, 4, 12, 1.0, renderer_name="role_colon", device="cpu",
        dtype="float32",
    )  # fmt: skip
    assert len(found["reward"]) == len(found["metrics"]["share"]) == 4


async def main() -> None:
    connection = connect("local", device="cpu", dtype="float32")
    client = connection.service.create_sampling_client(base_model=MODEL)
    policy = TinkerTokenCompleter(client, max_tokens=16, seed=1)
    for check in (rollouts, own_client, failures, learning):
        await check(client, policy)
        print(f"ok {check.__name__}", flush=True)


asyncio.run(main())
