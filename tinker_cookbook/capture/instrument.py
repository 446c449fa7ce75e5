"""Records calls of the clients that sample and train: of the Tinker SDK and of the bundled engine.

Recorded are ``sample`` of a sampling client, and ``forward_backward``, ``optim_step`` and
``save_weights_for_sampler`` of a training client, each also as ``NAME_async``. A record has the
scope and goes to the exporter of the moment of the call, whenever the result arrives.
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
from typing import Any, NamedTuple

from tinker_cookbook.capture.exporter import CaptureExporter
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

_OPS = ("forward_backward", "optim_step", "save_weights_for_sampler")
_SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_ADAM_FIELDS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_CANCELLED = (CancelledError, FutureCancelledError, GeneratorExit)


def current_exporter() -> CaptureExporter | None:
    """Returns the exporter of new calls, ``None`` if none are recorded."""
    return _exporter


def instrument_tinker(exporter: CaptureExporter) -> None:
    """Records all calls from now on; a second call changes the exporter of new calls."""
    import tinker

    from tinker_cookbook.backends.local_sampling import LocalSamplingClient
    from tinker_cookbook.backends.local_training import LocalTrainingClient

    global _exporter
    _exporter = exporter
    sample = _Kind("sample", _sample_request, _sample_outcome)
    for owner in (tinker.SamplingClient, LocalSamplingClient):
        _replace(owner, "sample", sample)
    for owner in (tinker.TrainingClient, LocalTrainingClient):
        for op in _OPS:
            request = functools.partial(_train_op_request, op)
            _replace(owner, op, _Kind("train_op", request, _train_op_outcome))


def _replace(owner: type, method: str, kind: _Kind) -> None:
    for name, record in ((method, _record), (f"{method}_async", _record_async)):
        original = getattr(owner, name, None)
        if original is not None and (owner, name) not in _patched:
            replacement = record(original, kind)
            _patched[owner, name] = original, replacement
            setattr(owner, name, replacement)


def uninstrument_tinker() -> None:
    """Ends the recording of new calls; those in flight still go to their exporter."""
    global _exporter
    while _patched:
        (owner, name), (original, replacement) = _patched.popitem()
        # If the method was wrapped meanwhile, ours stays: without an exporter it does nothing.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
    with _guards_lock:
        _exporter = None
        flush_unstarted_guards()


def flush_unstarted_guards() -> None:
    """Records the coroutines that nothing has awaited as cancelled, before an exporter ends."""
    with _guards_lock:
        while _unstarted_guards:
            _unstarted_guards.pop()()


class _Kind(NamedTuple):
    """What a record of a method has."""

    name: str
    request: Callable[[Any, Mapping[str, Any]], _Json]  # of the client and the arguments
    outcome: Callable[[Any], _Json]  # of the result


class _Call:
    """One call, from its start to its record. No method raises."""

    def __init__(
        self, exporter: CaptureExporter, kind: _Kind, request: Callable[[], _Json]
    ) -> None:
        self._exporter, self._kind = exporter, kind
        self._record = {
            "kind": kind.name,
            "scope": dict(current_scope()),
            "created_at": time.time(),
        }
        self._started = time.perf_counter()
        try:
            self._record |= request()
        except Exception:
            exporter.callback_failures += 1

    def end(self, result: Any) -> None:
        try:
            self._add(status="ok", **self._kind.outcome(result))
        except Exception:
            self._exporter.callback_failures += 1

    def fail(self, error: BaseException) -> None:
        if isinstance(error, _CANCELLED):
            self.cancel()
        else:
            self._add(status="error", error=repr(error))

    def cancel(self) -> None:
        self._add(status="cancelled")

    def end_with(self, future: Future[Any] | None) -> None:
        if future is None:
            self._add(status="submitted")
            self._exporter.pending_done()
        else:
            future.add_done_callback(self._end_future)

    def _end_future(self, future: Future[Any]) -> None:
        try:
            result = future.result()
        except BaseException as error:
            self.fail(error)
        else:
            self.end(result)
        self._exporter.pending_done()

    def _add(self, **outcome: Any) -> None:
        latency = time.perf_counter() - self._started
        self._exporter.enqueue(self._record | {"latency_sec": latency} | outcome)


def _record(original: _Method, kind: _Kind) -> _Method:
    """Returns ``original``, a method that gives a future, with a record of each call."""
    read = _argument_reader(original)

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        exporter = _exporter
        if exporter is None or _recording.get():
            return original(self, *args, **kwargs)
        call = _Call(exporter, kind, lambda: kind.request(self, read(self, args, kwargs)))
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


def _record_async(original: _Method, kind: _Kind) -> _Method:
    """As :func:`_record`, for an async method, which gives a result or a future of it."""
    read = _argument_reader(original)

    # A plain function: a coroutine is often created in one scope and awaited in another.
    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        with _guards_lock:  # an exporter must not end between here and the entry of the guard
            exporter = _exporter
            if exporter is None or _recording.get():
                return original(self, *args, **kwargs)
            call = _Call(exporter, kind, lambda: kind.request(self, read(self, args, kwargs)))
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


def _future_of(returned: Any) -> Any:
    """Returns the future in what a method gave, ``None`` if there is none."""
    # The attribute first: ``future()`` of the engine's samples keeps them from being cancelled when
    # nothing waits for them any more.
    for candidate in (returned, getattr(returned, "_future", None)):
        if hasattr(candidate, "add_done_callback"):
            return candidate
    return returned.future() if hasattr(returned, "future") else None


def _sample_request(client: Any, arguments: Mapping[str, Any]) -> _Json:
    # With the session and the number of the sample, the key by which the store knows a row again.
    request: _Json = {
        "seq_id": secrets.randbits(62),
        "num_samples": arguments.get("num_samples", 1),
    }
    # Each by its names in the SDK and in the bundled engine.
    _add_attribute(request, "sampling_session_id", client, "_sampling_session_id", "_client_id")
    _add_attribute(request, "model_path", client, "model_path")
    _add_attribute(request, "base_model", client, "base_model", "_base_model")
    if (params := arguments.get("sampling_params")) is not None:
        request["sampling_params"] = {f: getattr(params, f, None) for f in _SAMPLING_FIELDS}
    prompt: Any = arguments["prompt"]
    if isinstance(prompt, str):  # the clients tokenize a text in the same way
        request["prompt_tokens"] = client.get_tokenizer().encode(prompt)
    elif all(hasattr(chunk, "tokens") for chunk in getattr(prompt, "chunks", ())):
        request["prompt_tokens"] = prompt.to_ints()
    else:  # with images
        return request | {"prompt_length": prompt.length}
    request["prompt_length"] = len(request["prompt_tokens"])
    return request


def _add_attribute(request: _Json, key: str, client: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(client, name, None)) is not None:
            request[key] = str(value)


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


def _train_op_request(op_name: str, client: Any, arguments: Mapping[str, Any]) -> _Json:
    request: _Json = {"op": op_name}
    _add_attribute(request, "model_id", client, "model_id", "_run_id")
    if "data" in arguments:
        request["num_data"] = len(arguments["data"])
    if "name" in arguments:
        request["name"] = str(arguments["name"])
    params = arguments.get("adam_params") or arguments.get("optim_params")
    if params is not None:
        request["hyperparams"] = {f: getattr(params, f, None) for f in _ADAM_FIELDS}
    return request


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
