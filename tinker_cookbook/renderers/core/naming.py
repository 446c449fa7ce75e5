"""Name of a renderer, by which it is pickled instead of its vocabulary."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.tokenizer_utils import tokenizer_name

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer


logger = logging.getLogger("tinker_cookbook.renderers.base")


class RendererPicklingError(RendererError, pickle.PicklingError):
    """Renderer without a registered name, which cannot be pickled."""


class Named:
    """State of a renderer that ``get_renderer`` sets.

    The attributes have class defaults, so that a subclass need not call ``super().__init__``.
    """

    tokenizer: Tokenizer
    image_processor: Any = None
    resolved_options: Mapping[str, Any] = MappingProxyType({})
    """Options whose default depends on the day, such as the date: ``spec`` holds them, so that the
    restored renderer has the same values."""
    restore: Callable[..., Any] | None = None
    """Returns the renderer of a spec; the registry sets it."""
    _renderer_name: str | None = None
    _model_name: str | None = None
    _has_image_processor: bool = False

    @property
    def spec(self) -> str | None:
        """``name?option=value`` of a renderer by ``get_renderer``, None for others."""
        return self._renderer_name

    @property
    def model_name(self) -> str | None:
        """Name of the model, by default that of the tokenizer; None without ``get_renderer``."""
        return self._model_name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the spec and the name of the tokenizer."""
        if self.spec is None or self.restore is None:
            raise RendererPicklingError(
                f"{type(self).__name__}: cannot be pickled, because its name is not set; make it "
                "with get_renderer (register_renderer gives a class of your own a name), or set "
                "_renderer_name and _model_name"
            )
        source = tokenizer_name(self.tokenizer) or self.model_name
        if not source:
            raise RendererPicklingError(
                f"{self.spec}: cannot be pickled, because its tokenizer has no name; load it with "
                "get_tokenizer, or give it one with register_tokenizer"
            )
        return self.restore, (self.spec, source, self.image_processor, self.model_name)

    @property
    def _name(self) -> str:
        return self.spec or type(self).__name__

    @cached_property
    def _warned(self) -> set[str]:
        return set()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)
