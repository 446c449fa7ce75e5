"""Lists the models of the hosted service with the settings recommended for each.

python -m tinker_cookbook.models
python -m tinker_cookbook.models model_name=Qwen/Qwen3-8B,/models/my-model lora_rank=8
"""

from __future__ import annotations

import logging

import chz
from rich.console import Console
from rich.table import Table

from tinker_cookbook.hyperparam_utils import get_lora_param_count, get_lr
from tinker_cookbook.model_info import get_model_attributes, resolve_renderer_name
from tinker_cookbook.model_table import LINEUP
from tinker_cookbook.training.estimate import short_count
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


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
    # The list marks rates whose exponent was assumed, so the warning for each is left out.
    logging.getLogger("tinker_cookbook.hyperparam_utils").setLevel(logging.ERROR)
    caption = "Rates with * have the exponent of Llama models: check them by a sweep."
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for column in ("model", "kind", "renderer"):
        table.add_column(column, overflow="fold")
    for column in ("learning rate", f"adapter, rank {config.lora_rank}"):
        # Numbers stay whole where the terminal is narrow; names go on in a second line.
        table.add_column(column.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for name in names:
        table.add_row(*_row(name.strip(), config.lora_rank))
    Console().print(table)


def _row(name: str, rank: int) -> tuple[str, ...]:
    attributes = get_model_attributes(name)
    inputs = {"images": attributes.is_vl, "audio": attributes.is_audio_in}
    kind = [
        "chat" if attributes.is_chat else "base",
        *(word for word, has in inputs.items() if has),
    ]
    was_fitted = any(family in name.lower() for family in ("llama", "qwen"))
    rate = f"{get_lr(name):.2e}{'' if was_fitted else '*'}"
    renderer, _ = resolve_renderer_name(name, None)
    return name, ", ".join(kind), renderer, rate, short_count(get_lora_param_count(name, rank))


if __name__ == "__main__":
    run_entrypoint(main)
