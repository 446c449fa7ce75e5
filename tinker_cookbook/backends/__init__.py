"""Backends: ``connect()`` and the protocols of the clients that it returns."""

from tinker_cookbook.backends.connect import Connection, connect
from tinker_cookbook.backends.protocols import (
    CustomLoss,
    Future,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
)

__all__ = [
    "Connection",
    "CustomLoss",
    "Future",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "connect",
]
