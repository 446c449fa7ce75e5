"""Conversion of OpenAI's messages, tools and audio, and back (under 1 s)."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion_tool_param import ChatCompletionToolParam
from pydantic import TypeAdapter

from tinker_cookbook.audio_processing_utils import audio_part_to_input_audio
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.third_party.openai_compat import (
    openai_messages_to_tinker,
    openai_tools_to_tinker,
    tinker_messages_to_openai,
    tool_specs_to_openai_tools,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


def wav_file() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 8000, 4, "NONE", ""))
        writer.writeframes(b"\0" * 8)
    return file.getvalue()


def test_a_conversation_in_both_directions(tmp_path):
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 1), "red")
    image.save(tmp_path / "red.png", compress_level=1)
    data = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    sound = base64.b64encode(wav_file()).decode()
    thought = {"type": "thinking", "thinking": "hmm"}
    image_part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    sound_part = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    both: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"role": "system", "content": "Be kind."},) * 2,
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image", "image": image_part["image_url"]["url"]},
                    {"type": "audio", "audio": wav_file(), "format": "wav"},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is this?"}, image_part, sound_part],
            },
        ),
        (
            {"role": "assistant", "content": [thought], "tool_calls": [ToolCall(**CALL)]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hmm",
                "tool_calls": [CALL],
            },
        ),
        ({"role": "tool", "content": "1", "tool_call_id": "c1"},) * 2,
        (
            {"role": "assistant", "content": [thought, {"type": "text", "text": "1"}]},
            {"role": "assistant", "content": "1", "reasoning_content": "hmm"},
        ),
    ]
    ours, theirs = (list(side) for side in zip(*both, strict=True))
    declare = {"role": "tool_declare", "content": json.dumps(tool_specs_to_openai_tools([TOOL]))}
    written = tinker_messages_to_openai([ours[0], declare, *ours[1:]])
    assert written["messages"] == theirs
    assert openai_messages_to_tinker(theirs) == ours
    assert openai_tools_to_tinker([{"type": "web_search"}, *written["tools"]]) == [TOOL]
    # The types of OpenAI's client.
    for message in theirs:
        TypeAdapter(ChatCompletionMessageParam).validate_python(message)
    for tool in written["tools"]:
        TypeAdapter(ChatCompletionToolParam).validate_python(tool)
    # A path and a Pillow image are the same bytes as the data URI.
    for source in (str(tmp_path / "red.png"), image_part["image_url"]["url"], image):
        parts = [{"type": "image", "image": source}] * 2
        (message,) = tinker_messages_to_openai([{"role": "user", "content": parts}])["messages"]
        assert message["content"][0] == image_part


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": "", "reasoning_content": "x"}, "only valid on assistant"),
        ({"role": "assistant", "content": "", "reasoning": {"a": 1}}, "expected a text"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "'function_call'"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, r"\[0\]\.type: got 'file'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, 'data URI, {"url"'),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?"}}]},
            "got",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_refused_with_the_place(message, error):
    with pytest.raises(ValueError, match=rf"messages\[1\].*{error}"):
        openai_messages_to_tinker([{"role": "user", "content": "Hi"}, message])


def test_audio(tmp_path):
    data = base64.b64encode(wav_file()).decode()
    (tmp_path / "a b.WAVE").write_bytes(wav_file())
    uri = (tmp_path / "a b.WAVE").as_uri()
    frames = {"num_frames": 4, "sample_rate": 8000}
    readable = [
        ({"audio": wav_file()}, "wav", {}),
        ({"audio": str(tmp_path / "a b.WAVE"), **frames}, "wav", frames),
        ({"audio": uri}, "wav", {}),
        ({"audio": f"data:audio/x-wav;base64,{data}"}, "wav", {}),
        ({"audio": f"data:audio/mpeg;base64,{data}", **frames}, "mp3", frames),
        ({"audio": uri, "format": "flac", **frames}, "flac", frames),
    ]
    for part, kind, extra in readable:
        written = audio_part_to_input_audio({"type": "audio", **part})
        assert written == {"data": data, "format": kind, **extra}, part
    refused = [
        ({"audio": 5}, "got int, expected bytes"),
        ({"audio": "s3://b/a.wav"}, "does not fetch remote audio URLs"),
        ({"audio": "none.wav"}, "audio: 'none.wav' cannot be opened"),
        ({"audio": "data:image/png;base64,AA=="}, "expected a data URI such as 'data:audio/wav"),
        ({"audio": f"data:audio/ogg;base64,{data}"}, "format: got 'ogg'"),
        ({"audio": f"data:audio/wav;base64,{data}", "format": "mp3"}, "the data URI says 'wav'"),
        ({"audio": b"", "format": "mp3"}, "got neither; the part must provide num_frames"),
        ({"audio": b"", "num_frames": 4}, "got num_frames; the part must provide"),
        ({"audio": b"", "num_frames": 4, "sample_rate": 0}, "must be positive"),
    ]
    for part, error in refused:
        with pytest.raises(ValueError, match=error):
            audio_part_to_input_audio({"type": "audio", **part})
