"""Calls between the process of the tests and the process of the program.

The tests use a ``Remote`` in place of a function or object of the program. Arguments and
results travel as plain values, so the program never shares an interpreter with its tests.
"""

from __future__ import annotations

import builtins
import operator
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tinker_cookbook.sandbox.inside import channel, values

MAX_VALUE_BYTES = 16 << 20
# Wall-clock limits as multiples of the limit on CPU time: for a program that mostly sleeps, and for
# any program. A program that computes on a busy machine gets the longer time.
WALL_FACTOR = 3.0
MOST_WALL_FACTOR = 10.0
BUSY_SHARE = 0.05


class ProgramError(Exception):
    """The program raised an exception that is not a built-in one."""


class ProgramLostError(Exception):
    """The process of the program ended, or no longer follows the protocol."""


class ProgramTimeoutError(Exception):
    """A call into the program took too long."""


class UnsupportedValueError(TypeError):
    """A test passes a value that cannot be sent to the program."""


class _Interrupt(BaseException):
    """Raised inside a call of the program when its time is over."""


# Operations that the tests may apply to an object of the program.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "remove": operator.delitem,
    "instance": lambda target, value: isinstance(value, target),
    "length": len,
    "iterate": iter,
    "next": next,
    "text": str,
    "repr": repr,
}


