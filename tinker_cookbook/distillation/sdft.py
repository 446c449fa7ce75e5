"""Self-distillation: a model learns from itself, reading a demonstration (SDFT).

    python -m tinker_cookbook.distillation.sdft model_name=… log_path=… \\
        dataset_builder=tinker_cookbook.distillation.sdft:DemonstrationBuilder dataset_builder.KEY=…
    python -m tinker_cookbook.distillation.sdft --help

The teacher is the model as training began, with a good answer in its prompt; the student sees the
question alone, answers it, and moves towards what the teacher would have said at each token of that
answer (Shenfeld et al. 2026, arXiv 2601.19897). So it takes up what the demonstrations teach in
words of its own, and keeps more of what it knew than fine-tuning on them does.

It is an objective of the shared loop over batches: the targets are those of ``topk_targets``, only
that the student writes the texts (``on_policy``) and that the teacher reads another prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import chz

from tinker_cookbook import model_info
from tinker_cookbook.checkpoint_utils import load_checkpoints_file
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.distillation.demonstrations import (
    DEFAULT_DEMO_TEMPLATE,
    Demonstration,
    DemonstrationBuilder,
    ProvidedBatches,
    ProvidedEnvironments,
    ProvidedTexts,
    SDFTBatchProvider,
    Texts,
    build_sdft_teacher_prompt,
    check_demo_template,
)
from tinker_cookbook.distillation.sdft_datums import (
    ReverseKL,
    answer_datum,
    build_reverse_kl_datums,
    build_topk_distillation_datums,
    compute_sdft_advantages,
    demonstrated_targets,
    reverse_kl_custom_loss,
)
from tinker_cookbook.distillation.soft_objective import SoftObjective, number_of
from tinker_cookbook.distillation.topk_targets import SoftDatum, check_top_k, distance_metrics
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataValidationError
from tinker_cookbook.preference.reference import reference_client
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.supervised.batch_loop import Batch, BatchConfig, Objective, train_batches
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.session import Metrics, TrainingSession
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.backends import Future, SamplingClient, TrainingClient

__all__ = [
    "DEFAULT_DEMO_TEMPLATE",
    "Config",
    "DemonstrationBuilder",
    "SDFTBatchProvider",
    "build_reverse_kl_datums",
    "build_sdft_teacher_prompt",
    "build_topk_distillation_datums",
    "compute_sdft_advantages",
    "main",
    "reverse_kl_custom_loss",
]

_NO_CHECK = 1 << 62


@chz.chz
class Config(BatchConfig):
    """Settings of a run of self-distillation.

    ``dataset_builder`` is a ``DemonstrationBuilder``; it stays ``None`` where :func:`main` is given
    a provider of batches.
    """

    dataset_builder: SupervisedDatasetBuilder | None = chz.field(  # type: ignore[assignment]
        default=None, doc="Demonstrations; leave it out where main is given a provider"
    )

    learning_rate: float = chz.field(default=2e-5, doc="Peak learning rate of AdamW")
    lora_rank: int = chz.field(default=128, doc="Rank of the LoRA adapter")
    on_policy: bool = chz.field(
        default=True, doc="The student writes the answers; else the demonstrations are the texts"
    )
    group_size: int = chz.field(default=1, doc="Answers of the student to a question")
    max_tokens: int = chz.field(default=2048, doc="Most tokens of an answer")
    temperature: float = chz.field(default=1.0, doc="Of the student's answers")
    topk: int = chz.field(default=20, doc="Targets a position: the teacher's most probable tokens")
    reverse: bool = chz.field(
        default=False, doc="Reverse KL over the teacher's top K in place of cross-entropy"
    )
    demo_template: str = chz.field(
        default=DEFAULT_DEMO_TEMPLATE, doc="The teacher's question, of {question}, {golden_answer}"
    )
    system_prompt: str | None = chz.field(
        default=None, doc="The teacher's system message, where the conversation has none"
    )
    skip_first_n_tokens: int = chz.field(
        default=3, doc="First tokens of an answer that are not trained on"
    )
    teacher_sync_every: int | None = chz.field(
        default=None, doc="Steps after which the teacher takes the student's weights; None: never"
    )
    teacher_concurrency: int = chz.field(
        default=64, doc="Answers that the teacher scores at a time"
    )
    max_context_length: int = chz.field(
        default=32768, doc="Most tokens of teacher prompt and answer; at most the model's context"
    )
    num_substeps: int = chz.field(
        default=1, doc="Only 1 is possible: a batch is one optimizer step"
    )
    loss_fn: str = chz.field(
        default="importance_sampling", doc="Has no effect: topk=0, which it was for, is not offered"
    )
    eval_every: int = chz.field(default=20, doc="Steps between evaluations; 0 is never")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first setting that cannot work; loads no model."""
        super().check()
        if self.dataset_builder is not None and not isinstance(
            self.dataset_builder, DemonstrationBuilder
        ):
            raise ConfigurationError(
                f"dataset_builder: got {type(self.dataset_builder).__name__}, expected a "
                "DemonstrationBuilder, which knows the demonstration of each example"
            )
        for name, low in (
            ("group_size", 1),
            ("max_tokens", 1),
            ("skip_first_n_tokens", 0),
            ("teacher_concurrency", 1),
            ("max_context_length", 2),
        ):
            if getattr(self, name) < low:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected >= {low}")
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
        check_top_k("topk", self.topk, len(get_tokenizer(self.model_name)))
        check_demo_template(self.demo_template)
        self._check_sync()

    def _check_sync(self) -> None:
        every = self.teacher_sync_every
        if every is None:
            return
        if every < 1 or self.save_every < 1 or every % self.save_every:
            raise ConfigurationError(
                f"teacher_sync_every: got {every}, expected a multiple of save_every "
                f"({self.save_every}): a run that is resumed takes the teacher from the checkpoint "
                "of that step"
            )

    @property
    def context(self) -> int:
        """Tokens that the teacher may read: it draws one more behind them."""
        context = model_info.resolve_max_length(self.model_name, None) or _NO_CHECK
        return min(self.max_context_length, context - 1)


