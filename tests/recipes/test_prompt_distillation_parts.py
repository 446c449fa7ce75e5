"""Prompts, queries, answers and the split of prompt distillation, each by itself."""

from __future__ import annotations

import json

import pytest

from recipes.prompt_distillation import create_data
from recipes.prompt_distillation.data import DistilledDatasetBuilder, student_accuracy
from recipes.prompt_distillation.tasks import (
    LANGUAGE_NAMES,
    TASKS,
    Query,
    Reason,
    Task,
    parse_labels,
    prompt_of_file,
    read_queries,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


@pytest.mark.parametrize(
    ("task", "answer", "ended", "said"),
    [
        ("language", "Answer: de", True, "de"),
        ("language", "The words are German.\nanswer:  DE", True, "de"),
        ("language", "Answer: pt", True, Reason.UNKNOWN_LABEL),
        ("language", "It is German.", True, Reason.NO_MATCH),
        ("language", "It is Ger", False, Reason.CUT_OFF),
        ("language", " \n", True, Reason.NO_MATCH),
        ("language_by_examples", "German", True, "de"),
        ("language_by_examples", " greek, I think", False, "el"),
        ("language_by_examples", "Other", True, "ot"),
        ("language_by_examples", "Farsi", True, Reason.UNKNOWN_LABEL),
        ("language_by_examples", "ChineseEnglish", True, Reason.UNKNOWN_LABEL),
    ],
)
def test_answers_of_the_language_tasks(task, answer, ended, said):
    got = TASKS[task].target(answer, ended)
    assert got == said
    assert isinstance(got, Reason) == isinstance(said, Reason)


def test_free_answers_count_whole_if_they_ended():
    free = Task([])
    assert free.target(" Yes, of course. ", True) == "Yes, of course."
    assert free.target("Yes, of", False) is Reason.CUT_OFF


def test_labels_may_be_put_otherwise():
    assert parse_labels("a, b") == {"a": "a", "b": "b"}
    assert parse_labels("Good=positive,Bad=negative") == {"Good": "positive", "Bad": "negative"}


def test_the_long_prompt_knows_every_label_and_holds_the_query():
    (message,) = TASKS["language"].prompt("Wo bist du?")
    assert message["role"] == "user"
    assert message["content"].endswith("\nWo bist du?\n")
    for code, name in LANGUAGE_NAMES.items():
        assert f"{code} ({name}" in message["content"]


def test_the_examples_show_every_label():
    messages = TASKS["language_by_examples"].prompt("Wo bist du?")
    shown = {m["content"] for m in messages if m["role"] == "assistant"}
    assert shown == set(LANGUAGE_NAMES.values())
    assert messages[-1] == {"role": "user", "content": "Wo bist du?"}


def test_the_default_task_is_what_the_teacher_can_do():
    assert create_data.Config().find_task() == TASKS["language_by_examples"]
    assert create_data.Config(teacher_model="other").find_task() == TASKS["language"]
    short = create_data.Config(max_tokens=3, labels="German=x").find_task()
    assert (short.max_tokens, short.labels) == (3, {"German": "x"})


def test_prompts_from_files(tmp_path):
    text = tmp_path / "prompt.txt"
    text.write_text("Be brief.\n")
    system, user = prompt_of_file(str(text)).prompt("Hi {there}")
    assert (system["role"], user) == ("system", {"role": "user", "content": "Hi {there}"})
    text.write_text("Say it in French: {query}!")
    assert prompt_of_file(str(text)).prompt("Hi")[0]["content"] == "Say it in French: Hi!"


def test_queries_from_lines_and_rows_each_once(tmp_path):
    lines = tmp_path / "q.txt"
    lines.write_text("one\n\n two \none\n")
    assert [query.text for query in read_queries(str(lines))] == ["one", "two"]
    rows = tmp_path / "q.jsonl"
    rows.write_text('{"query": "one", "label": "x", "group": "g"}\n')
    assert read_queries(str(rows), ["x"]) == [Query("one", "x", "g")]
    assert Query("one").id == Query("one", "x").id != Query("two").id


def test_a_file_is_continued_extended_and_put_in_order(tmp_path):
    path = tmp_path / "out.jsonl"
    config = create_data.Config(output_file=str(path))
    one, two, three = (Query(text, "a") for text in ("one", "two", "three"))
    path.with_name("out.jsonl.run").mkdir()

    def opened(*queries):
        return create_data.AnswerFile(config, Task([], labels={"A": "a"}), queries)

    output = opened(one, two)
    assert output.missing() == [one, two]
    output.add(two, "A!", "a")
    # Stopped here: an answer is missing, and a third query comes to it.
    output = opened(one, two, three)
    assert output.missing() == [one, three]
    output.add(three, "x", Reason.NO_MATCH)
    output.add(one, "A?", "a")
    assert output.missing() == []
    output.finish()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["messages"][0]["content"], row["answer"]) for row in kept] == [
        ("one", "A?"),
        ("two", "A!"),
    ]
    assert [(row["query"], row["reason"]) for row in output.dropped] == [("three", "no match")]


