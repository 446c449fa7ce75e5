"""The chat in this process: turns, commands, output and files (about 5 s, most of it the model)."""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import replace
from types import SimpleNamespace

import chz
import pytest
from PIL import Image
from rich.console import Console
from tinker import types

from tinker_cookbook.backends import connect
from tinker_cookbook.chat.__main__ import Config
from tinker_cookbook.chat.answers import (
    ChatModel,
    SamplingChoices,
    chat_models,
)
from tinker_cookbook.chat.loop import ChatLoop
from tinker_cookbook.chat.session import ChatSession
from tinker_cookbook.chat_app import tinker_chat_cli
from tinker_cookbook.exceptions import ConfigurationError, DataError, TinkerCookbookError
from tinker_cookbook.record.read import open_record, whole_prompts
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.sampling_model import (
    SamplingModel,
    SamplingModelSettings,
    open_sampling_model,
)
from tinker_cookbook.supervised.conversation_file import read_conversations
from tinker_cookbook.third_party.openai_compat import tinker_messages_to_openai
from tinker_cookbook.tokenizer_utils import get_tokenizer

CHOICES = SamplingChoices(max_tokens=24, temperature=0.7, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def opened(stories_model):
    """The story model, ready to chat."""
    connection = connect("local", device="cpu", dtype="float32")
    settings = SamplingModelSettings(model_name=stories_model, renderer_name="role_colon")

    async def open_it():
        return await chat_models(connection, [await open_sampling_model(connection, settings)])

    yield asyncio.run(open_it())[0]
    connection.close()


class Recorder:
    """Client that keeps the prompts and passes requests on."""

    def __init__(self, client):
        self.client, self.prompts = client, []

    def sample(self, prompt, num_samples, sampling_params, **more):
        self.prompts.append(prompt.to_ints())
        return self.client.sample(prompt, num_samples, sampling_params, **more)


class Scripted:
    """Client that samples given tokens, and with ``waits`` never ends."""

    def __init__(self, tokens, waits=False):
        self.tokens, self.waits = tokens, waits

    def sample(self, prompt, num_samples, sampling_params, on_token):
        from concurrent.futures import Future

        future = Future()
        for i in range(1, len(self.tokens) + 1):
            part = self.tokens[:i]
            on_token(0, SimpleNamespace(tokens=part, logprobs=[-0.5] * i))
        if not self.waits:
            future.set_result(None)
        return SimpleNamespace(future=lambda: future)


def scripted(tokenizer, tokens, renderer_name="qwen3", label="one", **more):
    renderer = get_renderer(renderer_name, tokenizer)
    client = Scripted(tokens, **more)
    model = SamplingModel("base", label, client, renderer, renderer_name, "asked for", tokenizer)
    return ChatModel(model, label, context_length=1000, streams=True)


def chat_of(*models, choices=CHOICES, width=None, system=""):
    """A chat whose output and notes can be read."""
    notes, output = [], io.StringIO()
    terminal = width is not None
    console = Console(
        file=output, width=width, force_terminal=terminal, highlight=False, _environ={}
    )
    session = ChatSession(models, choices, notes.append, system)
    return SimpleNamespace(
        session=session,
        loop=ChatLoop(session, asyncio.Runner(), console, notes.append),
        notes=notes,
        output=output,
    )


def test_pieces_form_the_answer_which_is_that_of_the_plain_client(opened):
    messages = [{"role": "user", "content": "Once upon a time"}]
    pieces = []
    streamed = asyncio.run(opened.answer(messages, CHOICES, pieces.append))
    whole = asyncio.run(replace(opened, streams=False).answer(messages, CHOICES, lambda _: None))
    assert streamed == whole
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == streamed.message["content"]
    # The reference is the SDK's method with the tokens of the renderer.
    renderer, client = opened.model.renderer, opened.model.client
    params = types.SamplingParams(
        max_tokens=24, temperature=0.7, top_p=0.9, seed=3, stop=renderer.get_stop_sequences()
    )
    (sequence,) = client.sample(opened.prompt(messages), 1, params).result().sequences
    assert [token.logprob for token in streamed.tokens] == sequence.logprobs
    text = opened.model.tokenizer.decode(sequence.tokens)
    assert b"".join(token.raw for token in streamed.tokens).decode().strip() == text.strip()


def test_each_prompt_is_the_rendered_history(opened):
    recorder = Recorder(opened.model.client)
    chat = chat_of(replace(opened, model=replace(opened.model, client=recorder)), system="Be kind.")
    for line in ("Once upon a time", "And then?", "/retry"):
        chat.loop.handle(line)
    history = chat.session.histories[0]
    assert [message["role"] for message in history] == ["user", "assistant"] * 2
    system = [{"role": "system", "content": "Be kind."}]
    prompt = opened.model.renderer.build_generation_prompt
    expected = [[*system, *history[:count]] for count in (1, 3, 3)]
    assert recorder.prompts == [prompt(messages).to_ints() for messages in expected]


def test_retry_samples_another_answer_and_undo_removes_the_turn(opened):
    chat = chat_of(opened)
    chat.loop.handle("Once upon a time")
    first = chat.session.histories[0][1]["content"]
    chat.loop.handle("/retry")
    assert len(chat.session.histories[0]) == 2
    second = chat.session.histories[0][1]["content"]
    assert second != first
    # Without a new answer, here because the system prompt fills the context, the old one stays.
    chat.session.system_prompt = "word " * 600
    with pytest.raises(DataError, match="has 512"):
        chat.loop.handle("/retry")
    assert chat.session.histories[0][1]["content"] == second
    assert chat.notes[-1] == "the earlier answer was kept"
    chat.session.system_prompt = ""
    for line in ("More", "/undo", "/tokens"):  # of the answer that is the last one again
        chat.loop.handle(line)
    assert chat.session.turns[-1][0].message["content"] == second
    chat.loop.handle("/undo")
    assert chat.session.histories == [[]]
    with pytest.raises(DataError, match="no turn to remove"):
        chat.loop.handle("/undo")


def test_control_characters_do_not_reach_the_terminal(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    evil = "a\x1b]0;title\x07b\x9bc\r"
    chat = chat_of(scripted(tokenizer, tokenizer.encode(evil)), width=80)
    chat.loop._console.file.isatty = lambda: True
    chat.loop.handle("?")
    shown = chat.output.getvalue()
    assert "a␛]0;title␇b" in shown
    assert not {"\x07", "\x9b", "\r"} & set(shown)
    chat.loop.handle("/tokens")
    assert not {"\x07", "\x9b", "\r"} & set(chat.output.getvalue())


def test_an_interruption_keeps_what_was_sampled(tokenizer_folder):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    model = scripted(tokenizer, tokenizer.encode("Half an ans"), waits=True)
    chat = chat_of(model, width=80)

    async def send_and_interrupt():
        task = asyncio.create_task(chat.session.send("?", lambda i: lambda piece: None))
        await asyncio.sleep(0.05)
        task.cancel()
        return await task

    (answer,) = asyncio.run(send_and_interrupt())
    assert (answer.ending, answer.message["content"]) == ("interrupted", "Half an ans")
    assert chat.session.histories[0][-1]["content"] == "Half an ans"
    # Nothing sampled: the turn is removed.
    chat.session.models[0].model.client.tokens = []
    assert asyncio.run(send_and_interrupt())[0].is_empty
    assert len(chat.session.histories[0]) == 2


def test_a_saved_conversation_trains_and_replaces_its_shorter_form(opened, tmp_path):
    path = tmp_path / "new" / "chats.jsonl"
    chat = chat_of(opened, system="Be kind.")
    with pytest.raises(DataError, match="nothing to save"):
        chat.loop.handle(f"/save {path}")
    chat.loop.handle("Once upon a time")
    chat.loop.handle(f"/save {path}")
    chat.loop.handle("And then?")
    chat.loop.handle(f"/save {path}")
    (saved,) = read_conversations(path)
    assert [m["role"] for m in saved] == ["system", *["user", "assistant"] * 2]
    assert saved[1:] == chat.session.histories[0]
    chat.loop.handle("/reset")
    chat.loop.handle("Another one")
    chat.loop.handle(f"/save {path}")
    assert "2 conversations now; 1 of its answers were truncated or stopped" in chat.notes[-1]
    record = open_record(path.with_name("chats.jsonl.tokens"))
    assert record.steps() == {0: ["chat"], 1: ["chat"]}
    # The prompt and the tokens of each answer, as they were sampled.
    table = record.table(0, "chat").to_pylist()
    (prompt, _) = whole_prompts(table)
    assert prompt.tolist() == opened.prompt(saved[:2]).to_ints()
    for row, message in zip(table, saved[2::2], strict=True):
        assert len(row["logprobs"]) == len(row["answer"])
        renderer = opened.model.renderer
        assert renderer.parse_response(row["answer"])[0]["content"] == message["content"]
    assert read_conversations(path)[0] == saved
    notes = tmp_path / "notes.txt"
    notes.write_text("No newline at the end")
    with pytest.raises(DataError, match=r"notes\.txt: the last line is not a JSON object"):
        chat.loop.handle(f"/save {notes}")
    assert notes.read_text() == "No newline at the end"
    with pytest.raises(ConfigurationError, match="cannot be written"):
        chat.loop.handle("/save /proc/nothing/chats.jsonl")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "model_path: got none"),
        ({"model_path": "base"}, "expected a checkpoint too, or model_name="),
        ({"model_path": "tinker://RUN/final"}, "expected tinker://RUN/sampler_weights/NAME"),
        ({"model_name": "x", "renderer_name": "qwen33"}, "renderer_name"),
    ],
)
def test_invalid_settings_are_refused_before_loading(settings, expected):
    with pytest.raises(ConfigurationError, match=expected):
        Config(**settings).check()


