"""Formats whose messages end with one special token."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.messages import Message
from tinker_cookbook.renderers.core.parse_outcome import ParseTermination
from tinker_cookbook.renderers.core.streaming import PlainReader, ResponseParser
from tinker_cookbook.tokenizer_utils import Tokenizer, special_id


def special_token_id(tokenizer: Tokenizer, token: str, renderer: str) -> int:
    """Returns the id of a special token; RendererError where the vocabulary has no such token."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != token:
        raise RendererError(
            f"renderer_name: {renderer} needs the special token {token!r}, which the tokenizer "
            f"{getattr(tokenizer, 'name_or_path', '')!r} does not have; choose the renderer of "
            "the model's family, or role_colon, which works with any tokenizer"
        )
    return token_id


def parse_response_for_stop_token(
    response: Sequence[int], tokenizer: Tokenizer, stop_token: int
) -> tuple[Message, ParseTermination]:
    """Returns the text before ``stop_token`` as an assistant message, and how it ended.

    Raises RendererError where ``stop_token`` occurs more than once.
    """
    eos = special_id(tokenizer, "eos")
    parser = ResponseParser(TextCodec(tokenizer), PlainReader(), [stop_token], eos)
    tokens = list(response)
    parser.check_stops(tokens)
    parser.feed(tokens)
    parser.finish()
    return parser.message, parser.termination
