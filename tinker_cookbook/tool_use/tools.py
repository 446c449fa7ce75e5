"""``@tool``: a tool from a Python function, and the dispatch of a model's call to its tool."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, overload

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.renderers.core.arguments import arguments_text
from tinker_cookbook.renderers.core.tool_calls import typed_call
from tinker_cookbook.rl.rollouts.async_utils import Slots, run_in_new_thread
from tinker_cookbook.tool_use.execution import CallState, ToolSettings, guarded, run_tool
from tinker_cookbook.tool_use.results import error_tool_result as error_tool_result
from tinker_cookbook.tool_use.results import simple_tool_result as simple_tool_result
from tinker_cookbook.tool_use.schema import ToolSignature, described_function
from tinker_cookbook.tool_use.types import Tool, ToolInput, ToolResult, ToolSpec


class FunctionTool:
    """Tool from a function, a method, a partial or a callable object, as created by ``@tool``.

    A sync function runs in its own thread, so it may block; an async function must not block. The
    function returns text, a JSON value, a pydantic model or a ``ToolResult``. Calling the tool
    calls the function.

    Raises:
        ConfigurationError: The signature has no JSON schema.
    """

    runs_guarded = True
    """``run`` applies ``settings`` itself."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        settings: ToolSettings | None = None,
    ) -> None:
        self._kind = type(fn) if isinstance(fn, staticmethod | classmethod) else None
        fn = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
        self._fn = fn
        self._name = name or getattr(fn, "__name__", "")
        if not self._name:  # a partial has its function's name, an object that of its class
            inner = described_function(fn)
            self._name = type(fn).__name__ if inner.__name__ == "__call__" else inner.__name__
        self.settings = settings or ToolSettings()
        self._signature = ToolSignature(fn, self._name)
        self._description = description or self._signature.description
        self._instance: Any = None  # first argument of a method
        self._state = CallState(Slots(self.settings.max_concurrency))
        # For a method: the state of the calls of each object, as long as the object lives.
        self._states: dict[int, CallState] = {}
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    @property
    def name(self) -> str:
        """Name in the declaration and in calls."""
        return self._name

    @property
    def description(self) -> str:
        """Docstring of the function, without its section on arguments."""
        return self._description

    @property
    def parameters_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self._signature.schema

    def to_spec(self) -> ToolSpec:
        """Returns the declaration for ``Renderer.create_conversation_prefix_with_tools``."""
        return ToolSpec(
            name=self.name, description=self.description, parameters=self.parameters_schema
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself, without the settings of the tool."""
        return self._fn(*self._self_argument, *args, **kwargs)

    async def run(self, input: ToolInput) -> ToolResult:
        """Checks the arguments and runs the call; a failure becomes a result."""
        try:
            arguments = self._signature.validate(input.arguments)
        except (ValueError, RecursionError) as error:
            return error_tool_result(
                f"Parameter validation failed: {error}",
                call_id=input.call_id or "",
                name=self.name,
                error_type="validation_failed",
            )
        return await guarded(
            lambda: self._call(arguments), self.settings, self.name, input.call_id, self._state
        )

    async def _call(self, arguments: dict[str, Any]) -> Any:
        function, own = self._fn, self._self_argument
        if inspect.iscoroutinefunction(function):
            return await function(*own, **arguments)
        done = threading.Event()

        def in_thread() -> Any:
            try:
                return function(*own, **arguments)
            finally:
                done.set()

        try:
            value = await run_in_new_thread(in_thread)
        finally:
            # A thread cannot be stopped from outside: after a timeout it keeps running.
            if not done.is_set():
                self._state.abandon(done)
        return await value if inspect.isawaitable(value) else value

    @property
    def _self_argument(self) -> tuple[Any, ...]:
        return () if self._instance is None else (self._instance,)

    def __get__(self, obj: Any, objtype: type | None = None) -> FunctionTool:
        """Returns the tool of one object, for a decorated method; of the class, for a class
        method."""
        if self._kind is classmethod:
            obj = objtype or type(obj)
        if obj is None or self._kind is staticmethod:
            return self
        bound = FunctionTool.__new__(FunctionTool)
        bound.__dict__.update(self.__dict__)
        bound._instance = obj
        bound._state = self._state_of(obj)
        return bound

    def _state_of(self, obj: Any) -> CallState:
        if (state := self._states.get(id(obj))) is not None:
            return state
        limit = self.settings.max_concurrency
        if limit is None and not inspect.iscoroutinefunction(self._fn):
            # Methods share the state of their object and are rarely thread-safe.
            slots = _slots_of_objects.setdefault(id(obj), Slots(1))
        else:
            slots = Slots(limit)
        state = self._states[id(obj)] = CallState(slots)
        try:
            weakref.finalize(obj, _forget, id(obj), self._states)
        except TypeError:  # no weak references to an object with __slots__: keep no state for it
            _forget(id(obj), self._states)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the import path of the function, for builders in other processes."""
        if self._instance is not None:
            return getattr, (self._instance, self._fn.__name__)
        if not hasattr(self._fn, "__qualname__"):  # a partial or an object is pickled itself
            options = {"name": self.name, "description": self.description}
            return functools.partial(FunctionTool, settings=self.settings, **options), (self._fn,)
        return _load, (self._fn.__module__, self._fn.__qualname__)


_slots_of_objects: dict[int, Slots] = {}
"""Id of a live object -> one slot for all its sync tools."""


def _forget(key: int, states: dict[int, CallState]) -> None:
    states.pop(key, None)
    _slots_of_objects.pop(key, None)


def _load(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


@overload
def tool(fn: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, **settings: Any
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    **settings: Any,
) -> Any:
    """Makes a tool of a function or a method: ``@tool`` or ``@tool(timeout_seconds=5)``.

    The declaration comes from the name, the docstring and the type hints; a hint
    ``Annotated[str, "The query"]`` or a section ``Args:`` describes a parameter.

    Args:
        fn: The function.
        name: Name of the tool; default: the function's name.
        description: Replaces the docstring.
        **settings: Fields of ``ToolSettings``: ``timeout_seconds``, ``max_output_chars``,
            ``max_concurrency``, ``record``.
    """
    if unknown := [key for key in settings if key not in ToolSettings.__dataclass_fields__]:
        known = ToolSettings.__dataclass_fields__
        raise ConfigurationError(
            f"tool: there is no setting {unknown[0]!r}{nearest(unknown[0], known)}; expected "
            f"{', '.join(known)}"
        )
    made = ToolSettings(**settings)

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name=name, description=description, settings=made)

    return decorate if fn is None else decorate(fn)


async def handle_tool_call(tools: Mapping[str, Tool], tool_call: ToolCall) -> ToolResult:
    """Runs one call of a model; a call that cannot run returns a result with an ``error_type``."""
    name, call_id = tool_call.function.name, tool_call.id or ""

    def failed(message: str, error_type: str) -> ToolResult:
        return error_tool_result(message, call_id=call_id, name=name, error_type=error_type)

    if name not in tools:
        return failed(f"Tool '{name}' not found{nearest(name, tools)}", "tool_not_found")
    text = typed_for(tools[name], tool_call).function.arguments
    try:
        arguments = json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        return failed(f"Failed to parse tool arguments: {error}", "json_decode_failed")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        message = f"Parameter validation failed: got {type(arguments).__name__}, expected an object"
        return failed(message, "validation_failed")
    try:
        arguments_text(text)
    except ValueError as error:  # a lone surrogate, for example, which would end an MCP connection
        return failed(f"Parameter validation failed: {error}", "validation_failed")
    return await run_tool(tools[name], ToolInput(arguments, call_id))


def typed_for(tool: Tool | None, call: ToolCall) -> ToolCall:
    """Returns the call with the types of the tool's schema, for chat formats that write none."""
    return typed_call(call, getattr(tool, "parameters_schema", None))
