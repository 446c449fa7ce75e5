"""Causes: recorded rows of broken and healthy runs, the settings they name, and new runs (10 s)."""

from __future__ import annotations

import json
import logging
import math
import re

import diagnosed_runs
import pytest
from diagnosed_runs import BROKEN, HEALTHY, RECORDED, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_cookbook.training.diagnosis.causes import KEY, Diagnosis, as_text, causes_of
from tinker_cookbook.training.diagnosis.history import ENTROPY, LENGTH, READ, REWARD, SAME
from tinker_cookbook.training.diagnosis.table import CAUSES

RUNS = {run["run"]: run for run in map(json.loads, RECORDED.read_text().splitlines())}


def diagnosed(rows, config=None, found=None):
    """The rows with their diagnosis, as a session writes them."""
    found = found or Diagnosis(config or {})
    written = []
    for row in rows:
        causes = found.add(row, row["step"])
        written.append({**row, KEY: as_text(causes)} if causes else row)
    return written


def causes(run):
    return causes_of(diagnosed(rows_of(run), run["config"]), run["config"])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_gets_its_cause_first(name):
    assert [one.name for one in causes(RUNS[f"{name}-0"])][:1] == [BROKEN[name][0]]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_none(name):
    seeds = [run for key, run in RUNS.items() if key.rpartition("-")[0] == name]
    assert seeds
    assert [causes(run) for run in seeds] == [[]] * len(seeds)


def test_a_cause_has_its_steps_and_the_change():
    (spike,) = causes(RUNS["garbage-0"])
    assert spike.metrics == ["train_mean_nll"]
    parts = causes(RUNS["reward_part-0"])[0]
    assert parts.metrics == ["reward/range/animal", "reward/range/length"]
    assert (spike.since, spike.until) == (18, 18)
    # Data are looked at before the first step.
    assert "(steps 0 to 30)" in str(causes(RUNS["duplicates-0"])[0])
    low = causes(RUNS["sl_rate_low-0"])[0]
    assert (low.setting, low.since, low.until) == ("learning_rate", 1, 30)
    assert low.advice.startswith("raise it from 1e-07 to 1e-06")
    # A setting of a recipe has its short name, that of a config in code the name in config.json.
    stale = RUNS["stale-0"]
    assert causes(stale)[0].setting == "async_config.max_steps_off_policy"
    stale = {**stale, "config": stale["config"] | {"recipe_name": "rl_basic"}}
    assert causes(stale)[0].setting == "max_steps_off_policy"
    assert "from 8 to 4" in causes(stale)[0].advice


def test_the_numbers_of_a_text_are_points_of_a_curve():
    for run in RUNS.values():
        points = {
            (f"{value:.4g}", str(row["step"]))
            for row in rows_of(run)
            for value in row.values()
            if isinstance(value, (int, float))
        }
        for one in causes(run):
            assert {*re.findall(r"(\S+) at step (\d+)", one.text)} <= points


def test_no_step_is_in_both_means_of_a_text():
    rewards = [0.6] * 4 + [0.0] * 4
    rows = [
        step(i, **{"reward/total": reward, "optim/entropy": 0.3 if reward else 0.1})
        for i, reward in enumerate(rewards, 1)
    ]
    (cause,) = causes_of(diagnosed(rows), {})
    assert "from 0.6 (mean of steps 1 to 4) to 0 (mean of steps 5 to 8)" in cause.text


@pytest.mark.parametrize(
    ("run", "before", "name", "advice"),
    [
        ("rl_rate_30_times", "learning_rate_too_high", "all_bad", "group_size: raise it"),
        ("rl_rate_30_times", "learning_rate_too_high", "length_drift", "take the length out"),
        (
            "kl_jump",
            "learning_rate_too_high",
            "entropy_collapse",
            "kl_penalty_coef: set it to 0.01",
        ),
        ("hacked", "reward_hacking", "length_drift", "take the length out"),
        ("dpo_rate_high", "learning_rate_too_high", "chosen_falls", "dpo_beta: raise it"),
    ],
)
def test_a_cause_that_follows_from_another_names_it(run, before, name, advice):
    found = {one.name: one for one in causes(RUNS[f"{run}-0"])}
    assert found[name].since >= found[before].since
    assert found[name].text.endswith(f"; this follows from {before}")
    first = "lower learning_rate" if before == "learning_rate_too_high" else "change the reward"
    assert found[name].advice.startswith(f"{first} first; if this stays, {advice}")
    assert "lower learning_rate from" not in found[name].advice


def test_a_reward_that_is_always_0_leads_to_the_grader_first():
    (cause,) = causes(RUNS["reward_zero-0"])
    assert "All answers of steps 1 to 8 have the reward 0, perhaps because the grader" in cause.text
    assert cause.advice.startswith("call the grader with a right answer; if it returns more than 0")
    # One other reward shows that the grader has another: of a mixed group, or a held-out problem.
    for other in ({"env/all/by_group/frac_mixed": 0.1}, {"test/env/all/reward/total": 0.1}):
        rows = [step(i, **EQUAL | (other if i == 1 else {})) for i in range(1, 5)]
        (cause,) = causes_of(diagnosed(rows), {})
        assert cause.text.startswith("All answers are wrong")
        assert not cause.advice.startswith("call")