def test_the_official_command_has_its_keys_and_defaults(monkeypatch, opened):
    started = []
    monkeypatch.setattr(tinker_chat_cli.chat, "main", started.append)
    official = tinker_chat_cli.Config()
    assert chz.asdict(official) == {
        "base_model": "Qwen/Qwen3.5-9B-Base",
        "model_path": None,
        "max_tokens": 512,
        "temperature": 0.7,
        "top_p": 0.9,
        "base_url": None,
    }
    tinker_chat_cli.main(official)
    path = "tinker://RUN/sampler_weights/final"
    tinker_chat_cli.main(tinker_chat_cli.Config(model_path=path, max_tokens=9))
    assert started[0].model_name == "Qwen/Qwen3.5-9B-Base"
    assert (started[1].model_name, started[1].model_path) == (None, path)
    assert started[1].max_tokens == 9
    session = tinker_chat_cli.ChatSession(opened.model.client, opened.model.renderer, 12)
    session.add_user_message("Once upon a time")
    text = asyncio.run(session.generate_response())
    assert session.messages[-1] == {"role": "assistant", "content": text}
    session.clear_history()
    assert session.messages == []


def test_an_image_is_shown_with_the_next_message(vision_tokenizer, tokenizer_folder, tmp_path):
    path = str(tmp_path / "a red.png")
    Image.new("RGB", (64, 48), "red").save(path)
    tokenizer = get_tokenizer(vision_tokenizer)
    model = scripted(tokenizer, tokenizer.encode("red<|im_end|>"), "qwen3_vl_instruct")
    chat = chat_of(model)
    shown = f"/image '{path}'"  # as a terminal writes a file that is dragged into it
    for line in (shown, "What?", "/retry", "Sure?", f"/save {tmp_path}/x"):
        chat.loop.handle(line)
    assert re.fullmatch("one: .*a red.png' takes [0-9]+ tokens", chat.notes[0])
    picture, text = {"type": "image", "image": path}, {"type": "text", "text": "What?"}
    history = chat.session.histories[0]
    assert [m["content"] for m in history] == [[picture, text], "red", "Sure?", "red"]
    (conversation,) = read_conversations(tmp_path / "x", renderer=lambda: model.model.renderer)
    assert conversation[0]["content"] == [picture, text]
    body = tinker_messages_to_openai(history)["messages"][0]["content"]
    assert body[0]["image_url"]["url"].startswith("data:image/png;base64,")
    blind = chat_of(scripted(get_tokenizer(tokenizer_folder("qwen3")), []))
    for one, line, error in (
        (chat, "/image", "expected /image FILE"),
        (chat, "/image no.png", r"^/image no.png: one: image: '.*/no.png' cannot be opened"),
        (blind, f"/image {path}", "^/image .*red.png: one: .*cannot write a part of type 'image'"),
    ):
        with pytest.raises(TinkerCookbookError, match=error):
            one.loop.handle(line)
