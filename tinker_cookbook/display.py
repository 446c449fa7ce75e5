"""Terminal output: training examples in colours, episodes as text."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.panel import Panel
from rich.text import Text

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.terminal import TrainingProgress, get_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "TrainingProgress",
    "colorize_example",
    "decode_after",
    "example_text",
    "format_trajectory",
    "print_example",
    "special_ids",
    "to_ints",
]

CONTEXT_STYLE = "yellow"
TRAINED_STYLE = "green"
PUSHED_DOWN_STYLE = "red"

LEAD = 4
"""Number of preceding tokens that ``decode_after`` needs."""


def colorize_example(
    datum: tinker.Datum, tokenizer: PreTrainedTokenizerBase, key: str = "weights"
) -> str:
    """Returns a training example in terminal colours: context yellow, trained tokens green.

    If standard output is not a terminal, the text has no colours. ``key`` is the entry of
    ``loss_fn_inputs`` with the weight of each target: ``weights``, or for RL ``advantages`` or
    ``mask``. A zero weight is context; a negative one is red.

    Raises:
        DataValidationError: ``key`` or the targets are missing or have the wrong length.
    """
    # Capture from the console, which omits colours if the output is not a terminal.
    console = get_console()
    with console.capture() as captured:
        console.print(example_text(datum, tokenizer, key), soft_wrap=True, end="")
    return captured.get()


def example_text(
    datum: tinker.Datum, tokenizer: PreTrainedTokenizerBase, key: str = "weights"
) -> Text:
    """Returns :func:`colorize_example` as rich text. Special tokens are bold and underlined."""
    tokens, weights = _sequence(datum, key)
    special = special_ids(tokenizer)

    def style(position: int) -> tuple[str, bool]:
        weight, token = weights[position], tokens[position]
        color = CONTEXT_STYLE if weight == 0 else TRAINED_STYLE
        color = PUSHED_DOWN_STYLE if weight < 0 else color
        return color + (" bold underline" if token in special else ""), token is None

    text = Text()
    # Decode neighbours with the same style together: a character may span several tokens.
    runs = [(key, list(run)) for key, run in groupby(range(len(tokens)), key=style)]
    held: list[int] = []  # tokens of an unfinished character, decoded with the next run
    for index, ((name, is_image), positions) in enumerate(runs):
        if is_image:
            text.append(f"[image: {len(positions)} tokens]", style=name)
            continue
        start = positions[0] - len(held)
        ids = [token for token in tokens[start : positions[-1] + 1] if token is not None]
        # If a character is split between two colours, show it in the run that completes it.
        last = index + 1 == len(runs) or runs[index + 1][0][1]
        held = [] if last else _unfinished_suffix(tokenizer, ids)
        lead = [t for t in tokens[max(0, start - LEAD) : start] if t is not None]
        text.append(decode_after(tokenizer, lead, ids[: len(ids) - len(held)]), style=name)
    return text


def print_example(
    datum: tinker.Datum,
    tokenizer: PreTrainedTokenizerBase,
    key: str = "weights",
    title: str = "a training example",
    max_chars: int = 4000,
    console: Console | None = None,
) -> None:
    """Prints a training example in a panel, with the meaning and token count of each colour.

    The middle of an example with more than ``max_chars`` is omitted. For ``key`` see
    :func:`colorize_example`.
    """
    _, weights = _sequence(datum, key)
    legend = Text()
    for style, name, count in (
        (CONTEXT_STYLE, "context", sum(w == 0 for w in weights)),
        (TRAINED_STYLE, "trained", sum(w > 0 for w in weights)),
        (PUSHED_DOWN_STYLE, "pushed down", sum(w < 0 for w in weights)),
    ):
        # Only RL has negative weights, so omit the entry for other examples.
        if count or style != PUSHED_DOWN_STYLE:
            legend.append(f"{name}: {count:,} tokens  ", style=style)
    body = example_text(datum, tokenizer, key)
    if len(body) > max_chars:
        # Keep both ends: the start of the prompt and the end of the response.
        half = max_chars // 2
        cut = Text(f"\n… {len(body) - 2 * half:,} characters …\n", style="dim")
        body = body[:half] + cut + body[-half:]
    (console or get_console()).print(
        Panel(body, title=title, title_align="left", subtitle=legend, subtitle_align="left")
    )


def to_ints(chunk: tinker.ModelInputChunk, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens of a chunk; n tokens of an image or audio clip become n times ``@``."""
    tokens = getattr(chunk, "tokens", None)
    if tokens is not None:
        return list(tokens)
    return [tokenizer.encode("@", add_special_tokens=False)[0]] * chunk.length