def test_the_checkpoint_to_start_again_from_is_before_the_bad_update():
    run = RUNS["sl_rate_high-0"]
    rows = rows_of(run)

    def advice(delay, **config):
        healthy = [step(i, train_mean_nll=rows[1]["train_mean_nll"]) for i in range(1, delay)]
        later = [{**row, "step": row["step"] + delay - 1} for row in rows[1:]]
        return causes_of(diagnosed([rows[0], *healthy, *later]), config)[0].advice

    # The loss of step 2 comes from the weights after step 1.
    assert advice(1, save_every=1).endswith("start again")
    assert advice(9, save_every=0).endswith("start again")
    assert advice(9, save_every=4).endswith("start again from the checkpoint of step 8")
    assert advice(9).endswith("or from a checkpoint of step 8 or before")


def test_a_loss_that_is_lost_is_said_at_the_third_step():
    found = causes_of(diagnosed(rows_of(RUNS["sl_rate_high-0"])[:4]), {})
    assert [(one.name, one.since) for one in found] == [("learning_rate_too_high", 2)]


def test_a_cause_that_has_ended_is_told_apart():
    mixed = EQUAL | {"env/all/by_group/frac_mixed": 0.5}
    rows = [step(i, **(EQUAL if i < 6 else mixed)) for i in range(1, 9)]
    (cause,) = causes_of(diagnosed(rows), {})
    assert (cause.until, cause.holds) == (5, False)
    assert "(steps 1 to 5, no longer)" in str(cause)


def step(number, **metrics):
    return {"step": number, "progress/batch": number - 1, **metrics}


EQUAL = {
    "env/all/by_group/frac_mixed": 0.0,
    "env/all/by_group/frac_all_bad": 1.0,
    "env/all/by_group/frac_all_good": 0.0,
    "env/all/ac_tokens_per_turn": 9.0,
    "reward/total": 0.0,
}


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("no_turn", {"env/all/total_turns": 0}),
        ("all_masked", {**EQUAL, "env/all/frac_untrained": 1.0}),
        ("group_of_one", {**EQUAL, "env/all/by_group/size": 1.0}),
        ("empty", {**EQUAL, SAME: 1.0, "env/all/ac_tokens_per_turn": 1.0}),
        ("empty", {**EQUAL, "empty_answer": 0.6}),
        ("format", {**EQUAL, "parse_error": 0.6}),
        ("one_reward", {**EQUAL, "reward/total": 0.3}),
        ("learning_rate_too_high", {"train_mean_nll": math.nan}),
    ],
)
def test_causes_that_three_steps_show(name, metrics):
    rows = [step(i, **metrics) for i in range(1, 4)]
    assert [one.name for one in causes_of(diagnosed(rows), {})][:1] == [name]


@pytest.mark.parametrize(
    ("rewards", "share", "name"),
    [
        ([5.0, 6.0, 5.5], "good", "all_constant"),  # of 100
        ([0.9, 1.0, 1.0], "good", "all_good"),
        ([-5.0, -6.0, -5.5], "bad", "all_constant"),
        ([-0.1, 0.0, 0.0], "bad", "all_bad"),
    ],
)
def test_rewards_are_right_or_wrong_only_on_a_scale_to_one(rewards, share, name):
    shares = {"env/all/by_group/frac_all_good": 0.0, "env/all/by_group/frac_all_bad": 0.0}
    shares[f"env/all/by_group/frac_all_{share}"] = 1.0
    rows = [
        step(i, **EQUAL | shares | {"reward/total": reward}) for i, reward in enumerate(rewards, 1)
    ]
    assert [one.name for one in causes_of(diagnosed(rows), {})] == [name]


def test_advice_leaves_out_what_the_config_fulfils():
    rows = diagnosed([step(i, **EQUAL, **{SAME: 1.0}) for i in range(1, 4)])
    (cause,) = causes_of(rows, {"temperature": 1.0, "top_p": 1.0, "top_k": -1})
    assert (cause.setting, cause.advice[:29]) == ("", "check that renderer_name fits")
    (cause,) = causes_of(rows, {"temperature": 0.1, "top_p": 0.5, "top_k": -1})
    assert cause.setting == "temperature"
    assert cause.advice.startswith("set it to 1; leave out top_p; check")


def test_two_steps_and_mixed_groups_are_no_cause():
    assert causes_of(diagnosed([step(i, **EQUAL) for i in (1, 2)]), {}) == []
    mixed = EQUAL | {"env/all/by_group/frac_mixed": 0.4, "env/all/frac_cut_off": 1.0}
    assert causes_of(diagnosed([step(i, **mixed) for i in range(1, 9)]), {}) == []


