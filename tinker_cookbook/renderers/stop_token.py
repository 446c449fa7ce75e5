"""Formats whose messages end with one special token."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import ParseTermination
from tinker_cookbook.renderers.messages import Message
from tinker_cookbook.tokenizer_utils import Tokenizer, decode_exactly, special_id


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


def split_at_stop_token(
    response: Sequence[int], stop_token: int, tokenizer: Tokenizer
) -> tuple[list[int], ParseTermination]:
    """Returns the tokens before the stop token, and how the response ended."""
    tokens = list(response)
    if stop_token in tokens:
        end = tokens.index(stop_token)
        clean = end == len(tokens) - 1
        how = ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED
        return tokens[:end], how
    if tokens and tokens[-1] == special_id(tokenizer, "eos"):
        return tokens[:-1], ParseTermination.EOS
    return tokens, ParseTermination.MALFORMED


def parse_response_for_stop_token(
    response: Sequence[int], tokenizer: Tokenizer, stop_token: int
) -> tuple[Message, ParseTermination]:
    """Returns the text before ``stop_token`` as an assistant message, and how it ended."""
    tokens, how = split_at_stop_token(response, stop_token, tokenizer)
    return Message(role="assistant", content=decode_exactly(tokenizer, tokens)), how
