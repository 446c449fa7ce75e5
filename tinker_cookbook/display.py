"""What a person sees of a run: a training example in colours, and how far the run is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.text import Text

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.terminal import TrainingProgress, get_console

if TYPE_CHECKING:
    import tinker
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from tinker_cookbook.rl.types import Trajectory

__all__ = [
    "TrainingProgress",
    "colorize_example",
    "example_text",
    "format_trajectory",
    "print_example",
    "special_ids",
    "to_ints",
]

CONTEXT_STYLE = "yellow"
TRAINED_STYLE = "green"
PUSHED_DOWN_STYLE = "red"
_SPECIAL = " bold underline"
_UNFINISHED = "\ufffd"

# Tokens before a run that are decoded with it: a sentencepiece decoder drops the space in front of
# the first token it is given.
_LEAD = 4


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of one style; without tokens it is an image of ``length`` tokens."""

    start: int
    tokens: list[int]
    style: str
    length: int


def colorize_example(
    datum: tinker.Datum, tokenizer: PreTrainedTokenizerBase, key: str = "weights"
) -> str:
    """One training example as text with terminal colours: context yellow, trained tokens green.

    Where standard output is no terminal the text has no colours.

    Args:
        datum: The example; position i of its input predicts target i.
        tokenizer: Of the model that is trained.
        key: The entry of ``loss_fn_inputs`` that says what is trained on: ``weights``, for RL
            ``advantages`` or ``mask``. Zero is context; below zero is red.

    Raises:
        DataValidationError: ``key`` or the targets are missing or of another length.
    """
    console = get_console()
    with console.capture() as captured:
        console.print(example_text(datum, tokenizer, key), soft_wrap=True, end="")
    return captured.get()


def example_text(
    datum: tinker.Datum, tokenizer: PreTrainedTokenizerBase, key: str = "weights"
) -> Text:
    """As :func:`colorize_example`, as rich text. Special tokens are bold and underlined."""
    tokens, weights = _sequence(datum, key)
    special = special_ids(tokenizer)
    text = Text()
    held: list[int] = []
    runs = _runs(tokens, weights, special)
    for index, run in enumerate(runs):
        if not run.tokens:
            text.append(f"[image: {run.length} tokens]", style=run.style)
            continue
        start, ids = run.start - len(held), [*held, *run.tokens]
        last = index + 1 == len(runs) or not runs[index + 1].tokens
        held = [] if last else _unfinished_suffix(tokenizer, ids)
        whole = ids[: len(ids) - len(held)]
        lead = [t for t in tokens[max(0, start - _LEAD) : start] if t is not None]
        text.append(_decode_after(tokenizer, lead, whole), style=run.style)
    return text


def print_example(
    datum: tinker.Datum,
    tokenizer: PreTrainedTokenizerBase,
    key: str = "weights",
    title: str = "a training example",
    max_chars: int = 4000,
    console: Console | None = None,
) -> None:
    """Prints a training example in a panel, with what the colours mean and how many tokens each.

    Args:
        datum: As for :func:`colorize_example`.
        tokenizer: As for :func:`colorize_example`.
        key: As for :func:`colorize_example`.
        title: Of the panel.
        max_chars: A longer example is cut in the middle, which is said.
        console: By default the shared one on standard output.
    """
    _, weights = _sequence(datum, key)
    legend = Text()
    counts = [
        (CONTEXT_STYLE, "context", sum(w == 0 for w in weights)),
        (TRAINED_STYLE, "trained", sum(w > 0 for w in weights)),
        (PUSHED_DOWN_STYLE, "pushed down", sum(w < 0 for w in weights)),
    ]
    for style, name, count in counts:
        if count or style != PUSHED_DOWN_STYLE:
            legend.append(f"{name}: {count:,} tokens  ", style=style)
    body = _shorten(example_text(datum, tokenizer, key), max_chars)
    (console or get_console()).print(
        Panel(body, title=title, title_align="left", subtitle=legend, subtitle_align="left")
    )


