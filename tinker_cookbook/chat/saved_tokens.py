"""Record of the tokens of a saved conversation, in the format of runs (``docs/record.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinker_cookbook.chat.answers import Answer
from tinker_cookbook.record.episodes import RecordedGroup, episode_of_answers, turn_table
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.vocabulary import write_vocabulary
from tinker_cookbook.record.write import write_table
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.sampling_model import SamplingModel


def write_tokens(
    folder: Path,
    number: int,
    messages: Sequence[Message],
    answers: Sequence[Answer],
    model: SamplingModel,
) -> None:
    """Writes conversation ``number`` to ``folder``: a row for each of its ``answers``.

    Raises:
        TrainingError: The folder cannot be written.
    """
    episode = episode_of_answers([(one.prompt, one.sampled) for one in answers], messages)
    group = RecordedGroup(0, TrajectoryGroup([episode], [0.0], [{}]), [model.name])
    table = turn_table([group], images=ImageFiles(folder))
    write_table(folder, number, "chat", table, "full", {"model": model.name})
    write_vocabulary(folder, model.renderer.tokenizer)
