"""The time of a program for one test."""

from __future__ import annotations

import signal
import time
from types import FrameType

# Wall-clock limits as multiples of the limit on CPU time: for a program that mostly sleeps, and for
# any program. A program that computes on a busy machine gets the longer time.
WALL_FACTOR = 3.0
MOST_WALL_FACTOR = 10.0
BUSY_SHARE = 0.05


class Interrupt(BaseException):
    """Raised inside a call of the program when its time is over."""


class Budget:
    """Interrupts the calls for one test when together they exceed their CPU time or sleep too long.

    CPU time does not depend on the load of the machine, so a busy machine fails no program. Enter
    it in the main thread for each call; calls within calls belong to the outer one. CPU time also
    passes between calls, since reading and answering a short call takes longer than the call.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._wall = 0.0  # of earlier calls
        self._cpu_started = time.process_time()
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth:
            self._depth += 1
            return
        # When the calls would have started if they had followed each other without a pause.
        self._started = time.monotonic() - self._wall
        cpu = self._seconds - (time.process_time() - self._cpu_started)
        if cpu <= 0:
            raise Interrupt
        wall = WALL_FACTOR * self._seconds - self._wall
        if wall <= 0:
            wall = 0.1
            self._check_sleep()
        self._depth = 1
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, self._interrupt)
        # The timers fire again, in case the program catches the first interrupt.
        signal.setitimer(signal.ITIMER_PROF, cpu, 0.1)
        signal.setitimer(signal.ITIMER_REAL, wall, 0.1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGPROF:
            raise Interrupt
        self._check_sleep()

    def _check_sleep(self) -> None:
        elapsed = time.monotonic() - self._started
        computes = time.process_time() - self._cpu_started > BUSY_SHARE * elapsed
        if not computes or elapsed >= MOST_WALL_FACTOR * self._seconds:
            raise Interrupt

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        self._wall = time.monotonic() - self._started