@pytest.mark.parametrize(
    ("rewards", "mixed", "name"),
    [
        ([0.123, 0.125, 0.121, 0.125], 0.15, "one_reward"),  # one word in each answer counts
        ([0.123, 0.125, 0.121, 0.125], 0.4, None),
        ([0.11, 0.125, 0.14, 0.16], 0.15, None),  # a slow rise
        ([0.98, 1.0, 0.99, 1.0], 0.15, None),  # solved
    ],
)
def test_a_flat_reward_with_few_mixed_groups_is_one_reward(rewards, mixed, name):
    rows = [
        step(i, **EQUAL | {"env/all/by_group/frac_mixed": mixed, "reward/total": rewards[i // 3]})
        for i in range(1, 12)
    ]
    assert diagnosed(rows[:9]) == rows[:9]
    found = causes_of(diagnosed(rows), {})
    assert [(one.name, one.since) for one in found] == ([] if name is None else [(name, 1)])
    # Teachers give another signal.
    assert not causes_of(diagnosed([{**row, "teacher_kl": 0.1} for row in rows]), {})


def test_a_model_that_has_learned_short_answers_is_no_cause():
    """As ``rl_basic`` from step 25: all right, and each group one text."""
    learning = EQUAL | {"env/all/by_group/frac_mixed": 0.5, "env/all/by_group/frac_all_bad": 0.5}
    solved = EQUAL | {
        "env/all/by_group/frac_all_bad": 0.0,
        "env/all/by_group/frac_all_good": 1.0,
        "env/all/by_group/frac_same_text": 1.0,
        "reward/total": 1.0,
    }
    rows = [step(i, **(learning if i < 10 else solved)) for i in range(1, 20)]
    assert causes_of(diagnosed(rows), {}) == []


def test_a_resumed_run_continues_and_repeats_no_message():
    run = RUNS["stale-0"]
    rows, whole = rows_of(run), diagnosed(rows_of(run), run["config"])
    resumed = Diagnosis(run["config"])
    resumed.restore(whole[:9])
    assert diagnosed(rows[9:], found=resumed) == whole[9:]
    first = Diagnosis({})
    said = [one for row in rows for one in first.new(first.add(row, row["step"]))]
    assert len(said) == len({one.name for one in said})
    resumed.restore(whole)
    assert resumed.new(causes_of(whole, {})) == []


NUMBERS = st.none() | st.sampled_from([math.nan, math.inf, -1.0, 0.0, 1e-9, 0.5, 1.0, 3.0, 1e9])
NAMES = sorted(READ | {*EQUAL, "env/all/total_turns", "env/all/by_group/size", "optim/num_steps",
                       "env/all/format", "reward/range/a", "reward/range/b"})  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=12), max_size=30))
def test_no_row_ends_a_run(rows):
    written = diagnosed([step(i, **row) for i, row in enumerate(rows)])
    assert all(one.name in CAUSES for one in causes_of(written, {}))


@pytest.mark.parametrize("missing", NAMES)
def test_a_metric_that_a_run_lacks_does_not_end_it(missing):
    rows = [{"step": i, **{name: 0.5 for name in NAMES if name != missing}} for i in range(40)]
    # Not all rows are those of training steps.
    rows[1:] = [row | {"num_sequences": 8} for row in rows[1:]]
    diagnosed(rows, {"learning_rate": 1e-5})


def test_answers_that_are_empty_at_first_do_not_end_a_run():
    values = [0.0] * 3 + [1.0] * 7
    diagnosed([step(i, **{REWARD: v, ENTROPY: v, LENGTH: v}) for i, v in enumerate(values)])


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.leaf
@pytest.mark.parametrize(("name", "steps"), [("same_text", 8), ("chosen_falls", 12), ("rl", 10)])
def test_a_new_run_says_its_cause_and_the_page_shows_it(
    name, steps, stories_model, tmp_path, caplog, capsys
):
    """Each run takes 5 to 10 s on one core; the recorded runs of the same settings are longer."""
    from tinker_cookbook.view.data import Runs
    from tinker_cookbook.view.episodes import episodes

    expected, build = BROKEN.get(name) or (None, HEALTHY.get(name))
    folder = tmp_path / "runs" / name
    folder.parent.mkdir()
    with caplog.at_level(logging.WARNING):
        rows = diagnosed_runs.run(build, stories_model, folder, max_steps=steps)
    shown = Runs(tmp_path / "runs").run(name)["causes"]
    said = [r.getMessage() for r in caplog.records if "To change" in r.getMessage()]
    why = [line for line in capsys.readouterr().out.splitlines() if line.startswith("why ")]
    if expected is None:
        assert (shown, said, why) == ([], [], [])
        assert not any(KEY in row for row in rows)
        return
    first = shown[0]
    assert first["name"] == expected
    assert sum(f": {expected} (" in line for line in said) == 1
    assert expected in why[0]
    # Each place is in the record.
    assert len(first["evidence"]) == 3
    for place in first["evidence"]:
        found = episodes(folder, place["step"], place["split"])
        keys = ("datum",) if "datum" in place else ("group", "member")
        rows_there = found.get("episodes") or found["examples"]
        assert any(all(row[k] == place[k] for k in keys) for row in rows_there)
        # Of a pair the rejected answer should have a high loss.
        assert "datum" not in place or rows_there[place["datum"]].get("chosen", True)
        assert name != "garbage" or place["step"] == first["since"]
