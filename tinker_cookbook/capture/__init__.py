"""Records what is sampled and trained, with the run, iteration and trajectory it belongs to.

``tinker_cookbook.capture.store.capture_to_store`` records the calls of a block in a database.
"""

from tinker_cookbook.capture.exporter import CaptureExporter, CaptureSink, JsonlFileSink
from tinker_cookbook.capture.instrument import instrument_tinker, uninstrument_tinker
from tinker_cookbook.capture.scope import RESERVED_KEYS, capture, current_scope

__all__ = [
    "RESERVED_KEYS",
    "CaptureExporter",
    "CaptureSink",
    "JsonlFileSink",
    "capture",
    "current_scope",
    "instrument_tinker",
    "uninstrument_tinker",
]
