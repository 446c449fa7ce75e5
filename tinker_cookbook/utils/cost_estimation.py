"""Counts the tokens that a run is billed for and estimates their cost in USD.

A hosted backend bills four kinds of tokens, each at its own rate: sampled tokens, prompt tokens
found in the prefix cache, other prompt tokens, and trained tokens. A token that is sampled and then
trained on is billed twice. Rates come from the published price list; without it, or for a model
that is not in it, only tokens are counted. Evaluations and failed requests are not included;
``RestClient.get_billing_usage`` returns the billed amounts.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tinker_cookbook import __version__
from tinker_cookbook.utils.imports import official_names

logger = logging.getLogger(__name__)

__getattr__ = official_names(__name__)

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
        """Returns the counts as ``PREFIX/KIND``."""
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
    """Returns the rates of one entry of the price list; its prices are strings such as ``"$1.87"``.

    ``None`` if one of the four prices is missing or not a number.
    """
    prices = [_price(entry.get(key)) for key in ("prefill", "cached_prefill", "sample", "train")]
    # All four or none: an estimate without one of them would be too low.
    known = [price for price in prices if price is not None]
    return TokenCostRates(*known) if len(known) == len(prices) else None


def _price(value: object) -> float | None:
    try:
        return float(str(value).strip().removeprefix("$").replace(",", ""))
    except ValueError:
        return None


# The list is fetched once in a process, even if that fails.
_pricing_entries: list[dict[str, Any]] | None = None
_pricing_fetched = False


def load_model_pricing(
    *, url: str = PRICING_URL, timeout: float = 5.0
) -> list[dict[str, Any]] | None:
    """Returns the price list, fetched by the first call of the process; ``None`` if that failed.

    ``timeout`` is in seconds.
    """
    global _pricing_entries, _pricing_fetched
    if not _pricing_fetched:
        # Set before the request: after a failure later calls must not wait for the timeout again.
        _pricing_fetched = True
        try:
            # The site rejects urllib's own User-Agent with status 403.
            agent = {"User-Agent": f"tinker-cookbook/{__version__}"}
            request = urllib.request.Request(url, headers=agent)
            with urllib.request.urlopen(request, timeout=timeout) as response:
                entries = json.load(response)
            if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
                raise ValueError("expected a JSON list of objects")
            _pricing_entries = entries
        except Exception as error:  # training must not depend on a price list
            logger.warning("Could not fetch prices from %s: %s; tokens are counted", url, error)
    return _pricing_entries


def fetch_model_pricing(
    model_name: str, *, url: str = PRICING_URL, timeout: float = 5.0
) -> TokenCostRates | None:
    """Returns the rates of a model, or ``None`` with a warning if they are unknown.

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
