"""Adds up the tokens and the cost of a run (``utils.cost_estimation``)."""

from __future__ import annotations

from tinker_cookbook.utils.cost_estimation import TokenCostRates, TokenUsage


class CostTracker:
    """Adds up the tokens of a run's steps and estimates their cost.

    Args:
        rates: Rates of the model; ``None`` counts tokens only.
        cumulative: Earlier tokens of a resumed run.
        discarded: Those of them that were sampled for groups that were never trained on.
    """

    def __init__(
        self,
        rates: TokenCostRates | None = None,
        *,
        cumulative: TokenUsage | None = None,
        discarded: TokenUsage | None = None,
    ) -> None:
        self.rates = rates
        self.cumulative = cumulative or TokenUsage()
        self.discarded = discarded or TokenUsage()
        self.step = TokenUsage()

    def record_discarded_sampling(self, usage: TokenUsage) -> None:
        """Counts samples that no step trains on; no step's metrics include them."""
        self.cumulative += usage
        self.discarded += usage

    def record_step(self, usage: TokenUsage) -> dict[str, float]:
        """Counts a step; returns ``tokens/…``, ``tokens/cumulative/…`` and, if rates are known,
        ``cost/step_usd`` and ``cost/cumulative_usd``."""
        self.step = TokenUsage()
        return self.extend_step(usage)

    def extend_step(self, usage: TokenUsage) -> dict[str, float]:
        """Counts more tokens of the latest step and returns its metrics again."""
        self.step += usage
        self.cumulative += usage
        return self._metrics("tokens", self.step, "cost/step_usd") | self._totals()

    def cumulative_metrics(self) -> dict[str, float]:
        """Returns the totals, and those of discarded samples under ``tokens/discarded/…``."""
        discarded = self._metrics("tokens/discarded", self.discarded, "cost/discarded_usd")
        return self._totals() | discarded

    def _totals(self) -> dict[str, float]:
        return self._metrics("tokens/cumulative", self.cumulative, "cost/cumulative_usd")

    def _metrics(self, prefix: str, usage: TokenUsage, cost: str) -> dict[str, float]:
        # Costs are left out without rates: 0 would look like a free run.
        metrics: dict[str, float] = dict(usage.metrics(prefix))
        if self.rates is not None:
            metrics[cost] = self.rates.estimate_usd(usage)
        return metrics
