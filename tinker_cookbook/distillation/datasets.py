"""Datasets for distillation: prompts without reference answers, and a teacher for each dataset."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import (
    CheckpointError,
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
    nearest,
)
from tinker_cookbook.preference.reference import reference_client
from tinker_cookbook.renderers import (
    Content,
    Message,
    Renderer,
    check_renderer_name,
    get_renderer,
    get_text_content,
    normalize_messages,
)
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.run.weights import check_weights
from tinker_cookbook.run.weights_paths import check_tinker_path, weights_field
from tinker_cookbook.supervised.conversation_row import data_error
from tinker_cookbook.supervised.hf_datasets import load_hf_dataset
from tinker_cookbook.supervised.json_files import file_rows
from tinker_cookbook.supervised.row_images import has_images, with_images
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from tinker_cookbook.training.config import TrainingConfig, at_least, number, setting
from tinker_cookbook.training.session import TrainingSession

logger = logging.getLogger(__name__)

ANSWER = "{answer}"

HUB_PROMPTS: Mapping[str, str] = {
    "deepmath": "zwhe99/DeepMath-103K",
    "tulu3": "allenai/tulu-3-sft-mixture",
}
"""Name of a prompt set -> its Hub dataset, of which the ``train`` split is used."""

_EXPECTED = '{"prompt": "…"}, or {"messages": [{"role": "user", "content": "…"}, …]}'


@chz.chz
class TeacherConfig:
    """Teacher: a base model, optional saved weights, and its prompt.

    By default, the teacher scores exactly the student's tokens. The last four settings give it a
    separate prompt (on-policy distillation only).
    """

    base_model: str = chz.field(doc="Hub name or local folder of the teacher's base model")
    load_checkpoint_path: str | None = weights_field("sampler_weights", "Weights of the teacher")
    renderer_name: str | None = setting(None, "Chat format of the teacher; default: the student's")
    system_prompt: str | None = setting(None, "System prompt of the teacher only")
    convo_prefix: list[Message] | None = setting(
        None, "Messages, such as examples, before the conversation; for the teacher only"
    )
    answer_hint: str | None = setting(
        None,
        f"Text after the last user message, for the teacher only; {ANSWER} in it is the "
        "problem's reference answer",
    )

    @property
    def has_own_prompt(self) -> bool:
        """Whether the teacher's messages differ from the student's."""
        return bool(self.system_prompt or self.convo_prefix or self.answer_hint)

    def check(self, where: str) -> None:
        """Raises ``ConfigurationError`` for invalid settings."""
        check_tinker_path(
            f"{where}.load_checkpoint_path",
            self.load_checkpoint_path,
            "sampler_weights",
            "the teacher's run",
        )
        if self.renderer_name is not None:
            check_renderer_name(self.renderer_name)


async def open_teacher(
    session: TrainingSession, config: TrainingConfig, teacher: TeacherConfig, where: str
) -> SamplingClient:
    """Returns a client of the teacher's weights; ``where`` names its settings in errors.

    Raises ``CheckpointError`` if the weights are missing or belong to another base model.
    """
    path = teacher.load_checkpoint_path
    if path is not None:
        try:
            # Check here, so that the error names the teacher's setting and not the run's.
            model = SimpleNamespace(model_name=teacher.base_model)
            await check_weights(session.connection.service, path, model)
        except CheckpointError as error:
            raise CheckpointError(f"{where}.load_checkpoint_path: {error}") from error
    return await reference_client(session, config, path or teacher.base_model)


@chz.chz
class DistillationDatasetConfig:
    """Dataset, and the teacher that scores the student's answers."""

    dataset_builder: RLDatasetBuilder = chz.field(doc="Prompts, or problems with rewards")
    teacher_config: TeacherConfig = chz.field(doc="Teacher of this dataset")
    groups_per_batch: int = chz.field(
        validator=at_least(1), doc="Number of groups of this dataset in a batch"
    )


