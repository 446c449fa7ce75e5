"""Self-distillation (SDFT): the teacher is the model itself with a demonstration in its prompt.

    python -m tinker_cookbook.distillation.sdft model_name=… log_path=… \\
        dataset_builder=tinker_cookbook.distillation.sdft:DemonstrationBuilder dataset_builder.KEY=…
    python -m tinker_cookbook.distillation.sdft --help

The teacher is the initial model with a good answer in its prompt. The student sees only the
question, answers it, and is trained towards the teacher's distribution at each token of its
answer (Shenfeld et al. 2026, arXiv 2601.19897). The student learns the content of the
demonstrations in its own words, and forgets less than with fine-tuning on them.

SDFT is an objective of ``supervised.batch_loop``. ``sdft_data`` has the questions and answers,
``sdft_targets`` the teacher's targets.
"""

from __future__ import annotations

import asyncio
from functools import partial

import chz

from tinker_cookbook import model_info
from tinker_cookbook.backends import Future, SamplingClient, TrainingClient
from tinker_cookbook.checkpoint_utils import load_checkpoints_file
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.distillation.sdft_data import (
    DEFAULT_DEMO_TEMPLATE,
    DemonstrationBuilder,
    DemonstrationTexts,
    ProvidedEnvironments,
    ProvidedTexts,
    SDFTBatchProvider,
    SDFTSettings,
    build_sdft_teacher_prompt,
    check_demo_template,
)
from tinker_cookbook.distillation.sdft_targets import (
    ReverseKL,
    demonstrated_targets,
    reverse_kl_custom_loss,
)
from tinker_cookbook.distillation.topk_distributions import (
    SoftDatum,
    check_top_k,
    distance_metrics,
)
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.preference.reference import reference_client
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.supervised.batch_loop import Batch, BatchConfig, Objective, train_batches
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import prepared, setting
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.training.session import Metrics, TrainingSession
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import official_names, tinker

__all__ = [
    "DEFAULT_DEMO_TEMPLATE",
    "Config",
    "DemonstrationBuilder",
    "SDFTBatchProvider",
    "SDFTSettings",
    "build_sdft_teacher_prompt",
    "main",
    "reverse_kl_custom_loss",
]

__getattr__ = official_names(__name__)


@chz.chz
class Config(SDFTSettings, BatchConfig):
    """Settings of a run of self-distillation."""

    dataset_builder: SupervisedDatasetBuilder | None = setting(  # type: ignore[assignment]
        None, "Demonstrations; None if main gets a provider"
    )

    learning_rate: float | None = 2e-5
    lora_rank: int = 128
    loss_fn: str = setting(
        "cross_entropy", "Has no effect: it is for topk=0, which is not supported"
    )
    eval_every: int = 20

    def resolved(self) -> Config:
        """Returns the config with all values that follow from others."""
        return self._filled(Config, "dataset_builder")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting; loads no model."""
        super().check()
        if self.dataset_builder is not None and not isinstance(
            self.dataset_builder, DemonstrationBuilder
        ):
            raise ConfigurationError(
                f"dataset_builder: got {type(self.dataset_builder).__name__}, expected a "
                "DemonstrationBuilder, which has the demonstration of each example"
            )
        if self.num_substeps != 1:
            raise ConfigurationError(
                f"num_substeps: got {self.num_substeps}, expected 1: a batch is one optimizer "
                "step; smaller batches give more steps"
            )
        if not self.on_policy and self.group_size != 1:
            raise ConfigurationError(
                f"group_size: got {self.group_size} with on_policy=False, expected 1: each "
                "demonstration is scored once"
            )
        if self.reverse and self.topk < 1:
            raise ConfigurationError(f"topk: got {self.topk}, but reverse=True requires topk>0")
        check_top_k("topk", self.topk, len(get_tokenizer(self.model_name)))
        check_demo_template(self.demo_template)
        # A resumed run loads the teacher from a checkpoint of the run, so one must exist.
        every = self.teacher_sync_every
        if every is not None and (every < 1 or not self.save_every or every % self.save_every):
            raise ConfigurationError(
                f"teacher_sync_every: got {every}, expected a multiple of save_every "
                f"({self.save_every}): a resumed run loads the teacher from the checkpoint "
                "of that step"
            )

    def server_needs(self) -> list[Need]:
        """Returns the required server features: the teacher's distributions and the loss."""
        setting = f"topk={self.topk}"
        loss = Need("custom_loss", "reverse=True", "set reverse=False")
        return [
            *super().server_needs(),
            *([loss] if self.reverse else []),
            *(Need(feature, setting) for feature in ("topk_targets", "topk_prompt_logprobs")),
        ]

    @property
    def context(self) -> int:
        """Maximum input tokens of the teacher; the API samples one more."""
        context = model_info.resolve_max_length(self.model_name, None)
        most = self.max_context_length
        return min(most, context - 1) if context else most


async def main(
    cfg: Config,
    sdft_dataset: SDFTBatchProvider | None = None,
    test_dataset: RLDataset | SDFTBatchProvider | None = None,
) -> None:
    """Trains, or resumes the run in ``cfg.log_path``.

    ``sdft_dataset`` has questions with golden answers, instead of ``cfg.dataset_builder``; its
    batch k is used at step k. ``test_dataset`` has environments for evaluation.
    """
    async with prepared(cfg) as config:
        await _train(config, sdft_dataset, test_dataset)


