"""Renderers on real tokenizers, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def make_renderer(tokenizer_folder):
    """``make_renderer("qwen3", "qwen3")``: a renderer by name on a family's tokenizer."""
    return lambda name, family: get_renderer(name, get_tokenizer(tokenizer_folder(family)))