def to_ints(chunk: tinker.ModelInputChunk, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens of a chunk; an image or audio clip of n tokens is n times the token of
    ``@``."""
    tokens = getattr(chunk, "tokens", None)
    if tokens is not None:
        return list(tokens)
    return [tokenizer.encode("@", add_special_tokens=False)[0]] * chunk.length


def format_trajectory(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, only_last_transition: bool = False
) -> str:
    """Returns an episode as text, turn by turn: what was seen, done and earned.

    Args:
        trajectory: What was played.
        tokenizer: Decodes prompts and answers.
        only_last_transition: Leave out all turns but the last.
    """
    rule = "=" * 60
    turns = list(enumerate(trajectory.transitions))[-1 if only_last_transition else 0 :]
    lines = [rule]
    for number, turn in turns:
        seen = [token for chunk in turn.ob.chunks for token in to_ints(chunk, tokenizer)]
        lines += [
            f"------ Turn {number} ------",
            f"Observation: {_decode(tokenizer, seen)}",
            f"Action: {_decode(tokenizer, list(turn.ac.tokens))}",
            f"Reward: {turn.reward}",
            f"Episode done: {turn.episode_done}",
            f"Metrics: {turn.metrics}",
            "-" * 60,
        ]
    return "\n".join([*lines, rule, ""])


def _sequence(datum: tinker.Datum, key: str) -> tuple[list[int | None], list[float]]:
    """Returns the tokens as trained, ``None`` for those of images, and the weight of each.

    The first input token is never predicted; target i stands at place i + 1.
    """
    inputs: list[int | None] = []
    for chunk in datum.model_input.chunks:
        tokens = getattr(chunk, "tokens", None)
        inputs.extend(tokens if tokens is not None else [None] * chunk.length)
    weights = _row(datum, key, len(inputs))
    targets = _row(datum, "target_tokens", len(inputs))
    following = [*inputs[1:], 0]
    shown = [
        None if after is None else int(target)
        for target, after in zip(targets, following, strict=True)
    ]
    return [*inputs[:1], *shown], [0.0, *weights]


def _row(datum: tinker.Datum, key: str, length: int) -> list[float]:
    if key not in datum.loss_fn_inputs:
        known = ", ".join(sorted(datum.loss_fn_inputs)) or "nothing"
        raise DataValidationError(f"the datum has no loss_fn_inputs[{key!r}]; it has {known}")
    values = datum.loss_fn_inputs[key].to_numpy()
    if values.ndim != 1 or len(values) != length:
        raise DataValidationError(
            f"loss_fn_inputs[{key!r}] has shape {tuple(values.shape)}; the preview needs one value "
            f"for each of the {length} input tokens"
        )
    return values.tolist()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the tokens that are no text: those marked special, and tags such as ``<think>``.

    A tokenizer of user code may know of none.
    """
    added = {
        index
        for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special or str(token).startswith("<")
    }
    return added | set(getattr(tokenizer, "all_special_ids", ()))


def _runs(tokens: list[int | None], weights: list[float], special: set[int]) -> list[_Run]:
    def style(place: int) -> tuple[str, bool]:
        weight, token = weights[place], tokens[place]
        colour = CONTEXT_STYLE if weight == 0 else TRAINED_STYLE
        colour = PUSHED_DOWN_STYLE if weight < 0 else colour
        return colour + (_SPECIAL if token in special else ""), token is None

    runs: list[_Run] = []
    for (name, _), places in groupby(range(len(tokens)), key=style):
        run = list(places)
        ids = [token for token in tokens[run[0] : run[-1] + 1] if token is not None]
        runs.append(_Run(run[0], ids, name, len(run)))
    return runs


def _unfinished_suffix(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Returns the last tokens whose bytes end in the middle of a character (at most 4 bytes
    long)."""
    for held in range(min(4, len(ids) + 1)):
        kept = ids[: len(ids) - held]
        if not kept or not _decode(tokenizer, kept).endswith(_UNFINISHED):
            return ids[len(ids) - held :]
    return []


def _decode_after(tokenizer: PreTrainedTokenizerBase, lead: list[int], ids: list[int]) -> str:
    before = _decode(tokenizer, lead) if lead else ""
    text = _decode(tokenizer, [*lead, *ids])
    return text[len(before) :] if text.startswith(before) else _decode(tokenizer, ids)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _shorten(text: Text, max_chars: int) -> Text:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    cut = Text(f"\n… {len(text) - 2 * half:,} characters …\n", style="dim")
    return text[:half] + cut + text[-half:]