def rows_of(path, labels=("a", "b")):
    """Ten groups of two queries; each answer is the first label, the right one the second."""
    with path.open("w") as file:
        for i in range(20):
            turns = [("user", f"query {i}"), ("assistant", labels[0])]
            messages = [{"role": role, "content": text} for role, text in turns]
            row = {
                "messages": messages,
                "id": f"q{i}",
                "group": f"g{i // 2}",
                "label": labels[i % 2],
            }
            file.write(json.dumps(row) + "\n")


def builder_of(path, model, **more):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", batch_size=4
    )
    return DistilledDatasetBuilder(common_config=common, file_path=str(path), **more)


def test_whole_groups_are_held_out_whatever_was_dropped(tmp_path, stories_model):
    path = tmp_path / "d.jsonl"
    rows_of(path)
    train, test = builder_of(path, stories_model, test_fraction=0.3).split
    assert (len(train), len(test)) == (14, 6)
    assert not {asked.group for asked in train} & {asked.group for asked in test}
    # The same queries with some answers dropped: the same groups are held out.
    lines = path.read_text().splitlines()
    gone = [json.loads(lines[i]) for i in range(0, 20, 3)]
    path.write_text("\n".join(line for i, line in enumerate(lines) if i % 3) + "\n")
    folder = tmp_path / "d.jsonl.run"
    folder.mkdir()
    with (folder / "dropped.jsonl").open("w") as file:
        for row in gone:
            row = {
                **row,
                "query": row.pop("messages")[0]["content"],
                "sample": 0,
                "reason": "empty",
            }
            file.write(json.dumps(row) + "\n")
    builder = builder_of(path, stories_model, test_fraction=0.3)
    assert {asked.group for asked in builder.split[1]} == {asked.group for asked in test}
    train_set, test_set = builder()
    assert sum(len(train_set.get_batch(i)) for i in range(len(train_set))) < 14
    assert test_set is not None
    other = builder_of(path, stories_model, test_fraction=0.3, split_seed=1)
    assert {asked.group for asked in other.split[1]} != {asked.group for asked in test}


def test_the_teachers_accuracy_counts_dropped_answers_as_wrong(tmp_path, stories_model):
    path = tmp_path / "d.jsonl"
    rows_of(path)
    builder = builder_of(path, stories_model, test_fraction=0.5)
    constants = student_accuracy(builder, 8)._constants
    assert constants == {"teacher_accuracy": 0.5}  # of each group one query is a's and one is b's
    (tmp_path / "d.jsonl.run").mkdir()
    held_out = {asked.group for asked in builder.split[1]}
    lost = {"id": "x", "query": "?", "label": "a", "reason": "empty", "group": min(held_out)}
    (tmp_path / "d.jsonl.run" / "dropped.jsonl").write_text(json.dumps(lost) + "\n")
    builder = builder_of(path, stories_model, test_fraction=0.5)
    constants = student_accuracy(builder, 8)._constants
    assert constants == {"teacher_accuracy": pytest.approx(5 / 11)}