class CompositeDataset(RLDataset):
    """Concatenates batch i of all datasets; ends with the shortest dataset.

    ``groups_per_batch_list`` has each dataset's groups per batch; its last batch may be smaller.
    """

    def __init__(self, datasets: Sequence[RLDataset], groups_per_batch_list: Sequence[int]) -> None:
        if not datasets or len(datasets) != len(groups_per_batch_list):
            raise ConfigurationError(
                f"dataset_configs: got {len(datasets)} datasets and {len(groups_per_batch_list)} "
                "numbers of groups, expected one for each dataset, and at least one dataset"
            )
        self.datasets = list(datasets)
        self.groups_per_batch_list = list(groups_per_batch_list)

    def data_sources(self) -> dict[str, Any]:
        """Returns the datasets."""
        return {f"dataset_configs[{i}]": part for i, part in enumerate(self.datasets)}

    def __len__(self) -> int:
        # End with the shortest dataset, so that every batch has groups of every teacher.
        return min(len(dataset) for dataset in self.datasets)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index``, in the order of the datasets."""
        return [group for part in self.get_parts(index) for group in part]

    def get_parts(self, index: int) -> list[list[EnvGroupBuilder]]:
        """Returns the groups of batch ``index``, one list for each dataset."""
        parts = []
        for i, (dataset, expected) in enumerate(
            zip(self.datasets, self.groups_per_batch_list, strict=True)
        ):
            groups = list(dataset.get_batch(index))
            # Only the last batch of a dataset may be smaller.
            if len(groups) > expected or (len(groups) < expected and index < len(dataset) - 1):
                raise ConfigurationError(
                    f"dataset_configs[{i}].groups_per_batch: got {expected}, but batch {index} of "
                    f"its dataset has {len(groups)} groups; expected the same number in both"
                )
            parts.append(groups)
        return parts

    def set_epoch(self, seed: int) -> None:
        """Reorders every dataset."""
        for dataset in self.datasets:
            dataset.set_epoch(seed)


class PromptOnlyEnv(ProblemEnv):
    """Single-turn environment without a reward: the teacher is the only signal."""

    def __init__(
        self, prompt: Content, renderer: Renderer, convo_prefix: Sequence[Message] | None = None
    ) -> None:
        super().__init__(renderer, convo_prefix, format_coef=0.0)
        self.prompt = prompt

    def get_question(self) -> Content:
        """Returns the prompt."""
        return self.prompt

    def check_answer(self, sample_str: str) -> bool:
        """Returns False: there is no reward."""
        return False

    def check_format(self, sample_str: str) -> bool:
        """Returns True for any answer."""
        return True

    def get_reference_answer(self) -> str:
        """Returns an empty text: there is no reference answer."""
        return ""

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Ends the episode without grading."""
        return StepResult.final(0.0, self.stop_condition)


class PromptOnlyDataset(ProblemDataset[list[Message]]):
    """Batches of prompts without rewards: user texts, or conversations that end with the user.

    ``convo_prefix`` is put before each prompt, also for the student. Prompts of more than
    ``max_prompt_tokens``, rendered with it, are skipped. ``dataset_name`` tags the metrics.
    ``tokenizer`` is not used, since the renderer has one.
    """

    def __init__(
        self,
        prompts: Sequence[str | list[Message]],
        batch_size: int,
        group_size: int,
        renderer: Renderer,
        tokenizer: Tokenizer | None = None,
        max_prompt_tokens: int | None = None,
        convo_prefix: list[Message] | None = None,
        dataset_name: str = "prompts",
    ) -> None:
        self.group_size, self.renderer, self.dataset_name = group_size, renderer, dataset_name
        self.convo_prefix = convo_prefix or []
        talks = [[Message(role="user", content=p)] if isinstance(p, str) else p for p in prompts]
        # Filter before forming batches, so that skipped prompts leave no gaps.
        talks = fitting(talks, renderer, self.convo_prefix, max_prompt_tokens, dataset_name)
        super().__init__(talks, self._group, batch_size)

    def _group(self, prompt: list[Message]) -> EnvGroupBuilder:
        # The last message is the question, the others are context.
        prefix = [*self.convo_prefix, *prompt[:-1]]
        content = prompt[-1]["content"] if has_images(prompt[-1:]) else get_text_content(prompt[-1])
        env = partial(PromptOnlyEnv, content, self.renderer, prefix)
        return ProblemGroupBuilder(env, self.group_size, self.dataset_name)


def load_deepmath_prompts(split: Literal["train", "test"] = "train") -> list[str] | None:
    """Loads the questions of DeepMath from the Hub; logs a warning and returns None on failure."""
    return _first_questions("deepmath", split)


def load_tulu3_prompts() -> list[str] | None:
    """Loads the first user message of each Tulu 3 conversation; logs a warning and returns None on
    failure."""
    return _first_questions("tulu3", "train")


def _first_questions(name: str, split: str) -> list[str] | None:
    try:
        prompts = load_prompts(name, split=split)
    except DataError as error:
        logger.warning("%s: the prompts of split %r do not load: %s", name, split, error)
        return None
    firsts = (next(m for m in prompt if m["role"] == "user") for prompt in prompts)
    return [text for text in map(get_text_content, firsts) if text.strip()]


@chz.chz
class PromptOnlyDatasetBuilder(RLDatasetBuilder):
    """Prompts from the Hub or from a local file, without rewards.

    A line of a file is ``{"prompt": "…"}``, or a conversation ``{"messages": […]}``; its prompt is
    everything before the last answer. Both may have images, as in supervised data.
    """

    dataset_name: str = chz.field(doc=f"{', '.join(HUB_PROMPTS)}, or a JSONL file of prompts")
    groups_per_batch: int = chz.field(validator=at_least(1), doc="Prompts per step")
    group_size: int = chz.field(validator=at_least(1), doc="Answers per prompt")
    model_name_for_tokenizer: str = chz.field(doc="Model that has the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    convo_prefix: list[Message] | None = setting(
        None, "Messages before each prompt, also for the student"
    )
    max_prompt_tokens: int | None = number(
        1024, "Skip prompts with more tokens; None: keep all", low=1
    )
    max_prompts: int | None = number(None, "Number of prompts, from the first; None: all", low=1)

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a chat format or dataset that does not exist."""
        check_renderer_name(self.renderer_name)
        name = self.dataset_name
        if name not in HUB_PROMPTS and not Path(name).expanduser().is_file():
            raise ConfigurationError(
                f"dataset_name: got {name!r}, which is not a file (searched from {Path.cwd()}); "
                f"expected {', '.join(HUB_PROMPTS)}, or a JSONL file of lines like {_EXPECTED}"
                f"{nearest(name, HUB_PROMPTS)}"
            )

    async def __call__(self) -> tuple[RLDataset, None]:
        """Reads the prompts; raises ``DataError``, with file and line, for an invalid line."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        prompts = load_prompts(self.dataset_name, self.max_prompts, renderer=renderer)
        prefix = self.convo_prefix or []
        prompts = fitting(prompts, renderer, prefix, self.max_prompt_tokens, self.dataset_name)
        # One metrics tag for all sources: a file path would be a poor name.
        dataset = PromptOnlyDataset(
            prompts, self.groups_per_batch, self.group_size, renderer, convo_prefix=prefix
        )
        return dataset, None


