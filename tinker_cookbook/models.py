"""Lists the models of the hosted service with the settings recommended for each.

python -m tinker_cookbook.models
python -m tinker_cookbook.models model_name=Qwen/Qwen3-8B,/models/my-model lora_rank=8
"""

from __future__ import annotations

import logging
import shutil
import sys

import chz

from tinker_cookbook.hyperparam_utils import get_lora_param_count, get_lr
from tinker_cookbook.model_info import get_model_attributes, resolve_renderer_name
from tinker_cookbook.model_table import LINEUP
from tinker_cookbook.training.estimate import short_count
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

COLUMNS = ("model", "kind", "renderer", "size", "rate")
CAPTION = """\
rate: learning rate of supervised training (RL: a quarter, DPO: a tenth);
      with *, by the exponent of Llama models: check it by a sweep
rank N: parameters of an adapter of this rank
size: 30B-A3B is a mixture of experts with 30B parameters, 3B of them active"""


@chz.chz
class ModelsConfig:
    """Settings of the list."""

    model_name: str | None = chz.field(
        default=None,
        doc="Names or folders, comma-separated; default: the models of the hosted service",
    )
    lora_rank: int = chz.field(default=32, doc="Rank of the adapter whose size is shown")


def main(config: ModelsConfig) -> None:
    """Prints the list."""
    names = list(LINEUP) if config.model_name is None else config.model_name.split(",")
    rows = [row_of(name.strip(), config.lora_rank) for name in names]
    # A program that reads the list, such as grep, gets each model in one line.
    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= 130
    width = max(len(row[0]) for row in rows)
    for name, *facts in [(*COLUMNS, f"rank {config.lora_rank}"), *rows]:
        start = f"{name:{width}}" if wide else f"{name}\n"
        print(start, "{:20} {:24} {:>10} {:>10} {:>7}".format(*facts))
    print(CAPTION)


def row_of(name: str, rank: int) -> tuple[str, ...]:
    """Returns the cells of ``COLUMNS`` for a model, and the parameters of an adapter."""
    # The list marks rates whose exponent was assumed, so the warning for each is left out.
    logging.getLogger("tinker_cookbook.hyperparam_utils").setLevel(logging.ERROR)
    attributes = get_model_attributes(name)
    inputs = {"images": attributes.is_vl, "audio": attributes.is_audio_in}
    kind = [
        "chat" if attributes.is_chat else "base",
        *(word for word, has in inputs.items() if has),
    ]
    was_fitted = any(family in name.lower() for family in ("llama", "qwen"))
    rate = f"{get_lr(name):.2e}{'' if was_fitted else '*'}"
    renderer, _ = resolve_renderer_name(name, None)
    adapter = short_count(get_lora_param_count(name, rank))
    return name, ", ".join(kind), renderer, attributes.size_str, rate, adapter


if __name__ == "__main__":
    run_entrypoint(main)