async def main(
    cfg: Config,
    sdft_dataset: SDFTBatchProvider | None = None,
    test_dataset: RLDataset | SDFTBatchProvider | None = None,
) -> None:
    """Trains, or continues the run in ``cfg.log_path``.

    Args:
        cfg: The run's settings.
        sdft_dataset: Questions with golden answers, in place of ``cfg.dataset_builder``; batch k
            is trained at step k.
        test_dataset: Environments to evaluate on every ``cfg.eval_every`` steps, with a provider.

    Raises:
        ConfigurationError: A setting cannot work; nothing was loaded or sampled.
        DataValidationError: A demonstration leaves no room for an answer.
    """
    cfg.check()
    if (sdft_dataset is None) == (cfg.dataset_builder is None):
        got = "neither" if sdft_dataset is None else "both"
        raise ConfigurationError(
            f"sdft_dataset, dataset_builder: got {got}, expected one of them: where the questions "
            "and their golden answers come from"
        )
    if sdft_dataset is None:
        prompts = Prompts(cfg)
        await asyncio.to_thread(prompts.check)
        source: TextSource = DemonstrationTexts(cfg, prompts)
        data = None
    else:
        source = ProvidedTexts(sdft_dataset, await asyncio.to_thread(_teacher_prompt, cfg))
        data = ProvidedBatches(sdft_dataset), None

    async def objective(session: TrainingSession) -> Objective:
        if test_dataset is not None:
            held_out = ProvidedEnvironments(test_dataset)
            session.extra_evaluators.append(RLTestSetEvaluator(held_out, cfg.max_tokens))
        return SelfDistillation(cfg, session, source)

    await train_batches(cfg, objective, data)


def _teacher_prompt(config: Config) -> Callable[[str, str], tinker.ModelInput]:
    """Returns the teacher's prompt of a question and its golden answer."""
    name, _ = model_info.resolve_renderer_name(config.model_name, config.renderer_name)
    return partial(
        build_sdft_teacher_prompt,
        renderer=get_renderer(name, get_tokenizer(config.model_name)),
        system_prompt=config.system_prompt,
        demo_template=config.demo_template,
    )