def format_trajectory(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, only_last_transition: bool = False
) -> str:
    """Returns an episode as text: observation, action, reward and metrics of each turn."""
    rule = "=" * 60
    turns = list(enumerate(trajectory.transitions))[-1 if only_last_transition else 0 :]
    lines = [rule]
    for number, turn in turns:
        observation = [token for chunk in turn.ob.chunks for token in to_ints(chunk, tokenizer)]
        lines += [
            f"------ Turn {number} ------",
            f"Observation: {_decode(tokenizer, observation)}",
            f"Action: {_decode(tokenizer, turn.ac.tokens)}",
            f"Reward: {turn.reward}",
            f"Episode done: {turn.episode_done}",
            f"Metrics: {turn.metrics}",
            "-" * 60,
        ]
    return "\n".join([*lines, rule, ""])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of tokens marked special, and of tags such as ``<think>``."""
    added = {
        index
        for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special or str(token).startswith("<")
    }
    return added | set(getattr(tokenizer, "all_special_ids", ()))


def decode_after(tokenizer: Any, lead: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of ``ids`` after the tokens ``lead``.

    A sentencepiece decoder drops the space before its first token. So ``lead`` is decoded too, and
    its text is removed again.
    """
    before = _decode(tokenizer, lead) if lead else ""
    text = _decode(tokenizer, [*lead, *ids])
    return text[len(before) :] if text.startswith(before) else _decode(tokenizer, ids)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    ids = list(ids)
    try:
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    except TypeError:  # a custom tokenizer with ``decode(tokens)`` only
        text = tokenizer.decode(ids)
    return text if isinstance(text, str) else "".join(text)


def _sequence(datum: tinker.Datum, key: str) -> tuple[list[int | None], list[float]]:
    """Returns the tokens of an example (``None`` for images) and their weights."""
    inputs: list[int | None] = []
    # Images get one entry per position, so that weights and tokens align.
    for chunk in datum.model_input.chunks:
        tokens = getattr(chunk, "tokens", None)
        inputs.extend(tokens if tokens is not None else [None] * chunk.length)
    rows: list[list[float]] = []
    for name in (key, "target_tokens"):
        if name not in datum.loss_fn_inputs:
            known = ", ".join(sorted(datum.loss_fn_inputs)) or "nothing"
            raise DataValidationError(f"the datum has no loss_fn_inputs[{name!r}]; it has {known}")
        values = datum.loss_fn_inputs[name].to_numpy()
        if values.ndim != 1 or len(values) != len(inputs):
            raise DataValidationError(
                f"loss_fn_inputs[{name!r}] has shape {tuple(values.shape)}; the preview needs one "
                f"value for each of the {len(inputs)} input tokens"
            )
        rows.append(values.tolist())
    weights, targets = rows
    # The first input token is never predicted; target i is the token at position i + 1.
    shown = [
        None if after is None else int(target)
        for target, after in zip(targets, [*inputs[1:], 0], strict=True)
    ]
    return [*inputs[:1], *shown], [0.0, *weights]


def _unfinished_suffix(tokenizer: Any, ids: list[int]) -> list[int]:
    """Returns the last tokens if their bytes end inside a character, which has at most 4 bytes."""
    for held in range(min(4, len(ids) + 1)):
        kept = ids[: len(ids) - held]
        if not kept or not _decode(tokenizer, kept).endswith("\ufffd"):
            return ids[len(ids) - held :]
    return []
