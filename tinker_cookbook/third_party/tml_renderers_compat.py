"""Messages of this package as messages of tml-renderers, and back.

The package itself reads dictionaries of the OpenAI API; this module writes such dictionaries, and
reads its message objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from tinker_cookbook.audio_processing_utils import audio_part_to_input_audio
from tinker_cookbook.image_processing_utils import image_to_data_uri
from tinker_cookbook.renderers.base import Message, Role, ToolCall, TrainOnWhat, select_trained
from tinker_cookbook.tokenizer_utils import ensure_tml_renderers_importable

if TYPE_CHECKING:
    from tml_renderers import chat as tml_chat

_TRAINED = (
    TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    TrainOnWhat.LAST_ASSISTANT_TURN,
    TrainOnWhat.CUSTOMIZED,
)


def tinker_messages_to_message_list(messages: Sequence[Message]) -> tml_chat.MessageList:
    """Returns the messages as a ``MessageList``, in which ``ModelEndSampling`` ends each answer.

    ``trainable`` and ``unparsed_tool_calls`` have no counterpart there and are left out. Raises
    ValueError for a role, a part or a declaration of tools that tml-renderers does not have.
    """
    return _chat().MessageList([part for message in messages for part in _tml_messages(message)])


def tinker_messages_to_sft_message_list(
    messages: Sequence[Message], train_on_what: TrainOnWhat
) -> tml_chat.MessageList:
    """Returns the messages as a ``MessageList``; answers that are not trained have weight 0.

    Under ``CUSTOMIZED``, an answer without ``trainable`` is trained. Raises NotImplementedError for
    a ``train_on_what`` that trains other messages than answers.
    """
    if train_on_what not in _TRAINED:
        raise NotImplementedError(
            f"train_on_what: got {train_on_what.value!r}, expected one of "
            f"{', '.join(what.value for what in _TRAINED)}: tml-renderers trains answers only"
        )
    chat = _chat()
    if train_on_what is TrainOnWhat.CUSTOMIZED:
        trained = [message.get("trainable", True) for message in messages]
    else:
        # Of the other ways, ``trainable`` changes none here.
        plain = [Message(role=m["role"], content=m["content"]) for m in messages]
        trained = select_trained(plain, train_on_what)
    untrained = chat.MessageMetadata(training_metadata=chat.TrainingMetadata(0.0, False))
    model = chat.AuthorKind.Model
    return chat.MessageList(
        [
            part.copy(message_metadata=untrained) if part.author.kind == model and not on else part
            for message, on in zip(messages, trained, strict=True)
            for part in _tml_messages(message)
        ]
    )


def message_list_to_tinker_messages(messages: tml_chat.MessageList) -> list[Message]:
    """Returns the messages of a ``MessageList``; consecutive ones of one author become one.

    They have what tml-renderers stores: images and audio as data URIs, schemas of tools with sorted
    keys. Weights are not read. Raises ValueError for content without a part here.
    """
    return [*map(_tinker_message, _chat().OpenAIMessage.from_messages(messages.messages))]


def _chat() -> Any:
    ensure_tml_renderers_importable()
    return import_module("tml_renderers.chat")


# Stands for an address of audio while the wheel, which reads none, reads a message.
_ADDRESS = "\ufdd0"


def _tml_messages(message: Message) -> list[tml_chat.Message]:
    chat = _chat()
    content = message.get("content") or ""
    written: dict[str, Any] = {**message, "content": content}
    addresses: list[Any] = []
    if not isinstance(content, str):
        # The renderer decides whether it can load an address.
        addresses = [_audio_pointer(part) for part in content if _is_remote_audio(part)]
        written["content"] = [_openai_part(part) for part in content]
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            call.model_dump() if isinstance(call, ToolCall) else call for call in calls
        ]
    (turn,) = chat.OpenAIMessage.from_oss_messages([written])
    if addresses:
        place = chat.Text(_ADDRESS)
        turn.content = [addresses.pop(0) if item == place else item for item in turn.content]
    return turn.to_messages()


def _openai_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if _is_remote_audio(part):
        return {"type": "text", "text": _ADDRESS}
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": image_to_data_uri(part["image"])}}
    if part["type"] == "audio":
        return {"type": "input_audio", "input_audio": audio_part_to_input_audio(cast(Any, part))}
    return part


def _is_remote_audio(part: Mapping[str, Any]) -> bool:
    source = part.get("audio")
    return isinstance(source, str) and urlsplit(source).scheme not in ("", "data", "file")


def _audio_pointer(part: Mapping[str, Any]) -> tml_chat.AudioPointer:
    if {"format", "num_frames", "sample_rate"} - part.keys():
        raise ValueError("content: audio at an address needs format, num_frames and sample_rate")
    chat = _chat()
    kind = getattr(chat.AudioFormat, str(part["format"]).title())
    return chat.AudioPointer(part["audio"], kind, part["num_frames"], part["sample_rate"])


def _tinker_message(turn: tml_chat.OpenAIMessage) -> Message:
    chat = _chat()
    if len(turn.content) == 1 and isinstance(turn.content[0], chat.ToolDeclareJson):
        (declared,) = chat.OpenAIMessage.to_oss_messages([turn])
        return Message(role=declared["role"], content=declared["content"])
    roles: dict[Any, Role] = {
        chat.AuthorKind.User: "user",
        chat.AuthorKind.Model: "assistant",
        chat.AuthorKind.System: "system",
        chat.AuthorKind.Tool: "tool",
    }
    calls = [item for item in turn.content if isinstance(item, chat.InvokeTool)]
    parts = [_part(item) for item in turn.content if not isinstance(item, chat.InvokeTool)]
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    message = Message(role=roles[turn.author.kind], content=parts[0]["text"] if is_text else parts)
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_name is not None:
        message["name"] = turn.tool_name
    return message


def _part(content: Any) -> Any:
    chat = _chat()
    if isinstance(content, chat.Text | chat.ToolError):
        return {"type": "text", "text": content.text}
    if isinstance(content, chat.Thinking):
        return {"type": "thinking", "thinking": content.text}
    if isinstance(content, chat.ImagePointer):
        return {"type": "image", "image": content.location}
    if not isinstance(content, chat.AudioPointer):
        raise ValueError(f"content: got {type(content).__name__}, which no message has here")
    formats = {chat.AudioFormat.Wav: "wav", chat.AudioFormat.Mp3: "mp3"}
    kind = formats.get(content.format, "flac")
    lengths = {"num_frames": content.num_frames, "sample_rate": content.sample_rate}
    # The header of a WAV file has its length.
    known = kind == "wav" and content.location.startswith("data:")
    return {"type": "audio", "audio": content.location, "format": kind} | ({} if known else lengths)


def _tool_call(call: Any) -> ToolCall:
    if call.text is not None:
        raise ValueError("content: got a text tool call, expected one with a name and arguments")
    arguments = json.dumps({argument.name: json.loads(argument.value) for argument in call.args})
    function = ToolCall.FunctionBody(name=call.name, arguments=arguments)
    return ToolCall(id=call.tool_call_id, function=function)