class Prompts:
    """The prompts of student and teacher for each demonstration."""

    def __init__(self, config: Config) -> None:
        assert isinstance(config.dataset_builder, DemonstrationBuilder)
        self._config, self._builder = config, config.dataset_builder

    @property
    def stop(self) -> list[str] | list[int]:
        """What ends an answer."""
        return self._builder.renderer.get_stop_sequences()

    def student(self, row: int) -> tinker.ModelInput:
        """Returns the question alone."""
        return self._builder.renderer.build_generation_prompt(self._demonstration(row).prompt)

    def teacher(self, row: int) -> tinker.ModelInput:
        """Returns the question with the demonstration."""
        config = self._config
        return self._demonstration(row).teacher_prompt(
            self._builder.renderer, config.system_prompt, config.demo_template
        )

    def check(self) -> None:
        """Raises ``DataValidationError`` where a teacher's prompt leaves no room for an answer.

        The student's, which lacks the demonstration, is no longer.
        """
        limit = self._config.context
        lengths = [self.teacher(row).length for row in range(len(self._builder.demonstrations))]
        long = [row for row, length in enumerate(lengths) if length >= limit]
        if long:
            raise DataValidationError(
                f"{self._builder.file_path}: the teacher's prompt of {len(long)} of {len(lengths)} "
                f"demonstrations (the first is row {long[0]}, {lengths[long[0]]} tokens) leaves no "
                f"room for an answer within {limit} tokens; shorten these or take them out, or "
                "raise max_context_length where the model's context allows it"
            )

    def _demonstration(self, row: int) -> Demonstration:
        return self._builder.demonstrations[row]


class TextSource(Protocol):
    """Where a step's answers come from."""

    async def texts(
        self, step: int, data: Sequence[tinker.Datum], policy: Callable[[], TokenCompleter]
    ) -> Texts:
        """Returns the answers to ``data``; ``policy`` gives the student as it is now, where it
        answers."""
        ...


class DemonstrationTexts:
    """Answers of the student to the questions of demonstrations, or the demonstrations."""

    def __init__(self, config: Config, prompts: Prompts) -> None:
        self._config, self._prompts = config, prompts

    async def texts(
        self, step: int, data: Sequence[tinker.Datum], policy: Callable[[], TokenCompleter]
    ) -> Texts:
        """Returns ``group_size`` answers to each question, a function of the seed and the step."""
        rows = [number_of(datum) for datum in data]
        if not self._config.on_policy:
            return [*map(_masked, data)], [self._prompts.teacher(row) for row in rows], {}
        student, size = policy(), self._config.group_size

        async def one(place: int, row: int) -> list[tinker.Datum]:
            prompt = self._prompts.student(row)
            samples = await student.derived(step, place).sample_many(
                prompt, self._prompts.stop, size
            )
            return [answer_datum(prompt, sample.tokens) for sample in samples]

        groups = await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))
        teachers = [self._prompts.teacher(row) for row in rows for _ in range(size)]
        return [datum for group in groups for datum in group], teachers, {}