async def _train(
    cfg: Config,
    sdft_dataset: SDFTBatchProvider | None,
    test_dataset: RLDataset | SDFTBatchProvider | None,
) -> None:
    if (sdft_dataset is None) == (cfg.dataset_builder is None):
        got = "neither" if sdft_dataset is None else "both"
        raise ConfigurationError(
            f"sdft_dataset, dataset_builder: got {got}, expected one source of questions "
            "and golden answers"
        )
    if sdft_dataset is None:
        assert isinstance(cfg.dataset_builder, DemonstrationBuilder)
        source = DemonstrationTexts(cfg.dataset_builder, cfg)
        data = None
    else:
        name, _ = model_info.resolve_renderer_name(cfg.model_name, cfg.renderer_name)
        tokenizer = await asyncio.to_thread(get_tokenizer, cfg.model_name)
        teacher_prompt = partial(
            build_sdft_teacher_prompt,
            renderer=get_renderer(name, tokenizer),
            system_prompt=cfg.system_prompt,
            demo_template=cfg.demo_template,
        )
        source = ProvidedTexts(sdft_dataset, teacher_prompt)
        data = source, None

    async def objective(session: TrainingSession) -> Objective:
        if test_dataset is not None:
            held_out = ProvidedEnvironments(test_dataset)
            session.extra_evaluators.append(RLTestSetEvaluator(held_out, cfg.max_tokens))
        return SelfDistillation(cfg, session, source)

    await train_batches(cfg, objective, data)


class SelfDistillation(Objective):
    """Cross-entropy, or reverse KL, to the teacher's distributions on the answers.

    Metrics: those of ``distance_metrics``, ``demonstrated_targets`` and
    ``reverse_kl_custom_loss``; and ``sdft/answer_tokens``, the mean length of the answers.
    """

    def __init__(
        self, config: Config, session: TrainingSession, source: DemonstrationTexts | ProvidedTexts
    ) -> None:
        self._config, self._session, self._source = config, session, source
        self._tokenizer = get_tokenizer(config.model_name)
        self._teacher: tuple[int, SamplingClient] | None = None
        self.shown = "sdft/reverse_kl_mean" if config.reverse else "sdft/cross_entropy"

    async def prepare(self, step: int, data: list[tinker.Datum]) -> Batch:
        """Samples answers with the weights after ``step`` updates; the teacher scores them."""
        config = self._config
        # Training on demonstrations needs no samples, and so no snapshot of the weights.
        client = await self._session.sampling_client() if config.on_policy else None

        def policy() -> TokenCompleter:
            assert client is not None, "demonstrations need no samples"
            return TinkerTokenCompleter(
                client,
                config.max_tokens,
                config.temperature,
                context_window=config.context,
                seed=config.seed,
            )

        answers, prompts, rollout_metrics = await self._source.texts(step, data, policy)
        soft, metrics = await demonstrated_targets(
            answers,
            prompts,
            await self._teacher_at(step),
            config.topk,
            config.context,
            len(self._tokenizer),
            config.skip_first_n_tokens,
            config.teacher_concurrency,
        )
        # The mask is 1 on the answer's tokens.
        lengths = [datum.loss_fn_inputs["mask"].to_numpy().sum() for datum in answers]
        metrics["sdft/answer_tokens"] = float(sum(lengths)) / len(lengths)
        return Batch([each.datum for each in soft], (soft, rollout_metrics | metrics))

    async def _teacher_at(self, step: int) -> SamplingClient:
        """Returns the teacher: the initial weights, or the weights of its last update."""
        config, every = self._config, self._config.teacher_sync_every
        # Last step at which the teacher got the student's weights; 0: before training.
        since = 0 if every is None else step // every * every
        if self._teacher is not None and self._teacher[0] == since:
            return self._teacher[1]
        if since == 0:
            client = await reference_client(self._session, config, None)
        elif since == step:
            client = await self._session.sampling_client()
        else:
            # In a resumed run, the teacher's weights are older than the student's.
            paths = [
                record.state_path
                for record in load_checkpoints_file(config.log_path)
                if record.batch == since and record.state_path is not None
            ]
            if not paths:
                raise CheckpointError(
                    f"teacher_sync_every: the teacher needs the weights of step {since}, but "
                    f"{config.log_path}/checkpoints.jsonl lists no checkpoint of that step; start "
                    "afresh, or resume with the save_every and teacher_sync_every that the run "
                    "began with"
                )
            client = await reference_client(self._session, config, paths[-1])
        self._teacher = (since, client)
        return client

    def submit(self, client: TrainingClient, batch: Batch) -> Future[tinker.ForwardBackwardOutput]:
        """Queues a pass with the backend's cross-entropy, or with the reverse KL by autograd."""
        if self._config.reverse:
            # Cross-entropy is built into backends; the reverse KL needs autograd.
            return client.forward_backward_custom(batch.data, ReverseKL())
        return client.forward_backward(batch.data, "cross_entropy")

    def metrics(self, batch: Batch, output: tinker.ForwardBackwardOutput) -> Metrics:
        """Returns metrics of the answers, the teacher, and the distance between them."""
        soft: list[SoftDatum]
        soft, found = batch.prepared
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        distance = distance_metrics(soft, logprobs, "sdft")
        distance.pop("sdft/entropy", None)  # sdft/mean_teacher_entropy is the same
        _, reverse = reverse_kl_custom_loss(batch.data, [lp.to_torch() for lp in logprobs])
        # If no answer is long enough, nothing was trained and there is no mean.
        return {self.shown: 0.0, **found, **distance, **reverse}

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns ``test/nll`` of held-out demonstrations, which the student never sees."""
        return [NLLEvaluator.from_dataset(test_set, "test", self._tokenizer)]


if __name__ == "__main__":
    run_entrypoint(main)
