"""Trains a Llama of at most a million parameters from random weights on examples of one task.

Recipes whose task is too hard for the demo model train such a model first. Then reinforcement
learning can improve it, and learning curves take minutes on a CPU core.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.imports import torch
from tinker_cookbook.utils.terminal import print_line

R = TypeVar("R")
Row = tuple[Sequence[int], Sequence[float]]
"""Tokens of an example, and the loss weight of each."""
_LOG_EVERY = 50
"""Steps between printed losses; also the number of losses in the mean."""


@chz.chz
class TinyModelSettings:
    """Settings that all tiny models have; a recipe's class has its defaults and its examples."""

    output: str = chz.field(doc="Folder of the model; it must be empty or absent")
    steps: int = number(400, "Training steps", low=1)
    batch_size: int = number(32, "Examples per step", low=1)
    learning_rate: float = peak_rate(3e-3, "Peak learning rate")
    hidden_size: int = number(64, "Width", low=4)
    num_layers: int = number(2, "Layers", low=1)
    seed: int = chz.field(default=0, doc="Seed of examples and weights")


@contextmanager
def new_folder(output: str, name: str = "output") -> Iterator[Path]:
    """Yields a folder that is renamed to ``output`` at the end; after an error it is deleted.

    Raises:
        ConfigurationError: ``output``, the setting ``name``, exists and is not an empty folder.
    """
    folder = Path(output).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{name}: {folder} is not empty; expected a new folder")
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # of a killed process with the same id
    part.mkdir(parents=True)
    try:
        yield part
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def make_model_once(output: str, make: Callable[[], None]) -> None:
    """Calls ``make``, which writes the model to the folder ``output``, unless the folder has one;
    another process that needs the model at the same time waits."""
    from filelock import FileLock

    folder = Path(output)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "config.json").exists():
            make()


def word_tokenizer(
    texts: Iterable[str], pattern: str, folder: Path, special: Sequence[str], **roles: Any
) -> Any:
    """Writes a tokenizer with one token for each match of ``pattern`` in ``texts``.

    Args:
        special: Its first tokens; ``<unk>`` is one of them.
        roles: Arguments of ``PreTrainedTokenizerFast``, such as ``eos_token``.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts for word in re.findall(pattern, text)})
    vocabulary = {word: index for index, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **roles)
    fast.save_pretrained(folder)
    return fast


def train(
    settings: TinyModelSettings, rows: Sequence[Row], tokenizer: Any, folder: Path, **llama: Any
) -> float:
    """Trains a model on ``rows`` and writes it; returns the mean loss of the last steps in nats.

    Args:
        llama: Arguments of ``LlamaConfig`` that differ from the defaults here.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(settings.seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": 3 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | llama)))
    loss = fit(settings, rows, partial(_loss, model), model)
    model.save_pretrained(folder)
    return loss


def fit(
    settings: TinyModelSettings,
    rows: Sequence[R],
    loss_of: Callable[[Sequence[R]], torch.Tensor],
    model: torch.nn.Module,
) -> float:
    """Trains all weights of ``model`` on batches of ``rows``; returns the mean loss of the last
    steps in nats."""
    import torch

    rate = settings.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=settings.steps)
    rng, losses, started = random.Random(settings.seed), list[float](), time.monotonic()
    for step in range(1, settings.steps + 1):
        loss = loss_of(rng.choices(rows, k=settings.batch_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses = [*losses, loss.item()][-_LOG_EVERY:]
        if step % _LOG_EVERY == 0 or step == settings.steps:
            mean = sum(losses) / len(losses)
            seconds = time.monotonic() - started
            print_line(f"step {step}/{settings.steps}  loss {mean:.3f}  {seconds:.0f} s")
    return sum(losses) / len(losses)


def _loss(model: Any, batch: Sequence[Row]) -> Any:
    """Returns the weighted mean loss of a batch."""
    import torch

    longest = max(len(tokens) for tokens, _ in batch)
    # Padding is on the right, where no token of an example sees it, and has no weight.
    tokens_BL = torch.tensor([[*row, *[0] * (longest - len(row))] for row, _ in batch])
    weights_BL = torch.tensor([[*row, *[0.0] * (longest - len(row))] for _, row in batch])
    trained_BL = weights_BL[:, 1:] != 0
    # Only positions with a weight go through the head.
    hidden_TD = model.model(tokens_BL)[0][:, :-1][trained_BL]
    losses_T = torch.nn.functional.cross_entropy(
        model.lm_head(hidden_TD), tokens_BL[:, 1:][trained_BL], reduction="none"
    )
    weights_T = weights_BL[:, 1:][trained_BL]
    return (losses_T * weights_T).sum() / weights_T.sum()
