"""Supervised fine-tuning as a short script: no dataset classes, no session, just the loop.

    python -m recipes.sl_loop model_name=… dataset_path=my.jsonl log_path=…
    python -m recipes.sl_loop learning_rate=0.001 log_path=/tmp/sft-lr-sweep/lr-0.001

This recipe is for people who write their own loop, and for sweeps. Each row of ``metrics.jsonl``
has ``progress`` and ``train_mean_nll``, and ``config.json`` has the settings. ``recipes/sl_basic``
does the same with evaluations, samples and more settings. After six steps at a rate of 1e-3
``train_mean_nll`` is 2.86; a run takes 3:47 minutes on one CPU core.
"""

from __future__ import annotations

import logging
import random
import time

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.backends import TrainingClient
from tinker_cookbook.backends.connect import leave_torch_out
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.own_loop import LoopSettings, run_own_loop, save_step
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.run import ml_log
from tinker_cookbook.supervised.common import compute_token_nll, count_loss_tokens
from tinker_cookbook.supervised.conversation_file import naming, read_conversations
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import check_model, check_settings, number, peak_rate
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker

logger = logging.getLogger(__name__)
EXAMPLES = example_data("conversations.jsonl")


@chz.chz
class Config(LoopSettings):
    """Settings of the loop."""

    dataset_path: str = chz.field(default=str(EXAMPLES), doc="JSONL file of conversations")
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="Which messages are trained on"
    )
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which examples are cut; default: the model's context"
    )
    batch_size: int = number(8, "Conversations per step", low=1)
    learning_rate: float | None = peak_rate(None, "Default: the recommended rate for the model")
    num_epochs: int = number(1, "Passes over the training data", low=1)
    max_steps: int | None = number(None, "Number of steps; overrides num_epochs")
    log_path: str = chz.field(
        default=str(cli_utils.default_log_path("sl-loop")), doc="Folder of this run"
    )


def resolve(config: Config) -> Config:
    """Checks the settings and fills in defaults of the model, so that the log contains them."""
    check_model(config)
    learning_rate = config.learning_rate
    if learning_rate is None:
        learning_rate = hyperparam_utils.get_lr(config.model_name, is_lora=config.lora_rank > 0)
    config = chz.replace(
        config,
        renderer_name=model_info.resolve_renderer_name(
            config.model_name, config.renderer_name, config.log_path
        )[0],
        learning_rate=learning_rate,
        max_length=model_info.resolve_max_length(config.model_name, config.max_length),
    )
    check_settings(config)
    if config.max_steps == 0:
        raise ConfigurationError(
            "max_steps: got 0, expected at least 1: this loop evaluates nothing; to evaluate "
            "without training use recipes.sl_basic max_steps=0"
        )
    return config


def load_data(config: Config) -> list[tinker.Datum]:
    """Returns the conversations as datums; those without a trained token are dropped."""
    renderer = get_renderer(str(config.renderer_name), get_tokenizer(config.model_name))
    with naming("dataset_path"):
        found = read_conversations(
            config.dataset_path, config.train_on_what, lambda: renderer, None, config.max_length
        )
    rows = [
        conversation_to_datum(row, renderer, config.max_length, config.train_on_what)
        for row in found
    ]
    # Without a trained token an example would take up room in a batch without any gradient.
    data = [datum for datum in rows if count_loss_tokens(datum)]
    if len(data) < len(rows):
        logger.warning(
            "%d of %d conversations were dropped: max_length=%s cuts off all that is trained on",
            len(rows) - len(data),
            len(rows),
            config.max_length,
        )
    if not data:
        raise DataValidationError(
            f"{config.dataset_path}: nothing is left to train on with max_length="
            f"{config.max_length}; expected one conversation at least: raise max_length"
        )
    if config.batch_size > len(data):
        raise ConfigurationError(
            f"batch_size: got {config.batch_size}, expected at most {len(data)}, the number of "
            f"conversations to train on in {config.dataset_path}"
        )
    return data


def main(config: Config) -> None:
    """Fine-tunes a model, one step after the other."""
    config = resolve(config)
    # Where a server computes, a run without torch takes 90 MB instead of 300. If your own code
    # needs torch here, delete this line.
    leave_torch_out(config.backend, config.base_url)
    need = Need("loss:cross_entropy", "this loop")
    run_own_loop(config, load_data, count_steps, train, [need])


def count_steps(config: Config, data: list[tinker.Datum]) -> int:
    """Returns the number of steps of the whole run."""
    return config.max_steps or steps_per_epoch(config, data) * config.num_epochs


def steps_per_epoch(config: Config, data: list[tinker.Datum]) -> int:
    """Returns the number of batches in the data; the last one may be smaller."""
    return -(-len(data) // config.batch_size)


def train(
    config: Config,
    client: TrainingClient,
    data: list[tinker.Datum],
    ml_logger: ml_log.Logger,
    steps: range,
) -> None:
    """Runs the loop over the steps after the checkpoint."""
    import tinker

    total_steps = steps.stop
    for step in steps:
        started = time.monotonic()
        epoch, index = divmod(step, steps_per_epoch(config, data))
        # The order depends only on seed and epoch, so a resumed run gets the same batches.
        order = random.Random(config.seed + epoch).sample(range(len(data)), len(data))
        here = order[index * config.batch_size : (index + 1) * config.batch_size]
        batch = [data[i] for i in here]

        # Submit both, then wait: the step costs one round trip rather than two.
        learning_rate = (config.learning_rate or 0.0) * (1 - step / total_steps)
        forward_backward = client.forward_backward(batch, "cross_entropy")
        optim = client.optim_step(
            tinker.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
        )
        output = forward_backward.result()
        optim.result()

        ml_logger.log_metrics(
            {
                "progress": (step + 1) / total_steps,
                "epoch": epoch,
                "learning_rate": learning_rate,
                "num_sequences": len(batch),
                "num_tokens": sum(datum.model_input.length for datum in batch),
                "train_mean_nll": compute_token_nll(
                    [record["logprobs"] for record in output.loss_fn_outputs], batch
                ),
                "time/step": time.monotonic() - started,
            },
            step=step + 1,
        )

        save_step(client, config, step + 1, total_steps, epoch=epoch)


if __name__ == "__main__":
    run_entrypoint(main)
