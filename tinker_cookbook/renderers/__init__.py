"""Renderers: messages to tokens with training weights, and sampled tokens back to messages.

``get_renderer(name, tokenizer)`` makes one; a chat format is one file of this package.
"""

from __future__ import annotations

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.chatml import ChatMLRenderer
from tinker_cookbook.renderers.content import (
    content_to_jsonable,
    ensure_list,
    ensure_text,
    format_content_as_string,
    get_text_content,
    has_thinking,
    message_to_jsonable,
    normalize_messages,
    parse_think_blocks,
    remove_thinking,
)
from tinker_cookbook.renderers.llama3 import Llama3Renderer
from tinker_cookbook.renderers.messages import (
    AudioPart,
    Content,
    ContentPart,
    ImagePart,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.renderers.parse_outcome import (
    PARSE_FAILURE_DETAIL_MAX_CHARS,
    UNTERMINATED_TOOL_BLOCK_ERROR,
    ParseFailureKind,
    ParseTermination,
    classify_parse_failure,
    detect_unterminated_tool_block,
)
from tinker_cookbook.renderers.qwen3 import (
    Qwen3DisableThinkingRenderer,
    Qwen3InstructRenderer,
    Qwen3Renderer,
)
from tinker_cookbook.renderers.registry import (
    check_renderer_name,
    get_registered_renderer_names,
    get_renderer,
    get_renderer_names,
    is_renderer_registered,
    register_renderer,
    unregister_renderer,
)
from tinker_cookbook.renderers.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.renderers.stop_token import parse_response_for_stop_token
from tinker_cookbook.renderers.streaming import (
    MessageDelta,
    MessageReader,
    ResponseParser,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    Utf8TokenDecoder,
)
from tinker_cookbook.renderers.tokens import tokens_weights_from_strings_weights
from tinker_cookbook.renderers.train_on_what import TrainOnWhat, select_trained
from tinker_cookbook.tokenizer_utils import Tokenizer

__all__ = [
    "AudioPart",
    "ChatMLRenderer",
    "Content",
    "ContentPart",
    "ImagePart",
    "Llama3Renderer",
    "Message",
    "ParseTermination",
    "Qwen3DisableThinkingRenderer",
    "Qwen3InstructRenderer",
    "Qwen3Renderer",
    "RenderContext",
    "RenderedMessage",
    "Renderer",
    "Role",
    "RoleColonRenderer",
    "TextPart",
    "ThinkingPart",
    "Tokenizer",
    "ToolCall",
    "ToolSpec",
    "TrainOnWhat",
    "UnparsedToolCall",
    "check_renderer_name",
    "content_to_jsonable",
    "ensure_list",
    "ensure_text",
    "format_content_as_string",
    "get_registered_renderer_names",
    "get_renderer",
    "get_renderer_names",
    "get_text_content",
    "has_thinking",
    "is_renderer_registered",
    "message_to_jsonable",
    "normalize_messages",
    "parse_response_for_stop_token",
    "parse_think_blocks",
    "register_renderer",
    "remove_thinking",
    "select_trained",
    "tokens_weights_from_strings_weights",
    "unregister_renderer",
    "PARSE_FAILURE_DETAIL_MAX_CHARS",
    "UNTERMINATED_TOOL_BLOCK_ERROR",
    "ParseFailureKind",
    "classify_parse_failure",
    "detect_unterminated_tool_block",
    "MessageDelta",
    "MessageReader",
    "ResponseParser",
    "StreamingMessageHeader",
    "StreamingTextDelta",
    "StreamingThinkingDelta",
    "Utf8TokenDecoder",
]