class Connection:
    """One end of the connection: calls the other end, and serves its calls while waiting."""

    def __init__(
        self, peer: socket.socket, *, names: dict[str, Any] | None, call_seconds: float
    ) -> None:
        """``names`` are the objects that the other end can look up; None: it can look up none."""
        self._peer = peer
        self._names = names
        self._seconds = call_seconds
        self._objects: dict[int | str, Any] = {}
        self._number = 0
        self.answered = False
        """Whether the other end has answered a request."""

    def close(self) -> None:
        """Ends the connection."""
        self._peer.close()

    # The calling side

    def request(self, operation: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies ``operation`` to an object of the other end.

        Raises:
            UnsupportedValueError: An argument cannot be sent.
            ProgramError: The operation raised. Built-in exceptions keep their type.
            ProgramTimeoutError: The operation took longer than allowed.
            ProgramLostError: The other end is gone.
        """
        self._number += 1
        message = {
            "number": self._number,
            "operation": operation,
            "target": target,
            "args": [values.encode(value, self._refer) for value in args],
            "kwargs": {key: values.encode(value, self._refer) for key, value in kwargs.items()},
        }
        answer = self._exchange(message)
        self.answered = True
        try:
            if "raised" not in answer:
                return values.decode(answer["value"], self._dereference)
            names, text = answer["raised"]
            raised = _exception([str(name) for name in names], str(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProgramLostError(f"no valid answer: {type(error).__name__}") from error
        raise raised

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a request, serves the other end's requests, and returns the answer."""
        self._peer.settimeout(answer_seconds(self._seconds))
        try:
            channel.send(self._peer, message)
            while True:
                answer, _ = channel.receive(self._peer, MAX_VALUE_BYTES)
                if "operation" not in answer:
                    break
                self._serve(answer)
            if answer["number"] != message["number"]:
                raise ValueError("answer to another call")
            return answer
        except TimeoutError:
            # A late answer would be mistaken for the answer to the next call.
            self._peer.close()
            raise ProgramTimeoutError("the call did not return in time") from None
        except (OSError, EOFError) as error:
            raise ProgramLostError("the program ended") from error
        except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
            self._peer.close()
            raise ProgramLostError(f"no valid answer: {type(error).__name__}") from error

    def _dereference(self, content: Any) -> Any:
        owner, number = content
        return self._own(number) if owner == "yours" else Remote(self, int(number))

    def _own(self, target: int | str) -> Any:
        """Returns the object of this end that the other end names."""
        if isinstance(target, str) and self._names is not None:
            return find(self._names, target)
        return self._objects[target]

    def _refer(self, value: Any) -> Any:
        """Encodes an object that is not plain."""
        if isinstance(value, Remote):
            return ["ref", ["yours", value._remote_target]]
        if self._names is not None:
            if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
                return values.encode(value.tolist(), self._refer)
        elif not callable(value):
            # The program may only call what the tests give it.
            if isinstance(value, Iterator):
                return values.encode_iterator(value, self._refer)
            raise UnsupportedValueError(
                f"the test passes an object of the type {type(value).__name__} to the program; a "
                "test can pass plain values, iterators, functions and objects of the program"
            )
        number = id(value)
        self._objects[number] = value  # the reference keeps the id unique
        return ["ref", ["mine", number]]

    # The serving side

    def serve(self) -> None:
        """Serves the calls of the other end until it closes the connection."""
        self._peer.settimeout(None)
        while True:
            try:
                message, _ = channel.receive(self._peer)
            except (EOFError, OSError):
                return
            self._serve(message)

    def _serve(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": message["number"]}
        try:
            value = self._perform(message)
            answer["value"] = values.encode(value, self._refer)
        except _Interrupt:
            answer["raised"] = [["ProgramTimeoutError"], "the call did not return in time"]
        except BaseException as error:
            # Also SystemExit and KeyboardInterrupt: every error here is the program's.
            names = [kind.__name__ for kind in type(error).__mro__]
            try:
                text = str(error)[:1000]
            except BaseException:
                text = ""
            answer["raised"] = [names, text]
        channel.send(self._peer, answer)

    def _perform(self, message: dict[str, Any]) -> Any:
        operation, target = message["operation"], message["target"]
        args = [values.decode(value, self._dereference) for value in message["args"]]
        kwargs = {k: values.decode(v, self._dereference) for k, v in message["kwargs"].items()}
        if self._names is None:
            # On the tests' end: the program may only call the functions that it was given.
            if operation != "call":
                raise PermissionError("only calls")
            return self._own(target)(*args, **kwargs)
        found = self._own(target)
        with _Timer(self._seconds):
            return _OPERATIONS[operation](found, *args, **kwargs)


def find(names: dict[str, Any], name: str) -> Any:
    """Returns a global of the program, or a method of its class ``Solution``."""
    if name in names:
        return names[name]
    if "Solution" in names:
        return getattr(names["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


def answer_seconds(call_seconds: float) -> float:
    """Returns the seconds that a caller waits: the other end interrupts the call earlier."""
    return MOST_WALL_FACTOR * call_seconds + 2


class _Timer:
    """Interrupts a call in the main thread when it exceeds its CPU time or sleeps too long.

    CPU time does not depend on the load of the machine, so a busy machine fails no program.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        started, cpu_started = time.monotonic(), time.process_time()

        def interrupt(number: int, frame: FrameType | None) -> None:
            elapsed = time.monotonic() - started
            computes = time.process_time() - cpu_started > BUSY_SHARE * elapsed
            patient = computes and elapsed < MOST_WALL_FACTOR * self._seconds
            if number == signal.SIGPROF or not patient:
                raise _Interrupt

        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, interrupt)
        # The timers fire again, in case the program catches the first interrupt.
        signal.setitimer(signal.ITIMER_PROF, self._seconds, 0.1)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * self._seconds, 0.1)

    def __exit__(self, *exc: object) -> None:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def _exception(names: list[str], text: str) -> Exception:
    """Returns the first class of ``names`` that is a built-in exception."""
    if names[:1] == ["ProgramTimeoutError"]:
        return ProgramTimeoutError(text)
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(text)
            except TypeError:  # such as UnicodeDecodeError, which needs more arguments
                break
    return ProgramError(f"{names[0] if names else 'Exception'}: {text}")


class Remote:
    """Proxy of a program's object in the tests. Operations run in the program's process.

    A proxy equals only itself: the program's ``__eq__`` is never called.
    """

    def __init__(self, connection: Connection, target: int | str) -> None:
        object.__setattr__(self, "_remote_connection", connection)
        object.__setattr__(self, "_remote_target", target)

    def _remote(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._remote_connection.request(operation, self._remote_target, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._remote("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._remote("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote("put", key, value)

    def __delitem__(self, key: Any) -> None:
        self._remote("remove", key)

    def __contains__(self, item: Any) -> bool:
        # The program's ``__contains__`` would see the item and could always agree.
        return any(one is item or one == item for one in self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._remote("instance", instance) is True

    def __len__(self) -> int:
        return int(self._remote("length"))

    def __bool__(self) -> bool:
        return True  # otherwise __len__ would decide

    def __iter__(self) -> Any:
        return self._remote("iterate")

    def __next__(self) -> Any:
        return self._remote("next")

    def __str__(self) -> str:
        return str(self._remote("text"))

    def __repr__(self) -> str:
        return str(self._remote("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._remote_target == self._remote_target

    def __hash__(self) -> int:
        return hash(self._remote_target)
