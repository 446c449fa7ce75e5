"""Tokens that a run is billed for, and an estimate of what they cost in USD.

A hosted backend bills four kinds of tokens, each at a rate of its own: sampled ones, prompt tokens
that were found in the prefix cache, those that were not, and trained ones. A token that is sampled
and then trained on is billed twice. Rates come from the published price list; without it, or for a
model that is not on it, only tokens are counted. Evaluations, and requests that failed, are not in
these numbers: ``RestClient.get_billing_usage`` has what was billed.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tinker_cookbook import __version__

logger = logging.getLogger(__name__)

TOKENS_PER_MILLION = 1_000_000
PRICING_URL = "https://tinker-docs.thinkingmachines.ai/tinker/models.json"
"""The price list: a JSON list with an object for each model."""


@dataclass(frozen=True)
class TokenUsage:
    """Tokens by kind."""

    sampled: int = 0
    prefill_cached: int = 0
    prefill_uncached: int = 0
    trained: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.sampled + other.sampled,
            self.prefill_cached + other.prefill_cached,
            self.prefill_uncached + other.prefill_uncached,
            self.trained + other.trained,
        )

    def metrics(self, prefix: str) -> dict[str, int]:
        """The counts as ``PREFIX/KIND``."""
        return {f"{prefix}/{kind}": count for kind, count in asdict(self).items()}


@dataclass(frozen=True)
class TokenCostRates:
    """USD for a million tokens of each kind."""

    prefill_usd_per_million: float
    cached_prefill_usd_per_million: float
    sample_usd_per_million: float
    train_usd_per_million: float

    def estimate_usd(self, usage: TokenUsage) -> float:
        """Returns each kind's tokens times its rate, summed up."""
        millionths = (
            usage.prefill_uncached * self.prefill_usd_per_million
            + usage.prefill_cached * self.cached_prefill_usd_per_million
            + usage.sampled * self.sample_usd_per_million
            + usage.trained * self.train_usd_per_million
        )
        return millionths / TOKENS_PER_MILLION


def rates_from_pricing_entry(entry: Mapping[str, object]) -> TokenCostRates | None:
    """Returns the rates of one object of the price list, whose prices are texts such as
    ``"$1.87"``.

    ``None`` where one of the four prices is missing or no number.
    """
    prices = [_price(entry.get(key)) for key in ("prefill", "cached_prefill", "sample", "train")]
    known = [price for price in prices if price is not None]
    return TokenCostRates(*known) if len(known) == len(prices) else None


def _price(value: object) -> float | None:
    try:
        return float(str(value).strip().removeprefix("$").replace(",", ""))
    except ValueError:
        return None


# The list is fetched once in a process; a run that started without it stays without it.
_pricing_entries: list[dict[str, Any]] | None = None
_pricing_fetched = False


def load_model_pricing(
    *, url: str = PRICING_URL, timeout: float = 5.0
) -> list[dict[str, Any]] | None:
    """Returns the price list, fetched by the first call of the process; ``None`` where that failed.

    Args:
        url: Where it is published.
        timeout: Seconds to wait for it.
    """
    global _pricing_entries, _pricing_fetched
    if not _pricing_fetched:
        _pricing_fetched = True
        try:
            _pricing_entries = _download_pricing(url, timeout)
        except Exception as error:  # training must not depend on a price list
            logger.warning("Could not fetch prices from %s: %s; tokens are counted", url, error)
    return _pricing_entries


def _download_pricing(url: str, timeout: float) -> list[dict[str, Any]]:
    # The site answers urllib's own User-Agent with status 403.
    request = urllib.request.Request(url, headers={"User-Agent": f"tinker-cookbook/{__version__}"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        entries = json.load(response)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("expected a JSON list of objects")
    return entries


def fetch_model_pricing(
    model_name: str, *, url: str = PRICING_URL, timeout: float = 5.0
) -> TokenCostRates | None:
    """Returns the rates of a model, or ``None`` with a warning where they are not known.

    Args:
        model_name: As in the list's ``tinker_id``, a suffix such as ``:peft:262144`` included.
        url: As for :func:`load_model_pricing`.
        timeout: As for :func:`load_model_pricing`.
    """
    entries = load_model_pricing(url=url, timeout=timeout)
    if entries is None:
        return None
    entry = next((entry for entry in entries if entry.get("tinker_id") == model_name), None)
    if entry is None:
        logger.warning("%s is not listed in %s; tokens are counted", model_name, url)
        return None
    rates = rates_from_pricing_entry(entry)
    if rates is None:
        logger.warning(
            "The prices of %s are incomplete (%s); tokens are counted", model_name, entry
        )
    return rates


class CostTracker:
    """Adds up the tokens of a run's steps and says what they cost.

    Args:
        rates: Rates of the model; ``None`` counts tokens only.
        cumulative: Tokens before this process, where a run is continued.
        discarded: Of these, the tokens sampled for groups that were never trained on.
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
        """Counts samples that no step will train on; they belong to no step's figures."""
        self.cumulative += usage
        self.discarded += usage

    def record_step(self, usage: TokenUsage) -> dict[str, float]:
        """Counts a step; gives ``tokens/…``, ``tokens/cumulative/…``, ``cost/step_usd`` and
        ``cost/cumulative_usd``, the last two where rates are known."""
        self.step = TokenUsage()
        return self.extend_step(usage)

    def extend_step(self, usage: TokenUsage) -> dict[str, float]:
        """Counts more tokens of the latest step and gives its metrics again."""
        self.step += usage
        self.cumulative += usage
        return self._metrics("tokens", self.step, "cost/step_usd") | self._totals()

    def cumulative_metrics(self) -> dict[str, float]:
        """Returns the totals alone, and those of discarded samples under ``tokens/discarded/…``."""
        discarded = self._metrics("tokens/discarded", self.discarded, "cost/discarded_usd")
        return self._totals() | discarded

    def _totals(self) -> dict[str, float]:
        return self._metrics("tokens/cumulative", self.cumulative, "cost/cumulative_usd")

    def _metrics(self, prefix: str, usage: TokenUsage, cost: str) -> dict[str, float]:
        metrics: dict[str, float] = dict(usage.metrics(prefix))
        if self.rates is not None:
            metrics[cost] = self.rates.estimate_usd(usage)
        return metrics
