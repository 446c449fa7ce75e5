"""Marks functions, classes, parameters and module attributes as deprecated."""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from tinker_cookbook import __version__

F = TypeVar("F", bound=Callable[..., Any])


def _parse_version(v: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, ``(0, 15, 0)`` for ``"0.15.0.dev3+g12"``."""
    digits = ["".join(itertools.takewhile(str.isdigit, part)) for part in v.split(".")]
    return tuple(int(number) for number in itertools.takewhile(bool, digits)) or (0,)


def _current_version() -> tuple[int, ...]:
    return _parse_version(__version__)


def _check_past_removal(removal_version: str | None) -> bool:
    return removal_version is not None and _current_version() >= _parse_version(removal_version)


def warn_deprecated(
    name: str,
    *,
    removal_version: str | None = None,
    message: str = "",
    stacklevel: int = 2,
) -> None:
    """Emits a ``DeprecationWarning``.

    Args:
        name: What is deprecated.
        removal_version: Version that removes it; ``None`` if that is not planned.
        message: What to use instead.
        stacklevel: As for ``warnings.warn``; 2 points at the caller of the deprecated function.

    Raises:
        RuntimeError: This version is ``removal_version`` or later.
    """
    planned = f" It will be removed in version {removal_version}." if removal_version else ""
    text = f"{name!r} is deprecated.{planned} {message}".rstrip()
    # An error, so that a release cannot forget to remove the name.
    if _check_past_removal(removal_version):
        raise RuntimeError(
            f"{text} (this is version {__version__}; it should have been removed by now)"
        )
    # One level more, for this function.
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


@overload
def deprecated(_func: F) -> F: ...


@overload
def deprecated(*, message: str = ..., removal_version: str | None = ...) -> Callable[[F], F]: ...


def deprecated(_func: Any = None, *, message: str = "", removal_version: str | None = None) -> Any:
    """Decorates a function or a class, so that a call warns; see :func:`warn_deprecated`."""

    def decorate(target: Any) -> Any:
        is_class = isinstance(target, type)
        name = f"{'Class' if is_class else 'Function'} {target.__qualname__}"
        # A class keeps its identity for isinstance, so only its constructor is wrapped.
        inner = target.__init__ if is_class else target

        @functools.wraps(inner)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warn_deprecated(name, removal_version=removal_version, message=message)
            return inner(*args, **kwargs)

        if not is_class:
            return warning
        target.__init__ = warning
        return target

    return decorate if _func is None else decorate(_func)


def make_deprecated_module_getattr(
    module_name: str, attrs: Mapping[str, tuple[str, str | None]]
) -> Callable[[str], Any]:
    """Returns a module-level ``__getattr__`` for names that have moved.

    Args:
        module_name: ``__name__`` of the module.
        attrs: Old name -> (``"package.module.NewName"``, removal version or ``None``).

    Raises:
        AttributeError: From the returned function, for a name that is not in ``attrs``.
        ValueError: From the returned function, for a new path without a dot.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in attrs:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        path, removal_version = attrs[name]
        module, _, new_name = path.rpartition(".")
        if not module:
            raise ValueError(
                f"{module_name}.{name}: got the new path {path!r}, expected a dotted path such "
                "as 'package.module.Name'"
            )
        # Resolved before the warning, so that a wrong path raises without one.
        value = getattr(importlib.import_module(module), new_name)
        warn_deprecated(
            f"{module_name}.{name}",
            removal_version=removal_version,
            message=f"Use {path} instead.",
        )
        return value

    return __getattr__