def load_prompts(
    name: str, most: int | None = None, split: str = "train", renderer: Renderer | None = None
) -> list[list[Message]]:
    """Loads up to ``most`` prompts as conversations that end with the user.

    ``name`` is one of ``HUB_PROMPTS``, with its ``split``, or a file (also ``.jsonl.gz``). Raises
    ``DataError`` if the dataset cannot be loaded or, with file and line, for an invalid line and
    for images that ``renderer`` cannot show.
    """
    rows: Iterable[tuple[str, Any]]
    if name in HUB_PROMPTS:
        found = load_hf_dataset(
            HUB_PROMPTS[name],
            split,
            instead="Give your own prompts as a JSONL file instead of its name",
        )
        rows = ((f"{name}, row {i}", found[i]) for i in range(len(found)))
    else:
        rows = file_rows(Path(name).expanduser(), f"lines like {_EXPECTED}")
    prompts: list[list[Message]] = []
    for where, row in itertools.islice(rows, most):
        prompts.append(prompt_of(row, where))
        if renderer is not None and has_images(prompts[-1]):
            with data_error(where):
                renderer.build_generation_prompt(prompts[-1])
    if not prompts:
        raise DataValidationError(f"{name}: got no prompts; expected lines like {_EXPECTED}")
    return prompts


def prompt_of(row: Any, where: str) -> list[Message]:
    """Parses a row as a conversation that ends with the user; ``where`` names it in errors."""
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: got {type(row).__name__}, expected {_EXPECTED}")
    raw: Any = row.get("messages")
    if "messages" not in row:
        text = next((row[name] for name in ("prompt", "question", "problem") if name in row), None)
        if not isinstance(text, str) or not text.strip():
            fields = ", ".join(map(str, row)) or "none"
            raise DataFormatError(
                f"{where}: got {text!r} as prompt and the fields {fields}; expected {_EXPECTED}"
            )
        raw = [{"role": "user", "content": text}]
    if not isinstance(raw, list):
        raise DataFormatError(f"{where}: messages: got {raw!r}, expected a list as in {_EXPECTED}")
    with data_error(where):
        messages = normalize_messages(with_images(row, raw))
    # The student answers the last user message: drop everything after it.
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users or not get_text_content(messages[users[-1]]).strip():
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise DataFormatError(
            f"{where}: got messages of roles {roles}, expected a user message with text, which "
            "the student can answer"
        )
    return messages[: users[-1] + 1]


def fitting(
    prompts: Sequence[list[Message]],
    renderer: Renderer,
    prefix: Sequence[Message],
    max_tokens: int | None,
    name: str,
) -> list[list[Message]]:
    """Returns the prompts of at most ``max_tokens`` rendered tokens; logs the number of others.

    Raises ``DataValidationError`` if none fits.
    """
    # Skip long prompts, because a truncated prompt has another meaning.
    if max_tokens is None or not prompts:
        return list(prompts)
    # A token has at least one byte, so most prompts of a large dataset need no rendering. The
    # margin of 8 tokens covers spaces that tokenizers insert.
    around = renderer.build_generation_prompt([*prefix, Message(role="user", content="x")]).length
    lengths: list[int] = []
    for prompt in prompts:
        bound = around + 8 + len(get_text_content(prompt[-1]).encode())
        proven = len(prompt) == 1 and bound <= max_tokens and not has_images(prompt)
        rendered = None if proven else renderer.build_generation_prompt([*prefix, *prompt])
        lengths.append(0 if rendered is None else rendered.length)
    kept = [prompt for prompt, n in zip(prompts, lengths, strict=True) if n <= max_tokens]
    if not kept:
        raise DataValidationError(
            f"max_prompt_tokens: got {max_tokens}, but the shortest of {len(prompts)} prompts in "
            f"{name} has {min(lengths)} tokens for the student; raise it"
        )
    if len(kept) < len(prompts):
        logger.warning(
            "%s: %d of %d prompts have more than max_prompt_tokens=%d (the longest has %d) and are "
            "left out",
            name,
            len(prompts) - len(kept),
            len(prompts),
            max_tokens,
            max(lengths),
        )
    return kept
