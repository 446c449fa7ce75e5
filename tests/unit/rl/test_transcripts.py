"""Transcripts: a row for each episode, and trees with what environments logged."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tinker
from talk_samples import ASK, END, answers, encode, group_of, talk, tokenizer

from tinker_cookbook.record.episodes import RecordedGroup
from tinker_cookbook.rl.advantages import compute_advantages
from tinker_cookbook.rl.report.transcript_text import TokenText
from tinker_cookbook.rl.report.transcripts import TranscriptFiles, group_log
from tinker_cookbook.rl.types import RolloutError, StopReason, Trajectory, Transition
from tinker_cookbook.utils import logtree

HINTS = talk(
    (f"{ASK}number?", f"10{END}", 0.0, {"valid": 1.0}, {"hint": "up"}),
    (f"{ASK}higher", f"15{END}", 1.0, {"valid": 0.5}),
    final=f"{ASK}right!",
)


def rows_of(folder: Path, split: str = "train") -> list[dict]:
    def forbid(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (folder / f"{split}_rollout_summaries.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=forbid) for line in lines]


def write(path: Path, groups, tags=None, split="train", iteration=3, **options) -> Path:
    given = zip(
        groups,
        tags or [[] for _ in groups],
        options.pop("advantages", [None] * len(groups)),
        options.pop("logs", [None] * len(groups)),
        strict=True,
    )
    files = TranscriptFiles(str(path), tokenizer=options.pop("tokenizer", tokenizer()), **options)
    files.write(iteration, split, [RecordedGroup(i, *one) for i, one in enumerate(given)])
    return path / f"iteration_{iteration:06d}"


def test_rows_hold_the_numbers_and_the_text(tmp_path: Path):
    group = group_of(
        HINTS, talk((f"{ASK}number?", "7", 0.25), stop_reason=StopReason.MAX_TOKENS),
        final_rewards_G=[0.5, 0.0], metrics_G=[{"wins": 1}, {}], sampling_client_step=9,
    )  # fmt: skip
    folder = write(tmp_path, [group], [["guess", "easy"]], advantages=[[0.6, -0.6]])
    first, second = rows_of(folder)
    assert first == {
        "schema_version": 1, "split": "train", "iteration": 3, "group_idx": 0, "traj_idx": 0,
        "tags": ["guess", "easy"], "sampling_client_step": 9, "total_reward": 1.5,
        "final_reward": 0.5, "advantage": 0.6, "stop_reason": "completed",
        "trajectory_metrics": {"wins": 1}, "trajectory_logs": {},
        "steps": [
            {"step_idx": 0, "ob_len": 8, "ob_new_len": 8, "ac_len": 3, "reward": 0.0,
             "episode_done": False, "stop_reason": "stop", "masked": False,
             "prompt_text": f"{ASK}number?", "action_text": f"10{END}",
             "metrics": {"valid": 1.0}, "logs": {"hint": "up"}},
            {"step_idx": 1, "ob_len": 18, "ob_new_len": 7, "ac_len": 3, "reward": 1.0,
             "episode_done": True, "stop_reason": "stop", "masked": False,
             "prompt_text": f"{ASK}higher", "action_text": f"15{END}",
             "metrics": {"valid": 0.5}, "logs": {}},
        ],
        "final_ob_len": 28, "final_text": f"{ASK}right!",
    }  # fmt: skip
    assert second["steps"][0]["stop_reason"] == "length"
    assert (second["stop_reason"], second["total_reward"]) == ("max_tokens", 0.25)


def test_what_json_cannot_hold_is_still_written(tmp_path: Path):
    odd = talk(("q", f"a{END}", 0.0, {"x": math.nan, "y": -math.inf}, {"obj": {1, 2}}))
    (row,) = rows_of(write(tmp_path, [group_of(odd)]))
    assert row["steps"][0]["metrics"] == {"x": None, "y": None}
    assert row["nonfinite"] == {"steps/0/metrics/x": "nan", "steps/0/metrics/y": "-inf"}
    assert row["steps"][0]["logs"] == {"obj": "{1, 2}"}
    assert row["advantage"] is None


def test_a_prompt_that_does_not_extend_the_turn_before_is_shown_from_the_first_difference():
    """As where a renderer strips the thinking of earlier turns."""
    first, second = encode(f"{ASK}abc"), encode(f"{ASK}abX new")
    episode = talk((f"{ASK}abc", f"z{END}", 0.0))
    last = episode.transitions[0]
    episode.transitions.append(
        Transition(tinker.ModelInput.from_ints(second), last.ac, 0.0, True)
    )  # fmt: skip
    text = TokenText(tokenizer()).episode(episode)
    assert first[:3] == second[:3]
    assert text.turns[1].prompt == "X new"
    assert text.turns[1].num_new_tokens == 5
    assert text.final == ""  # the final observation belongs to the first turn alone


def test_images_stand_where_they_are():
    image, other = (
        tinker.types.ImageChunk(data=data, format="png", expected_tokens=7) for data in (b"1", b"2")
    )
    chunks = [tinker.EncodedTextChunk(tokens=encode(f"{ASK}a")), image]
    ob = tinker.ModelInput(chunks=[*chunks, tinker.EncodedTextChunk(tokens=encode(ASK))])
    text = TokenText(tokenizer())
    swapped = tinker.ModelInput(chunks=[chunks[0], other])
    answer = talk(("q", END, 0.0)).transitions[0].ac
    turns = [Transition(ob, answer, 0.0, False), Transition(swapped, answer, 0.0, True)]
    first, second = text.episode(Trajectory(turns, tinker.ModelInput.empty())).turns
    assert first.prompt == f"{ASK}a[image: 7 tokens]{ASK}"
    assert (second.prompt, second.num_new_tokens) == ("[image: 7 tokens]", 7)


@pytest.mark.shared
def test_sentencepiece_keeps_the_space_between_prompt_and_answer(stories_model):
    from transformers import AutoTokenizer

    stories = AutoTokenizer.from_pretrained(stories_model)
    whole = np.array(stories.encode("Once upon a time there was a dog"), np.int32)
    text = TokenText(stories)
    parts = [text.text(whole[:4], whole[:0]), text.text(whole[4:], whole[:4])]
    assert "".join(parts) == stories.decode(whole)
    assert parts[1].startswith(" ")


def test_the_tree_has_the_conversation_and_the_log_of_each_member(tmp_path: Path):
    async def member(index: int) -> None:
        with logtree.scope_div(data__member=index), logtree.scope_header(f"grading {index}"):
            await asyncio.sleep(0)
            logtree.log_text(f"said by {index}")

    async def play(index: int) -> logtree.Trace | None:
        with group_log(enabled=index == 0) as log:
            logtree.log_text(f"drawn {index}")
            await asyncio.gather(*(member(j) for j in range(2)))
        return log

    logs = [asyncio.run(play(i)) for i in range(2)]
    assert logs[1] is None
    known = [{"role": "user", "content": "number?"}, {"role": "assistant", "content": "7"}]
    group = group_of(HINTS, talk((f"{ASK}number?", "7", 0.0), messages=json.dumps(known)))
    group.rollout_errors.append(RolloutError("TimeoutError", "member 2"))
    advantages = [list(a) for a in compute_advantages([group, answers(0.0, 1.0)])]
    folder = write(
        tmp_path, [group, answers(0.0, 1.0)], [["guess"], []], logs=logs, advantages=advantages,
        num_groups_to_log=1,
    )  # fmt: skip
    tree = json.loads((folder / "train_logtree.json").read_text())
    (shown,) = tree["root"]["children"]
    assert shown["data"] == {"group_idx": 0, "tags": ["guess"], "rewards": [1.0, 0.0]}
    texts = json.dumps(shown["children"][:3])
    assert "TimeoutError: member 2" in texts
    assert "drawn 0" in texts
    for index, (node, messages) in enumerate(
        zip(
            shown["children"][3:],
            [
                [
                    {"role": "environment", "content": f"{ASK}number?"},
                    {"role": "assistant", "content": f"10{END}"},
                    {"role": "environment", "content": f"{ASK}higher"},
                    {"role": "assistant", "content": f"15{END}"},
                    {"role": "environment", "content": f"{ASK}right!"},
                ],
                known,
            ],
            strict=True,
        )
    ):
        heading, conversation, log = node["children"]
        assert heading["children"][0].startswith(f"Sample {index} · reward {1 - index:.3f}")
        assert conversation["data"] == {"type": "conversation", "messages": messages}
        assert f"said by {index}" in json.dumps(log)
        assert f"said by {1 - index}" not in json.dumps(log)


def test_settings_say_which_files_there_are(tmp_path: Path):
    groups = [answers(0.0, 1.0)]

    def names(name: str, **options) -> list[str]:
        return sorted(p.name for p in write(tmp_path / name, groups, **options).iterdir())

    assert names("all") == ["train_logtree.json", "train_rollout_summaries.jsonl"]
    assert names("tree", json_export=False) == ["train_logtree.json"]
    assert names("rows", num_groups_to_log=0) == ["train_rollout_summaries.jsonl"]
    assert names("test", split="eval_test", json_export=False) == ["eval_test_logtree.json"]
