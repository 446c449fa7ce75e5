"""How many samples wait, over all the ways to ask for them, and how many may."""

from __future__ import annotations

import threading

from tinker_cookbook.server.errors import Busy


class SampleQuota:
    """The one count of samples that were asked for and have not ended; usable in any thread.

    Args:
        most: So many may wait. A single request may ask for more where none waits.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Samples that wait."""
        return self._count

    def begin(self, samples: int) -> None:
        """Takes samples in; raises ``Busy`` where they are too many."""
        with self._lock:
            if self._count and self._count + samples > self._most:
                raise Busy(
                    f"{self._count} samples wait already, of at most {self._most} "
                    "(max_queued_samples=); try again"
                )
            self._count += samples

    def end(self, samples: int) -> None:
        """They wait no more."""
        with self._lock:
            self._count -= samples
