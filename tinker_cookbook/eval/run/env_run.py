"""Runs benchmarks that define their own environments."""

from __future__ import annotations

import asyncio
from typing import Any

from tinker_cookbook.eval.run.example_run import BenchmarkRun, answer_turn, prompt_turns
from tinker_cookbook.eval.run.sources import RendererSource, example_seed, prompt_key
from tinker_cookbook.eval.run.types import (
    METRIC_CONTEXT_OVERFLOW,
    METRIC_MAX_TOKENS_REACHED,
    Metrics,
    StoredTrajectory,
    StoredTurn,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.episode import run_rollout
from tinker_cookbook.rl.rollouts.limits import RolloutLimits
from tinker_cookbook.rl.types import Env, Trajectory
from tinker_cookbook.utils.model_inputs import ChunkKeys

_Item = tuple[int, int, str, Env]
"""Position and sample of a problem, its id, its environment."""


class EnvRun(BenchmarkRun):
    """Runs ``num_samples`` episodes of each problem."""

    source: RendererSource

    async def prepare(self) -> dict[str, Any]:
        """Makes the environments, and returns settings of the episodes.

        Environments may choose their prompts at random, so the key has none of them;
        ``grader_version`` stands for the code of the environments.
        """
        if not isinstance(self.source, RendererSource):
            raise ConfigurationError(
                f"{self.builder.name}: its environments read and write tokens, which a chat API "
                "does not have; evaluate it with model_path= or model_name="
            )
        items: list[_Item] = []
        for sample in range(self.config.num_samples):
            # An environment is used once, so each sample has its own.
            envs = await asyncio.to_thread(
                self.builder.make_envs, self.source.renderer, self.config
            )
            for idx, env in enumerate(list(envs)[: self.config.max_examples]):
                items.append((idx, sample, str(getattr(env, "example_id", "") or idx), env))
        self.items = sorted(items, key=lambda item: item[:2])
        system = self.config.system_prompt
        return {
            "system_prompt": self.builder.recommended_system_prompt if system is None else system,
            "max_trajectory_tokens": self.config.max_trajectory_tokens,
            "max_generation_tokens": self.config.max_generation_tokens,
            "grader": self.builder.grader_version,
        }

    def is_done(self, item: _Item) -> bool:
        """Returns whether the episode was run with this version of the environments."""
        row = self.file.rows.get((item[2], item[1]))
        # A row that was graded by another function has no grader.
        return row is not None and row.error is None and row.grader == self.builder.grader_version

    async def work(self, position: int, item: _Item) -> list[StoredTrajectory]:
        """Returns the row of an episode."""
        idx, sample, example_id, env = item
        if self.is_done(item):
            return [self.file.rows[example_id, sample]]
        config = self.config
        row = StoredTrajectory(idx, self.builder.name, example_id, sample=sample)
        row.grader = self.builder.grader_version
        limits = RolloutLimits(
            max_trajectory_tokens=config.max_trajectory_tokens or self.source.context_window,
            max_sampled_tokens=config.max_generation_tokens,
        )
        policy = self.source.policy(example_seed(config.seed, example_id, sample))

        async def episode() -> None:
            trajectory = await run_rollout(policy, env, limits=limits)
            self.record.add(row, trajectory)
            await asyncio.to_thread(self._fill, row, trajectory)

        try:
            await self.attempt(row, episode())
            # Keep earlier answers, such as a conversation that the judge could not rate.
            if row.error is not None and (messages := getattr(env, "messages", None)):
                row.turns = prompt_turns(messages, None)
        finally:
            # Sandboxes are released even if the run is cancelled.
            cleanup = getattr(env, "cleanup", None)
            if cleanup is not None:
                await cleanup()
        return [await self.store(row)]

    def _fill(self, row: StoredTrajectory, trajectory: Trajectory) -> None:
        """Sets the turns, the reward, the metrics and the logs of an episode."""
        row.reward = trajectory.reward
        metrics: Metrics = {}
        tokenizer = self.source.renderer.tokenizer
        seen: list[int] = []
        images = ChunkKeys()
        for turn in trajectory.transitions:
            prompt = images.keys(turn.ob).tolist()
            new = prompt[len(seen) :] if seen and prompt[: len(seen)] == seen else prompt
            # Keys of images are negative.
            text = str(tokenizer.decode([key for key in new if key >= 0]))
            row.turns.append(StoredTurn("environment" if seen else "user", text, len(new)))
            row.prompt_key = row.prompt_key or prompt_key(turn.ob)
            answer = self.source.parse(turn.ac)
            row.turns.append(answer_turn(answer))
            truncated = max(metrics.get(METRIC_MAX_TOKENS_REACHED, 0.0), float(answer.truncated))
            metrics.update(turn.metrics)
            metrics[METRIC_MAX_TOKENS_REACHED] = truncated
            row.logs.update(turn.logs)
            seen = [*prompt, *turn.ac.tokens]
        metrics.update(trajectory.metrics)
        # Without a turn, the first prompt did not fit into the context.
        if not trajectory.transitions:
            metrics[METRIC_CONTEXT_OVERFLOW] = 1.0
        row.metrics = metrics
        row.logs.update(trajectory.logs)
