"""What a renderer is called, and how it is pickled: by that name, not by its vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.tokenizer_utils import tokenizer_name

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer


class Named:
    """The part of a renderer that ``get_renderer`` fills in."""

    tokenizer: Tokenizer
    image_processor: Any
    spec: str | None = None
    """``name?option=value`` when made by ``get_renderer``."""
    resolved_options: Mapping[str, Any] = MappingProxyType({})
    """Options that the renderer chose when it was made, such as today's date: they become part of
    ``spec``, so that the renderer is made again with the same values."""
    model_name: str | None = None
    restore: Callable[..., Any] | None = None
    """Makes it again from its spec."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Says how to make the renderer again: by its spec and the name of its tokenizer."""
        if self.spec is None or self.restore is None:
            raise RendererError(
                f"{type(self).__name__}: cannot be pickled, because it was made without a name; "
                "make it with get_renderer (register_renderer gives a class of your own a name)"
            )
        source = tokenizer_name(self.tokenizer) or self.model_name
        if not source:
            raise RendererError(
                f"{self.spec}: cannot be pickled, because its tokenizer has no name; load it with "
                "get_tokenizer, or give it one with register_tokenizer"
            )
        return self.restore, (self.spec, source, self.image_processor, self.model_name)

    @property
    def _name(self) -> str:
        return self.spec or type(self).__name__
