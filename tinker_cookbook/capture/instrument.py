"""Records calls of the clients that sample and train: of the Tinker SDK and of the bundled engine.

``instrument_tinker(exporter)`` replaces ``sample`` of the sampling clients, and
``forward_backward``, ``optim_step`` and ``save_weights_for_sampler`` of the training clients, each
also as ``NAME_async``. A record has the scope and goes to the exporter of the moment of the call,
whenever the result arrives.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import threading
import time
import weakref
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

from tinker_cookbook.capture.exporter import CaptureExporter, CaptureRecord
from tinker_cookbook.capture.scope import current_scope

_Method = Callable[..., Any]
_Json = dict[str, Any]

_exporter: CaptureExporter | None = None
_patched: dict[tuple[type, str], tuple[_Method, _Method]] = {}  # the original and its replacement

# The async methods of the SDK call the plain ones, which must not be recorded a second time.
_recording: ContextVar[bool] = ContextVar("capture_recording", default=False)

# Coroutines that nothing has awaited yet. The lock is reentrant: the garbage collector may end one
# at any point.
_unstarted_guards: set[weakref.finalize[..., Any]] = set()
_guards_lock = threading.RLock()

# A value that a client has, by the names of the attribute in the SDK and in the bundled engine.
_CLIENT_VALUES = {
    "sampling_session_id": ("_sampling_session_id", "_client_id"),
    "model_path": ("model_path",),
    "base_model": ("base_model", "_base_model"),
}
_MODEL_ID = ("model_id", "_run_id")
_SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_ADAM_FIELDS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_CANCELLED = (CancelledError, FutureCancelledError, GeneratorExit)


def current_exporter() -> CaptureExporter | None:
    """Returns the exporter of new calls, ``None`` if none are recorded."""
    return _exporter


def instrument_tinker(exporter: CaptureExporter) -> None:
    """Records all calls from now on; a second call changes the exporter of new calls."""
    global _exporter
    _exporter = exporter
    for owner, name, make in _methods_to_patch():
        original = getattr(owner, name)
        if not hasattr(original, "_capture_original"):
            replacement = make(original)
            replacement._capture_original = original  # type: ignore[attr-defined]
            _patched[owner, name] = original, replacement
            setattr(owner, name, replacement)


def uninstrument_tinker() -> None:
    """Ends the recording of new calls; those in flight still go to their exporter."""
    global _exporter
    while _patched:
        (owner, name), (original, replacement) = _patched.popitem()
        # Somebody may have wrapped the method meanwhile; without an exporter ours does nothing.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
    with _guards_lock:
        _exporter = None
        flush_unstarted_guards()


def flush_unstarted_guards() -> None:
    """Records the coroutines that nothing has awaited as cancelled, before an exporter ends."""
    with _guards_lock:
        for guard in list(_unstarted_guards):
            guard()
        _unstarted_guards.clear()


def _methods_to_patch() -> list[tuple[type, str, Callable[[_Method], _Method]]]:
    import tinker

    from tinker_cookbook.backends.local_sampling import LocalSamplingClient
    from tinker_cookbook.backends.local_training import LocalTrainingClient

    found: list[tuple[type, str, Callable[[_Method], _Method]]] = []
    for owner in (tinker.SamplingClient, LocalSamplingClient):
        found.append((owner, "sample", _make_sample_wrapper))
        found.append((owner, "sample_async", _make_sample_async_wrapper))
    for owner in (tinker.TrainingClient, LocalTrainingClient):
        for op in ("forward_backward", "optim_step", "save_weights_for_sampler"):
            found.append((owner, op, functools.partial(_make_train_op_wrapper, op_name=op)))
            make = functools.partial(_make_train_op_async_wrapper, op_name=op)
            found.append((owner, f"{op}_async", make))
    return [entry for entry in found if hasattr(entry[0], entry[1])]


def _make_sample_wrapper(original: _Method) -> _Method:
    return _record(original, "sample", _describe_sample, _sample_outcome)


def _make_sample_async_wrapper(original: _Method) -> _Method:
    return _record_async(original, "sample", _describe_sample, _sample_outcome)


def _make_train_op_wrapper(original: _Method, op_name: str) -> _Method:
    describe = functools.partial(_describe_train_op, op_name)
    return _record(original, "train_op", describe, _train_op_outcome)


def _make_train_op_async_wrapper(original: _Method, op_name: str) -> _Method:
    describe = functools.partial(_describe_train_op, op_name)
    return _record_async(original, "train_op", describe, _train_op_outcome)


class _Call:
    """One call, from its start to its record. No method raises."""

    def __init__(
        self,
        exporter: CaptureExporter,
        kind: str,
        describe: Callable[[], _Json],
        outcome: Callable[[Any], _Json],
    ) -> None:
        self._exporter, self._outcome = exporter, outcome
        self._record: CaptureRecord = {
            "kind": kind,
            "scope": dict(current_scope()),
            "created_at": time.time(),
        }
        self._started = time.perf_counter()
        try:
            self._record |= describe()
        except Exception:
            exporter.callback_failures += 1

    def end(self, result: Any) -> None:
        """Records what the call returned."""
        try:
            self._add(status="ok", **self._outcome(result))
        except Exception:
            self._exporter.callback_failures += 1

    def fail(self, error: BaseException) -> None:
        """Records the error of the call."""
        if isinstance(error, _CANCELLED):
            self.cancel()
        else:
            self._add(status="error", error=repr(error))

    def cancel(self) -> None:
        """Records that the call has no result."""
        self._add(status="cancelled")

    def end_with(self, future: Future[Any] | None) -> None:
        """Records the result or the error of a future when it is there."""
        if future is None:
            self._add(status="submitted")
            self._exporter.pending_done()
        else:
            future.add_done_callback(self._end_future)

    def _end_future(self, future: Future[Any]) -> None:
        try:
            if future.cancelled():
                self.cancel()
            elif (error := future.exception()) is not None:
                self.fail(error)
            else:
                self.end(future.result())
        finally:
            self._exporter.pending_done()

    def _add(self, **outcome: Any) -> None:
        latency = time.perf_counter() - self._started
        self._exporter.enqueue(self._record | {"latency_sec": latency} | outcome)


def _record(
    original: _Method,
    kind: str,
    describe: Callable[[Any, Mapping[str, Any]], _Json],
    outcome: Callable[[Any], _Json],
) -> _Method:
    """Returns ``original``, a method that gives a future, with a record of each call."""
    read = _argument_reader(original)

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        exporter = _exporter
        if exporter is None or _recording.get():
            return original(self, *args, **kwargs)
        call = _Call(exporter, kind, lambda: describe(self, read(self, args, kwargs)), outcome)
        exporter.track_pending()  # before the submission, which may take a while
        token = _recording.set(True)
        try:
            returned = original(self, *args, **kwargs)
        except BaseException as error:
            call.fail(error)
            exporter.pending_done()
            raise
        finally:
            _recording.reset(token)
        call.end_with(_future_of(returned))
        return returned

    return recorded


def _record_async(
    original: _Method,
    kind: str,
    describe: Callable[[Any, Mapping[str, Any]], _Json],
    outcome: Callable[[Any], _Json],
) -> _Method:
    """As :func:`_record`, for an async method, which gives a result or a future of it."""
    read = _argument_reader(original)

    # A plain function: a coroutine is often created in one scope and awaited in another.
    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        # uninstrument_tinker records guards and ends exporters, so it must see this one's.
        with _guards_lock:
            exporter = _exporter
            if exporter is None or _recording.get():
                return original(self, *args, **kwargs)
            call = _Call(exporter, kind, lambda: describe(self, read(self, args, kwargs)), outcome)
            guard: weakref.finalize[..., Any]

            async def run() -> Any:
                _release(guard)
                exporter.track_pending()
                _recording.set(True)
                future = None
                try:
                    returned = await original(self, *args, **kwargs)
                    future = _future_of(returned)
                    if future is None:
                        call.end(returned)
                    else:
                        call.end_with(future)
                    return returned
                except BaseException as error:
                    call.fail(error)
                    raise
                finally:
                    # Not reset by a token: a coroutine may be closed in another context.
                    _recording.set(False)
                    if future is None:
                        exporter.pending_done()

            coroutine = run()
            # A task that is cancelled before it starts never runs the code above.
            guard = weakref.finalize(coroutine, lambda: (_release(guard), call.cancel()))
            _unstarted_guards.add(guard)
            return coroutine

    mark = getattr(inspect, "markcoroutinefunction", None)  # Python 3.12
    return recorded if mark is None else mark(recorded)


def _release(guard: weakref.finalize[..., Any]) -> None:
    guard.detach()
    _unstarted_guards.discard(guard)


def _argument_reader(original: _Method) -> Callable[..., Mapping[str, Any]]:
    """Returns a function that names the arguments of a call, given by position or by keyword."""
    signature = inspect.signature(original)
    return lambda self, args, kwargs: signature.bind_partial(self, *args, **kwargs).arguments


def _future_of(returned: Any) -> Future[Any] | None:
    """Returns the future in what a method gave, if there is one."""
    # The attribute first: ``future()`` of the engine's samples keeps them from being cancelled when
    # nothing waits for them any more.
    candidates: list[Any] = [returned, getattr(returned, "_future", None)]
    for candidate in candidates:
        if hasattr(candidate, "add_done_callback"):
            return candidate
    adapter = getattr(returned, "future", None)
    return adapter() if callable(adapter) else None


def _first_value(client: Any, names: tuple[str, ...]) -> str | None:
    values = (getattr(client, name, None) for name in names)
    return next((str(value) for value in values if value is not None), None)


def _describe_sample(client: Any, arguments: Mapping[str, Any]) -> _Json:
    found = {name: _first_value(client, names) for name, names in _CLIENT_VALUES.items()}
    described: _Json = {name: value for name, value in found.items() if value is not None}
    # With the session and the number of the sample, the key by which the store knows a row again.
    described["seq_id"] = secrets.randbits(62)
    described["num_samples"] = arguments.get("num_samples", 1)
    params = arguments.get("sampling_params")
    if params is not None:
        described["sampling_params"] = {f: getattr(params, f, None) for f in _SAMPLING_FIELDS}
    return described | _describe_prompt(client, arguments.get("prompt"))


def _describe_prompt(client: Any, prompt: Any) -> _Json:
    if isinstance(prompt, str):  # the clients tokenize a text in the same way
        tokens = client.get_tokenizer().encode(prompt)
    elif all(hasattr(chunk, "tokens") for chunk in getattr(prompt, "chunks", ())):
        tokens = prompt.to_ints()
    else:  # with images
        return {"prompt_length": prompt.length}
    return {"prompt_tokens": list(tokens), "prompt_length": len(tokens)}


def _sample_outcome(response: Any) -> _Json:
    return {
        "samples": [
            {
                "tokens": _listed(sequence.tokens),
                "logprobs": _listed(sequence.logprobs),
                "stop_reason": None if sequence.stop_reason is None else str(sequence.stop_reason),
            }
            for sequence in response.sequences
        ]
    }


def _listed(values: Any) -> list[Any] | None:
    return None if values is None else list(values)


def _describe_train_op(op_name: str, client: Any, arguments: Mapping[str, Any]) -> _Json:
    described: _Json = {"op": op_name}
    if (model_id := _first_value(client, _MODEL_ID)) is not None:
        described["model_id"] = model_id
    if "data" in arguments:
        described["num_data"] = len(arguments["data"])
    if "name" in arguments:
        described["name"] = str(arguments["name"])
    params = arguments.get("adam_params") or arguments.get("optim_params")
    if params is not None:
        described["hyperparams"] = {f: getattr(params, f, None) for f in _ADAM_FIELDS}
    return described


def _train_op_outcome(result: Any) -> _Json:
    metrics = getattr(result, "metrics", None)
    if not isinstance(metrics, dict):
        return {}
    numbers = {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {"metrics": numbers}