class SelfDistillation(SoftObjective):
    """Metrics are those of ``distance_metrics``, ``demonstrated_targets`` and
    ``reverse_kl_custom_loss``, all under ``sdft/``; and ``sdft/answer_tokens``, the mean length of
    the answers."""

    prefix = "sdft"

    def __init__(self, config: Config, session: TrainingSession, source: TextSource) -> None:
        self._config, self._session, self._source = config, session, source
        self._vocab_size = len(get_tokenizer(config.model_name))
        self._teacher: tuple[int, SamplingClient] | None = None
        self._said_cut = False
        self.shown = "sdft/reverse_kl_mean" if config.reverse else "sdft/cross_entropy"

    async def prepare(self, step: int, data: list[tinker.Datum]) -> Batch:
        """Returns the student answers with the weights of ``step`` updates; the teacher scores."""
        config = self._config
        # Demonstrations as texts need no samples, so no snapshot of the weights either.
        client = await self._session.sampling_client() if config.on_policy else None
        data, prompts, played = await self._source.texts(step, data, lambda: self._policy(client))
        soft, metrics = await demonstrated_targets(
            data,
            prompts,
            await self._teacher_at(step),
            config.topk,
            config.context,
            self._vocab_size,
            config.skip_first_n_tokens,
            config.teacher_concurrency,
        )
        self._say_if_cut(int(metrics["sdft/teacher_truncated_count"]))
        lengths = [datum.loss_fn_inputs["mask"].to_numpy().sum() for datum in data]
        metrics["sdft/answer_tokens"] = float(sum(lengths)) / len(lengths)
        return Batch([each.datum for each in soft], (soft, {**played, **metrics}))

    def submit(self, client: TrainingClient, batch: Batch) -> Future[types.ForwardBackwardOutput]:
        """Cross-entropy, or the reverse KL under autograd."""
        if self._config.reverse:
            return client.forward_backward_custom(batch.data, ReverseKL())
        return super().submit(client, batch)

    def metrics(self, batch: Batch, output: types.ForwardBackwardOutput) -> Metrics:
        """Of the answers, the teacher and the distance to it."""
        soft: list[SoftDatum]
        soft, found = batch.prepared
        logprobs = [record["logprobs"] for record in output.loss_fn_outputs]
        distance = distance_metrics(soft, logprobs, self.prefix)
        distance.pop(f"{self.prefix}/entropy", None)  # sdft/mean_teacher_entropy is the same
        _, reverse = reverse_kl_custom_loss(batch.data, [lp.to_torch() for lp in logprobs])
        # Where no answer is long enough, nothing was trained and there is no mean.
        return {self.shown: 0.0, **found, **distance, **reverse}

    def evaluators(self, test_set: SupervisedDataset) -> list[Evaluator]:
        """Returns ``test/nll`` of held-out demonstrations, which the student has not been shown."""
        tokenizer = get_tokenizer(self._config.model_name)
        return [NLLEvaluator.from_dataset(test_set, "test", tokenizer)]

    def _policy(self, client: SamplingClient | None) -> TokenCompleter:
        """Returns the student with the weights of the step."""
        assert client is not None  # demonstrations ask for no answers
        config = self._config
        return TinkerTokenCompleter(
            client,
            config.max_tokens,
            config.temperature,
            context_window=config.context,
            seed=config.seed,
        )

    async def _teacher_at(self, step: int) -> SamplingClient:
        """Returns the weights that training began from, or those of the last step to be taken
        over."""
        every = self._config.teacher_sync_every
        since = 0 if every is None else step // every * every
        if self._teacher is None or self._teacher[0] != since:
            self._teacher = (since, await self._open_teacher(since, now=since == step))
        return self._teacher[1]

    async def _open_teacher(self, since: int, *, now: bool) -> SamplingClient:
        if since == 0:
            return await reference_client(self._session, self._config, None)
        if now:
            return await self._session.sampling_client()
        for record in reversed(load_checkpoints_file(self._config.log_path)):
            if record.batch == since and record.state_path is not None:
                return await reference_client(self._session, self._config, record.state_path)
        raise CheckpointError(
            f"teacher_sync_every: the teacher is to have the weights of step {since}, but "
            f"{self._config.log_path}/checkpoints.jsonl lists no checkpoint of that step; start "
            "afresh, or resume with the save_every and teacher_sync_every that the run began with"
        )

    def _say_if_cut(self, count: int) -> None:
        if count and not self._said_cut:
            self._said_cut = True
            self._session.say(
                f"{count} answers of a batch are too long behind the teacher's prompt: what lies "
                f"beyond {self._config.context} tokens gets no targets; "
                "sdft/teacher_truncated_count goes on counting"
            )


def _masked(datum: tinker.Datum) -> tinker.Datum:
    """Returns a demonstration's own datum as :func:`answer_datum` would give it."""
    import tinker

    fields = datum.loss_fn_inputs
    mask = (fields["weights"].to_numpy() != 0).astype("float32")
    return tinker.Datum(
        model_input=datum.model_input,
        loss_fn_inputs={
            "target_tokens": fields["target_tokens"],
            "mask": tinker.TensorData.from_numpy(mask),
        },
    )


if __name__ == "__main__":
    run_entrypoint(main)
