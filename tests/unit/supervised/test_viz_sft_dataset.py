"""The examples of a dataset in the terminal."""

from __future__ import annotations

import io
import sys

import chz
import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.conversation_file import ChatDataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder
from tinker_cookbook.supervised.viz_sft_dataset import Config, run
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


def dialogue(answer):
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]


@chz.chz
class ThreeAnswers(ChatDatasetBuilder):
    """Three conversations, more than one batch of them where ``num_examples`` is small."""

    def __call__(self):
        rows = [dialogue(answer) for answer in ("First.", "Second.", "Third.")]
        return ChatDataset(self, rows, self.common_config.batch_size), None


PATH = f"{__name__}:ThreeAnswers"


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def answers_in(text):
    return sorted(answer for answer in ("First", "Second", "Third") if answer in text)


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_examples_of_a_builder_by_its_path(tokenizer_folder, capsys, count):
    run(
        Config(
            model_name=tokenizer_folder("smollm2"),
            renderer_name="chatml",
            dataset_path=PATH,
            num_examples=count,
        )
    )
    shown = capsys.readouterr().out
    assert len(answers_in(shown)) == min(count, 3)
    assert shown.count("trained: ") == min(count, 3)


def test_a_builder_with_settings_of_its_own(tokenizer_folder, capsys, write_jsonl):
    path = write_jsonl({"messages": dialogue("First.")}, {"messages": dialogue("Second.")})
    builder = "dataset_builder"
    arguments = [
        f"{builder}=tinker_cookbook.supervised.conversation_file:FromConversationFileBuilder",
        f"{builder}.file_path={path}",
        f"{builder}.common_config.model_name_for_tokenizer={tokenizer_folder('smollm2')}",
        f"{builder}.common_config.renderer_name=chatml",
        f"{builder}.common_config.batch_size=2",
    ]
    run(parse_arguments(Config, arguments))
    assert answers_in(capsys.readouterr().out) == ["First", "Second"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_name": None}, "model_name: got none"),
        ({"dataset_path": "Nothing"}, "dataset_path: got 'Nothing'"),
        (
            {
                "dataset_path": "tinker_cookbook.supervised.conversation_file"
                ":FromConversationFileBuilder"
            },
            "has required settings",
        ),
        ({"num_examples": 0}, "num_examples: got 0"),
    ],
)
def test_invalid_settings_are_refused(tokenizer_folder, settings, message):
    given = {"model_name": tokenizer_folder("smollm2"), "renderer_name": "chatml", **settings}
    with pytest.raises(ConfigurationError, match=message):
        run(Config(**given))
