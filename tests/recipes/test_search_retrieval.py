"""The search index: BM25 against its formula, recall on real questions, files, documents."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.search_tool import index as index_program
from recipes.search_tool import retrieval, retrieval_eval
from recipes.search_tool.corpus import Corpus, Document, read_corpus, split_text
from recipes.search_tool.questions import EXAMPLE_DOCUMENTS
from recipes.search_tool.retrieval import (
    build_index,
    is_index,
    load_index,
    open_index,
    save_index,
)
from recipes.search_tool.terms import terms
from recipes.search_tool.world import example_rows
from recipes.start import example_data
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
)

pytest.importorskip("bm25s", reason="pip install -e '.[search]'")


def corpus_of(*texts: str) -> Corpus:
    documents = [Document(str(i), "", text, str(i)) for i, text in enumerate(texts)]
    return Corpus(documents, len(documents), 0)


def formula(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """BM25 as Lucene computes it (Kamphuis et al. 2020), term by term."""
    counts = [Counter(terms(text)) for text in texts]
    mean = sum(sum(c.values()) for c in counts) / len(counts)
    scores = []
    for count in counts:
        length, score = sum(count.values()), 0.0
        for term in terms(query):
            frequency = sum(term in c for c in counts)
            if not frequency:
                continue
            idf = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
            tf = count[term] / (count[term] + k1 * (1 - b + b * length / mean))
            score += idf * tf
        scores.append(score)
    return scores


def test_scores_are_those_of_the_formula_and_equal_ones_keep_the_order_of_the_corpus():
    corpus = read_corpus(str(EXAMPLE_DOCUMENTS))
    texts = [f"{d.title}\n{d.text}" for d in corpus.documents]
    index = build_index(corpus)
    questions = [row["question"] for row in example_rows()["search_questions_test.jsonl"]]
    for question in questions[:40]:
        expected = [round(score, 5) for score in formula(texts, question)]
        hits = index.search(question, 8)
        order = sorted(range(len(texts)), key=lambda i: (-expected[i], i))[:8]
        # Rounding may put two scores in the other order, which the tolerance below allows for.
        assert [hit.score for hit in hits] == pytest.approx([expected[i] for i in order], abs=2e-5)
        for hit in hits:
            place = corpus.documents.index(hit.document)
            assert hit.score == pytest.approx(expected[place], abs=2e-5)
    same = build_index(corpus_of(*["a lamp"] * 9, "a tree"))
    assert [h.document.id for h in same.search("lamp", 3)] == ["0", "1", "2"]
    assert same.search("nothing known", 3) == []
    assert same.search("", 3) == []
    assert same.search("lamp tree", 20)[0].document.id == "9"


@pytest.mark.shared
def test_recall_on_xquad(shared_dir: Path):
    found = {}
    for language in ("en", "zh"):
        path = str(shared_dir / "data" / "xquad" / f"xquad.{language}.json")
        (result,) = retrieval_eval.measure(*retrieval_eval.read_pairs(path, 250), ["bm25"])
        assert result.num_questions == 1190
        found[language] = result
    assert found["en"].share(3) >= 0.98
    assert found["en"].share(1) >= 0.92
    # Chinese has no spaces: with whole sentences as terms it would be near zero.
    assert found["zh"].share(3) >= 0.95
    assert found["en"].queries_per_second > 500


def test_terms():
    assert terms("The CITIES' buses, glass-work; Ⅷ") == [
        "the",
        "city",
        "buse",
        "glass",
        "work",
        "viii",
    ]
    assert terms("北京大学 in 2019") == ["北京", "京大", "大学", "in", "2019"]
    assert terms("Straße STRASSE") == ["strasse", "strasse"]
    assert terms("!? …") == []


def test_an_index_on_disk_gives_the_results_of_the_one_in_memory(tmp_path: Path, capsys):
    target = tmp_path / "deep" / "index"
    config = index_program.CLIConfig(index_path=str(target), query="mayor of Saltash")
    index_program.main(config)
    printed = capsys.readouterr().out
    assert "132 documents; BM25" in printed
    assert "1. town-saltash" in printed
    loaded, built = load_index(target), build_index(read_corpus(str(EXAMPLE_DOCUMENTS)))
    for row in example_rows()["search_questions.jsonl"][:60]:
        assert loaded.search(row["question"], 5) == built.search(row["question"], 5)
    assert open_index(str(target)).documents == built.documents
    # bm25s opens the folder by itself.
    import bm25s

    assert len(bm25s.BM25.load(target).vocab_dict) == len(built._bm25.vocab_dict)
    index_program.main(config)  # an index is replaced
    assert sorted(p.name for p in target.parent.iterdir() if p.name != ".lock") == ["index"]


def test_an_interrupted_write_leaves_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "index"
    save_index(build_index(corpus_of("one lamp")), target, {})
    whole = retrieval._files

    def broken(*arguments):
        files = whole(*arguments)
        yield next(files)
        raise KeyboardInterrupt

    monkeypatch.setattr(retrieval, "_files", broken)
    with pytest.raises(KeyboardInterrupt):
        save_index(build_index(corpus_of("two trees")), target, {})
    assert load_index(target).documents[0].text == "one lamp"
    with pytest.raises(KeyboardInterrupt):
        save_index(build_index(corpus_of("two trees")), tmp_path / "other", {})
    assert not (tmp_path / "other").exists()


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path):
    target = tmp_path / "index"
    save_index(build_index(corpus_of("one lamp", "two trees")), target, {})
    lines = (target / "documents.jsonl").read_text()
    for name, text, message in (
        ("documents.jsonl", lines.splitlines()[0] + "\n", "differ in length"),
        ("documents.jsonl", lines[:-9], "cannot be read"),
        ("index.json", '{"format": 99}', "format 99"),
        ("vocab.index.json", "{", "cannot be read"),
    ):
        kept = (target / name).read_text()
        (target / name).write_text(text)
        with pytest.raises(DataFormatError, match=message):
            load_index(target)
        (target / name).write_text(kept)
    load_index(target)
    with pytest.raises(ConfigurationError, match="has no embeddings; build it with method=fused"):
        open_index(str(target), "fused")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for config in (
        index_program.CLIConfig(index_path=str(precious)),
        index_program.CLIConfig(corpus=str(precious / "thesis.txt"), index_path=str(precious)),
        index_program.CLIConfig(corpus=str(precious), index_path=str(precious)),
    ):
        with pytest.raises(ConfigurationError, match="index_path"):
            index_program.main(config)
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert not is_index(precious)


ROWS = [{"id": "a", "title": "Lamp", "text": "A lamp."}, {"contents": '"Tree"\nA tree.'}]


def test_documents_of_every_layout(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text("title,text\nLamp,A lamp.\nTree,A tree.\n")
    squad = {"data": [{"title": "A_B", "paragraphs": [{"context": "A lamp.", "qas": []}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    for name in ("rows.jsonl", "rows.json", "rows.csv"):
        documents = read_corpus(str(tmp_path / name)).documents
        assert [(d.title, d.text) for d in documents] == [("Lamp", "A lamp."), ("Tree", "A tree.")]
    assert read_corpus(str(tmp_path / "squad.json")).documents[0].title == "A B"
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "lamp.md").write_text("\ufeffA lamp.", encoding="utf-8")
    (folder / "empty.txt").write_text("  \n")
    (folder / "again.txt").write_text("A lamp.")
    (folder / "more.jsonl").write_text('{"text": "A lamp.", "title": "lamp"}\n')
    corpus = read_corpus(str(folder))
    assert [d.id for d in corpus.documents] == ["again.txt", "deep/lamp.md"]
    assert corpus.num_duplicates == 1  # the row with the same title and text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"title": "y"}\n', "a.jsonl:2: text: got None"),
        ("a.jsonl", b'{"text": " "}\n', "expected a text that is not empty"),
        ("a.jsonl", b'{"text": 3}\n', "text: got 3"),
        ("a.jsonl", b"3\n", "got int, expected objects"),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not UTF-8"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"id": 1, "text": "x"}\n{"id": 1, "text": "y"}\n', "'1', which .*:1 has too"),
        ("a.jsonl", b"", "has no document"),
        ("a.txt", b"", "has no document"),
        ("a.json", b'{"data": [{"paragraphs": [{}]}]}', r"data\[0\].paragraphs\[0\]"),
        ("a.pdf", b"%PDF", "not JSON|expected"),
    ],
)
def test_bad_documents_are_refused_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_corpus(str(tmp_path / name))


def test_bad_corpora(tmp_path: Path):
    with pytest.raises(DataValidationError, match="no file or folder"):
        read_corpus(str(tmp_path / "nowhere"))
    with pytest.raises(DataValidationError, match=r"no file that ends in \.txt"):
        read_corpus(str(tmp_path))
    with pytest.raises(DataValidationError, match="without a word"):
        build_index(corpus_of("…", "!"))
    with pytest.raises(ConfigurationError, match="did you mean 'bm25'"):
        build_index(corpus_of("x"), "bm52")  # type: ignore[arg-type]
    with pytest.raises(DataValidationError, match=r"recipes\.search_tool\.index"):
        load_index(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["go", "see", "end."]), max_size=12), max_size=6))
def test_split_text_keeps_every_word_and_the_limit(paragraphs: list[list[str]]):
    text = "\n\n".join(" ".join(words) for words in paragraphs if words)
    for limit in (1, 3, 7):
        parts = split_text(text, limit)
        assert " ".join(parts).split() == text.split()
        assert all(len(part.split()) <= limit for part in parts)
    assert split_text(text, 0) == [text]


def test_long_documents_are_split_and_counted_once(tmp_path: Path):
    text = "One two three. Four five six.\n\nSeven eight. Nine ten eleven."
    (tmp_path / "long.txt").write_text(text)
    corpus = read_corpus(str(tmp_path), max_words=6)
    assert [d.text for d in corpus.documents] == [
        "One two three. Four five six.",
        "Seven eight. Nine ten eleven.",
    ]
    assert [d.id for d in corpus.documents] == ["long.txt#1", "long.txt#2"]
    assert {d.source for d in corpus.documents} == {"long.txt"}
    assert corpus.num_sources == 1


def test_example_data_are_the_world_and_every_answer_can_be_found():
    files = example_rows()
    for name, rows in files.items():
        lines = example_data(name).read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
    index = open_index(str(EXAMPLE_DOCUMENTS))
    texts = {document.id: document.text for document in index.documents}
    rows = files["search_questions.jsonl"] + files["search_questions_test.jsonl"]
    for row in rows:
        assert row["answer"][0] in texts[row["documents"][-1]]
        for query, wanted in zip(row["queries"], row["documents"], strict=True):
            assert wanted in [hit.document.id for hit in index.search(query, 2)]
    train = {row["question"] for row in files["search_questions.jsonl"]}
    assert not train & {row["question"] for row in files["search_questions_test.jsonl"]}


def test_the_table(capsys):
    retrieval_eval.main(retrieval_eval.CLIConfig(limit=20))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "132 documents, 20 questions"
    assert lines[1].split()[:4] == ["method", "R@1", "R@3", "R@5"]
    assert lines[2].split()[:2] == ["bm25", "1.000"]
    for config, message in (
        (retrieval_eval.CLIConfig(dataset="nope.json"), "no file nope.json"),
        (retrieval_eval.CLIConfig(dataset=str(EXAMPLE_DOCUMENTS)), "layout of SQuAD"),
        (retrieval_eval.CLIConfig(method="bm25,magic"), "'magic'"),
    ):
        with pytest.raises((DataError, ConfigurationError), match=message):
            retrieval_eval.main(config)
