"""A store of what was recorded: a database, and a process on this machine that writes it."""

from tinker_cookbook.capture.store.client import StoreSink, capture_to_store, ensure_daemon
from tinker_cookbook.capture.store.db import CaptureDB

__all__ = ["CaptureDB", "StoreSink", "capture_to_store", "ensure_daemon"]
