"""Calls between the process of the tests and the process of the program.

The tests use a ``Remote`` in place of a function or object of the program. Arguments and
results travel as plain values, so the program never shares an interpreter with its tests.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import socket
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tinker_cookbook.sandbox.inside import channel, values
from tinker_cookbook.sandbox.inside.budget import MOST_WALL_FACTOR, Budget, Interrupt

MAX_VALUE_BYTES = 16 << 20
_LEAST_WAIT = 0.1


class ProgramError(Exception):
    """The program raised an exception that is not a built-in one."""


class ProgramLostError(Exception):
    """The process of the program ended, or no longer follows the protocol."""


class ProgramTimeoutError(Exception):
    """A call into the program took too long."""


class UnsupportedValueError(TypeError):
    """A test passes a value that cannot be sent to the program."""


def _leave(target: Any, *names: str) -> None:
    """Ends a ``with`` block of the tests, in which an exception of these classes was raised."""
    error = _exception(list(names), "") if names else None
    target.__exit__(type(error) if error else None, error, None)


def _await(target: Any) -> Any:
    return _event_loop().run(target)


@functools.cache
def _event_loop() -> Any:
    import asyncio  # takes longer than most programs

    return asyncio.Runner()


# Special methods of ``Remote``, and the function that the program's process applies to the object.
_SPECIAL: dict[str, Callable[..., Any]] = {
    "__call__": lambda target, *args, **kwargs: target(*args, **kwargs),
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__bool__": bool,
    "__hash__": hash,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__index__": operator.index,
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__abs__": abs,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__invert__": operator.invert,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__enter__": lambda target: target.__enter__(),
}
# Operators between two objects of the program.
_OPERATORS = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and",
    "or", "xor", "lt", "le", "gt", "ge",
)  # fmt: skip
# Operations that the tests may apply to an object of the program.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **_SPECIAL,
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*_OPERATORS, "eq")},
    "value": lambda target: target,
    "get": getattr,
    "set": setattr,
    "instance": lambda target, value: isinstance(value, target),
    "leave": _leave,
    "await": _await,
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
        # One proxy for each object, so that ``is`` works.
        self._remotes: weakref.WeakValueDictionary[int, Remote] = weakref.WeakValueDictionary()
        self._test = 0
        self._waited = 0.0  # seconds in this test
        self._budget = Budget(call_seconds)
        self.answered = False
        """Whether the other end has answered a request."""

    def close(self) -> None:
        """Ends the connection."""
        self._peer.close()

    # The calling side

    def start_test(self) -> None:
        """Gives the other end its whole time again."""
        self._test += 1
        self._waited = 0.0

    def request(self, operation: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies ``operation`` to an object of the other end.

        Raises:
            UnsupportedValueError: An argument cannot be sent.
            ProgramError: The operation raised. Built-in exceptions keep their type.
            ProgramTimeoutError: The operations of this test took longer than allowed.
            ProgramLostError: The other end is gone.
        """
        self._number += 1
        message = {
            "number": self._number,
            "test": self._test,
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
        if isinstance(raised, StopIteration) and operation != "__next__":
            # It would end a loop of the test, such as ``all(map(…))``, as if all had passed.
            raise ProgramError(f"StopIteration: {raised}")
        raise raised

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a request, serves the other end's requests, and returns the answer."""
        started = time.monotonic()
        left = answer_seconds(self._seconds) - self._waited
        self._peer.settimeout(max(left, _LEAST_WAIT))
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
        finally:
            self._waited += time.monotonic() - started

    def _dereference(self, content: Any) -> Any:
        owner, number = content
        if owner == "yours":
            return self._own(number)
        kind = RemoteCoroutine if owner == "coroutine" else Remote
        number = int(number)
        return self._remotes.setdefault(number, kind(self, number))

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
        return ["ref", ["coroutine" if isinstance(value, types.CoroutineType) else "mine", number]]

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
            if self._names is None:
                answer["value"] = values.encode(self._call_back(message), self._refer)
            else:
                if message["test"] != self._test:
                    self._test, self._waited = message["test"], 0.0
                    self._budget = Budget(self._seconds)
                with self._budget:
                    answer["value"] = values.encode(self._perform(message), self._refer)
        except Interrupt:
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
        args, kwargs = self._arguments(message)
        return _OPERATIONS[message["operation"]](self._own(message["target"]), *args, **kwargs)

    def _call_back(self, message: dict[str, Any]) -> Any:
        """On the tests' end: the program may only call the functions that it was given."""
        args, kwargs = self._arguments(message)
        if message["operation"] != "__call__":
            raise PermissionError("only calls")
        return self._own(message["target"])(*args, **kwargs)

    def _arguments(self, message: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        args = [values.decode(value, self._dereference) for value in message["args"]]
        kwargs = {k: values.decode(v, self._dereference) for k, v in message["kwargs"].items()}
        return args, kwargs


def find(names: dict[str, Any], name: str) -> Any:
    """Returns a method of the program's class ``Solution``, else a global of the program."""
    solution = names.get("Solution")
    # First: a name such as ``merge`` may also be a global that a star import brought.
    is_method = isinstance(solution, type) and not name.startswith("__") and hasattr(solution, name)
    if name in names and not is_method:
        return names[name]
    if solution is not None:
        return getattr(solution(), name)
    raise NameError(f"name {name!r} is not defined")


def answer_seconds(call_seconds: float) -> float:
    """Returns the seconds that a caller waits: the other end interrupts the call earlier."""
    return MOST_WALL_FACTOR * call_seconds + 2


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

    The program's operators are never called with a value of the tests: its ``__eq__`` or
    ``__sub__`` would see the expected result, and could always agree.
    """

    def __init__(self, connection: Connection, target: int | str) -> None:
        object.__setattr__(self, "_remote_connection", connection)
        object.__setattr__(self, "_remote_target", target)

    def _remote(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._remote_connection.request(operation, self._remote_target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._remote("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote("set", name, value)

    def __contains__(self, item: Any) -> bool:
        # The program's ``__contains__`` would see the item and could always agree.
        return any(one is item or one == item for one in self)  # type: ignore[attr-defined]

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._remote("instance", instance) is True

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Remote) and self._remote("__eq__", other) is True
        )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # The result is not used: the program could suppress the failure of an assertion.
        self._remote("leave", *(base.__name__ for base in (kind.__mro__ if kind else ())))


class RemoteCoroutine(Remote):
    """Coroutine of the program, which its process runs to the end when the tests await it."""

    def send(self, *values: object) -> Any:
        """Does what an event loop expects of a coroutine: it is done at once."""
        raise StopIteration(self._remote("await"))

    __next__ = throw = send

    def __await__(self) -> Any:
        return self

    def close(self) -> None:
        """Does nothing."""


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        return self._remote(name, *args, **kwargs)

    return method


def _compute(name: str) -> Callable[[Remote, object], Any]:
    def method(self: Remote, other: object) -> Any:
        return self._remote(name, other) if isinstance(other, Remote) else NotImplemented

    return method


for _name in _SPECIAL:
    setattr(Remote, _name, _forward(_name))
for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", _compute(f"__{_name}__"))
