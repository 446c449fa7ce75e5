"""What a subclass may leave out, so that classes written for the official cookbook work.

- A method may lack an optional keyword (``max_tokens`` of a completer, ``extra`` of
  ``Env.step``); it is then called without it: :func:`accepts`.
- Of two methods that do the same, a subclass may override only the official one
  (``parse_response``, not ``parse_response_streaming``), which then counts: :func:`overrides`.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=512)
def accepts(owner: type[Any], method: str, keyword: str) -> bool:
    """Returns whether a method of a class can be called with a keyword."""
    parameters = inspect.signature(getattr(owner, method)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return keyword in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def overrides(value: object, base: type[Any], method: str) -> bool:
    """Returns whether the class of ``value`` defines a method of ``base`` again."""
    return getattr(type(value), method) is not getattr(base, method)
