"""The report on training data, against counts by hand and planted faults."""

from __future__ import annotations

import json
import re
import time

import chz
import numpy as np
import pytest

from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import data_report
from tinker_cookbook.supervised.data_report import make_report
from tinker_cookbook.supervised.hf_datasets import ChatDataBuilder
from tinker_cookbook.supervised.near_duplicates import similar_texts
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def dialogue(question, answer, system=None):
    begin = [{"role": "system", "content": system}] if system else []
    return [
        *begin,
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def builder(tokenizer_folder, path, max_length=None, what=None, **settings):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=tokenizer_folder("smollm2"),
        renderer_name="chatml",
        max_length=max_length,
        batch_size=1,
        train_on_what=what,
    )
    return ChatDataBuilder(common_config=common, file_path=str(path), **settings)


def write(folder, train, test=()):
    for name, rows in (("train", train), ("test", test)):
        if rows:
            lines = [json.dumps({"messages": row}) for row in rows]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def test_figures_against_a_count_by_hand(tmp_path, tokenizer_folder):
    questions = [
        "How many legs does a spider have, and why do people often get it wrong?",
        "Name the largest planet of the solar system and one of its moons.",
    ]
    train = [dialogue(f"Question {i}: what is {i} times {i}?", f"It is {i * i}.") for i in range(9)]
    train += [
        train[3],  # the same row again
        dialogue("Say nothing.", ""),
        dialogue(questions[0], "Eight."),
        dialogue(questions[1].replace("one of", "any of"), "Jupiter and Io."),
        dialogue("A long one. " * 40, "Cut off."),
    ]
    # With a system message of their own: the format adds one to conversations without.
    train = [[{"role": "system", "content": "Be brief."}, *row] for row in train]
    test = [dialogue(question.upper(), "x") for question in questions]
    test += [dialogue("Something else entirely, which nobody asked before.", "x")]
    made = builder(tokenizer_folder, write(tmp_path, train, test), max_length=100)
    report = make_report(*made())
    assert report is not None
    # By hand: the text of the format, and the tokens of each answer.
    lengths, trained = [], 0
    encode = lambda text: made.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    for row in train:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row)[:-1]
        lengths.append(len(encode(text)))
        # The answer and the stop token, unless they are cut off.
        trained += (len(encode(row[-1]["content"])) + 1) * (lengths[-1] <= 100)
    part = report.train
    assert (part.length_min, part.length_max) == (min(lengths), max(lengths))
    assert part.length_median == np.median(lengths)
    assert part.length_p95 == pytest.approx(np.quantile(lengths, 0.95))
    assert sum(part.histogram) == part.rows == part.rows_read == part.rows_rendered == 14
    assert part.tokens == sum(min(length, 100) for length in lengths)
    assert part.loss_tokens == {"assistant": trained}
    assert (part.truncated, part.dropped) == (1, 1)
    # Places as in error messages: the line of the file, from 1.
    line = f"{tmp_path / 'train.jsonl'}:%d"
    assert (part.duplicates, part.duplicate_examples) == (1, [(line % 10, line % 4)])
    assert (part.empty_answers, part.empty_examples) == (1, [line % 11])
    assert (report.test_same, report.test_similar) == (1, 1)
    test_line = f"{tmp_path / 'test.jsonl'}:%d"
    found = [places[:2] for places in report.test_examples]
    assert found == [(test_line % 1, line % 12), (test_line % 2, line % 13)]
    text = "\n".join(report.lines())
    assert len(report.lines()) <= 15
    for word in ("14 training rows, 3 test rows", "1 row (7.1%) longer than max_length=100"):
        assert word in text
    assert "truncated before the answer" in text
    report.write(tmp_path)
    assert json.loads((tmp_path / "data_report.json").read_text())["train"]["truncated"] == 1
    assert (tmp_path / "data_report.txt").read_text().startswith("data report: 14 training rows")


