"""The renderer: messages to tokens with training weights, sampled tokens back to a message.

A chat format is one subclass with a few hooks. Token ids are those of the model's chat
template, with three differences:

- The name of a control token in a message (``<|im_end|>``) stays plain text, so that no dataset row
  or tool result can forge a turn. A template joins text before it encodes, so the name becomes that
  token; ``?split_special_tokens=false`` after a renderer's name does the same, with a warning.
- The text of an assistant message is encoded apart from its header, because at inference the model
  continues from the header's tokens. A template would merge the header's line break with white
  space at the beginning of the answer into one token, which no prompt ends with.
- A supervised example ends with the token that ends its last message. Many templates write a line
  break after it, which is never sampled.

The types and functions that subclasses need can be imported from here.
"""

# ruff: noqa: F403, F405 - the names are listed in __all__
from __future__ import annotations

from tinker_cookbook.renderers.core.blocks import *
from tinker_cookbook.renderers.core.codec import *
from tinker_cookbook.renderers.core.images import *
from tinker_cookbook.renderers.core.messages import *
from tinker_cookbook.renderers.core.parsing import *
from tinker_cookbook.renderers.core.rendered import *
from tinker_cookbook.renderers.core.renderer import *
from tinker_cookbook.renderers.core.tool_calls import *
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

__all__ = [
    "PARSE_FAILURE_DETAIL_MAX_CHARS",
    "UNTERMINATED_TOOL_BLOCK_ERROR",
    "AudioPart",
    "Content",
    "ContentPart",
    "Example",
    "ImagePart",
    "ImageProcessorProtocol",
    "Message",
    "MessageDelta",
    "MessageReader",
    "ParseFailureKind",
    "ParseTermination",
    "RenderContext",
    "RenderedMessage",
    "Renderer",
    "ResponseParser",
    "Role",
    "StreamingMessageHeader",
    "StreamingTextDelta",
    "StreamingThinkingDelta",
    "StrictBase",
    "TextPart",
    "ThinkingPart",
    "ToolCall",
    "ToolSpec",
    "TrainOnWhat",
    "UnparsedToolCall",
    "UnsupportedToolsError",
    "Utf8TokenDecoder",
    "content_to_jsonable",
    "ensure_list",
    "ensure_text",
    "format_content_as_string",
    "get_text_content",
    "has_thinking",
    "image_to_chunk",
    "message_to_jsonable",
    "normalize_messages",
    "remove_thinking",
    "select_trained",
]
