"""Self-distillation (SDFT): the teacher is the same model with a demonstration in its prompt.

    python -m recipes.sdft.train
    python -m recipes.sdft.train dataset_path=my.jsonl max_tokens=… reverse=True …
    python -m recipes.sdft.train dataset=sciknoweval sciknoweval_domain=Physics …
    python -m recipes.sdft.train dataset=toolalpaca toolalpaca_data_path=FOLDER …

The student samples an answer to each question. The teacher has the answer of the file in its
prompt, and its token distributions over the sampled answer are the targets (arXiv 2601.19897).
Answers of the example data have three lines: "In short", "Why", "Try". The held-out loss falls from
3.65 to 3.56 nats per token in 45 steps (30 minutes on one CPU core).
"""

from __future__ import annotations

from typing import Any, Literal

import chz

from tinker_cookbook.distillation import sdft
from tinker_cookbook.recipes.sdft.datasets import (
    SciKnowEvalSDFTBuilder,
    SDFTDataset,
    ToolAlpacaSDFTBuilder,
)
from tinker_cookbook.recipes.start import DEMO_MODEL, chat_data, check_one_of, example_data
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(sdft.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "sdft"
    model_name: str = DEMO_MODEL
    dataset: Literal["sciknoweval", "toolalpaca"] | None = chz.field(
        default=None, doc="sciknoweval or toolalpaca, of the Hub; default: demonstrations of a file"
    )
    dataset_path: str | None = chz.field(
        default=None,
        doc="JSONL file with your demonstrations; default: the example data. With dataset: a local "
        "copy of it",
    )
    sciknoweval_domain: str = chz.field(
        default="Chemistry", doc="dataset=sciknoweval: Biology, Chemistry, Material or Physics"
    )
    toolalpaca_data_path: str | None = chz.field(
        default=None, doc="dataset=toolalpaca: a local copy, the same as dataset_path"
    )
    test_path: str | None = chz.field(default=None, doc="JSONL file with held-out conversations")
    test_size: int = chz.field(default=0, doc="Without test_path: conversations to hold out")
    groups_per_batch: int = chz.field(default=8, doc="Questions per step")
    max_tokens: int = 256
    learning_rate: float | None = None  # the recommended rate
    lora_rank: int = 32
    eval_every: int = 15
    save_every: int | None = 15

    def build_dataset(self) -> sdft.DemonstrationBuilder | None:
        """Returns the demonstrations of a file; None: ``load_provider`` has those of the Hub."""
        check_one_of(dataset=self.dataset, test_path=self.test_path, test_size=self.test_size)
        if self.dataset is not None:
            return None
        path, test_path = self.dataset_path, self.test_path
        if path is None:
            path = str(example_data("conversations.jsonl"))
            if not self.test_size:
                test_path = test_path or str(example_data("conversations_test.jsonl"))
        return sdft.DemonstrationBuilder(
            common_config=chat_data(self, self.groups_per_batch, None),
            file_path=path,
            test_file_path=test_path,
            test_size=self.test_size,
            shuffle_seed=self.seed,
        )


async def load_provider(cli: CLIConfig) -> tuple[SDFTDataset, SDFTDataset | None]:
    """Returns the questions of ``dataset`` to train on, and the held-out ones."""
    shared: dict[str, Any] = {
        "model_name_for_tokenizer": cli.model_name,
        "renderer_name": cli.renderer,
        "groups_per_batch": cli.groups_per_batch,
        "group_size": cli.group_size,
        "data_path": cli.toolalpaca_data_path or cli.dataset_path,
    }
    if cli.dataset == "sciknoweval":
        return await SciKnowEvalSDFTBuilder(domain=cli.sciknoweval_domain, **shared)()
    return await ToolAlpacaSDFTBuilder(**shared)()


async def main(config: CLIConfig) -> None:
    """Trains a model on demonstrations that only its teacher sees."""
    data = (None, None) if config.dataset is None else await load_provider(config)
    await sdft.main(config, *data)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
