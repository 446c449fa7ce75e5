"""What a renderer is called, and how it is pickled: by that name, not by its vocabulary."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.tokenizer_utils import tokenizer_name

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer


class RendererPicklingError(RendererError, pickle.PicklingError):
    """A renderer that no name leads back to cannot be pickled."""


class Named:
    """The part of a renderer that ``get_renderer`` fills in.

    The attributes are class defaults, so that a subclass need not call ``super().__init__``.
    """

    tokenizer: Tokenizer
    image_processor: Any = None
    resolved_options: Mapping[str, Any] = MappingProxyType({})
    """Options that the renderer chose when it was made, such as today's date: they become part of
    ``spec``, so that the renderer is made again with the same values."""
    restore: Callable[..., Any] | None = None
    """Makes a renderer again from its spec; the registry sets it."""
    _renderer_name: str | None = None
    _model_name: str | None = None
    _has_image_processor: bool = False

    @property
    def spec(self) -> str | None:
        """``name?option=value`` when made by ``get_renderer``, None otherwise."""
        return self._renderer_name

    @property
    def model_name(self) -> str | None:
        """Name of the model, by default that of the tokenizer; None without ``get_renderer``."""
        return self._model_name

    def __reduce__(self) -> tuple[Any, ...]:
        """Says how to make the renderer again: by its spec and the name of its tokenizer."""
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