@pytest.mark.parametrize("what", ["all_messages", "all_user_and_system_messages", "all_tokens"])
def test_loss_tokens_by_role(tmp_path, tokenizer_folder, what):
    rows = [dialogue("How are you?", "Fine, thanks.", "Be brief.")] * 2
    made = builder(tokenizer_folder, write(tmp_path, rows), what=TrainOnWhat(what))
    train_set, _ = made()
    report = make_report(train_set, None)
    assert report is not None
    found = report.train.loss_tokens
    count = lambda text: len(made.tokenizer.encode(text)) + 1  # noqa: E731
    expected = {"system": 2 * count("Be brief."), "user": 2 * count("How are you?")}
    if what != "all_user_and_system_messages":
        expected["assistant"] = 2 * count("Fine, thanks.")
    assert {role: found[role] for role in expected} == expected
    # Nothing is counted twice or forgotten.
    data = [datum for i in range(2) for datum in train_set.get_batch(i)]
    total = sum(np.count_nonzero(d.loss_fn_inputs["weights"].to_numpy()) for d in data)
    assert sum(found.values()) == total


def test_a_row_that_cannot_be_rendered_is_named_before_training(tmp_path, tokenizer_folder):
    call = [{"function": {"name": "f", "arguments": "{}"}}]
    rows = [dialogue("a", "b")] * 2
    rows += [[rows[0][0], {"role": "assistant", "content": "", "tool_calls": call}]]
    made = builder(tokenizer_folder, write(tmp_path, rows))
    with pytest.raises(DataError, match=r"train\.jsonl:3 of the training data: .*tool"):
        make_report(made()[0], None)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_command_streams_local_files(tmp_path, stories_model, capsys, kind):
    rows = [{"messages": dialogue(f"{i}?", f"{i}.")} for i in range(1200)]
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "train.jsonl")
    if kind == "parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        # Later lines are not read: the last one is broken.
        path.write_text("\n".join([*map(json.dumps, rows), "{"]))
    config = data_report.Config(
        dataset=str(tmp_path if kind == "folder" else path),
        model_name=stories_model,
        renderer_name="role_colon",
        streaming=True,
        max_rows=600,
    )
    data_report.main(config)
    printed = capsys.readouterr().out
    assert "600 rows, messages layout" in printed.replace("\n", " ")
    assert "data report: 600 training rows" in printed
    with pytest.raises(ConfigurationError, match="test_size: got 3 with streaming=true"):
        data_report.main(chz.replace(config, test_size=3))


# --- near-duplicates -----------------------------------------------------------------------------


def by_brute_force(queries, texts, threshold=0.6):
    def grams(text):
        words = [*re.findall(r"[^\W_]+", text.lower()), "", ""]
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    sets = [grams(text) for text in texts]
    found = {}
    for i, query in enumerate(map(grams, queries)):
        best = max(len(query & other) / len(query | other) for other in sets)
        if best >= threshold:
            found[i] = best
    return found


@pytest.mark.slow
def test_planted_duplicates_are_found_among_real_questions(shared_dir):
    read = lambda name: [  # noqa: E731
        json.loads(line)["question"] for line in (shared_dir / "data" / "gsm8k" / name).open()
    ]
    texts, queries = read("train.jsonl"), read("test.jsonl")[:300]
    rng = np.random.default_rng(0)
    planted = {}
    for i in range(0, 300, 5):
        words = queries[i].split()
        # None to four changed words.
        for at in rng.integers(0, len(words), size=i // 5 % 5):
            words[at] = "zebra"
        planted[i] = int(rng.integers(len(texts)))
        texts[planted[i]] = " ".join(words).upper() + " !"
    found = {pair.query: pair for pair in similar_texts(queries, texts)}
    expected = by_brute_force(queries, texts)
    assert found.keys() == expected.keys()
    assert len(expected) > 40
    for i, similarity in expected.items():
        assert found[i].similarity == pytest.approx(similarity)
        assert found[i].index == planted[i]


@pytest.mark.slow  # 15 seconds
def test_a_hundred_thousand_rows(shared_dir):
    path = shared_dir / "data" / "gsm8k"
    train = [json.loads(line)["question"] for line in (path / "train.jsonl").open()]
    test = [json.loads(line)["question"] for line in (path / "test.jsonl").open()]
    rng = np.random.default_rng(0)
    texts = [f"{train[i]} {train[j]}" for i, j in rng.integers(len(train), size=(100_000, 2))]
    places = rng.permutation(100_000)[:100]
    for i, place in enumerate(places):
        texts[place] = test[i]
    begun = time.process_time()
    found = similar_texts(test, texts)
    assert time.process_time() - begun < 30
    assert [(pair.query, pair.index) for pair in found] == list(enumerate(places))
