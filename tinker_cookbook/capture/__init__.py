"""Records what is sampled and trained, with the run, iteration and trajectory it belongs to."""

from tinker_cookbook.capture.scope import RESERVED_KEYS, capture, current_scope

__all__ = ["RESERVED_KEYS", "capture", "current_scope"]
