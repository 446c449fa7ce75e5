"""Writes ``mistral_vectors.json``: conversations, and the text that Mistral's own library gives.

Needs ``mistral-common==1.5.4`` (the file in the repository was made with it), which nothing else
in the repository does: ``python make_mistral_vectors.py`` in an environment of its own. The library
validates with its strictest rules: those for fine-tuning where a conversation ends with an answer,
those for serving elsewhere.

A vector is ``[messages, tools, texts]``. A message is ``[role, content]``, a result has the id of
its call behind it, and an answer a list of calls ``[id, name, arguments]``. ``tools`` counts the
tools of ``TOOLS`` that are declared. ``texts`` follow ``VERSIONS``, with control tokens by name:
those of the Tekken vocabulary as they are (``v7_tekken`` is v7 on that vocabulary), those of
SentencePiece, which differ by spaces alone, as the beginning of their SHA-256. They are put
together from the pieces, spaces as spaces.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from pathlib import Path

CONVERSATIONS = 220
VERSIONS = ("v3_tekken", "v7_tekken", "v3", "v7")
VECTORS = Path(__file__).with_name("mistral_vectors.json")
TOOLS = [
    {
        "name": "f",
        "description": 'the "weather", é',
        "parameters": {"type": "object"},
    },
    {"name": "get-x_2", "description": "", "parameters": {}},
]
WORDS = [
    *[
        "Hello",
        " world",
        "é",
        "e\u0301",
        "你好",
        "🙂",
        "\u00a0",
        "'s",
        "12345",
        "{}",
        '"x"',
        "[1, 2]",
    ],
    *[" ", "  ", "\n", "\n\n", "\t", "\r\n", "[", "[INST]", "</s>", "[TOOL_CALLS]", "<s>", "\\n"],
    *["def f(x):\n    return x", "null", "-0.50", "{ 'a' }", "\u0301", "ﬁ"],
]
RESULTS = ["", "{}", '{"a":1,"b":[ true ]}', "4 °C", "null", "1.0", '"\\u00e9"', " [1]\n", "[INST]"]
TWO = ["tool", "tool"]
ARGUMENTS = [
    "{}",
    "",
    '{"q":"a \\"b\\""}',
    '{"q": "é", "n": 1}',
    '{ "n": [1.50, null, "\\u00fc"] }',
]


def words(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def answer_text(rng: random.Random) -> str:
    return next(text for text in iter(lambda: words(rng, 3), None) if text.rstrip(" "))


def conversation(rng: random.Random) -> list[dict]:
    """Roles in any order that the library takes; it ends anywhere."""
    messages = [
        {"role": "system", "content": words(rng, 2)} for _ in range(rng.choice([0, 0, 1, 1, 1, 2]))
    ]
    if rng.random() < 0.05 and messages:
        messages += [{"role": "assistant", "content": answer_text(rng)}]
    for _ in range(rng.choice([1, 1, 2])):
        messages += [
            {"role": "user", "content": words(rng, 3)} for _ in range(rng.choice([1, 1, 1, 1, 2]))
        ]
        if rng.random() < 0.07:
            messages += [{"role": "system", "content": words(rng, 2)}]
        for _ in range(rng.choice([0, 0, 0, 1])):
            messages += calls_and_results(rng)
        messages += [
            {"role": "assistant", "content": answer_text(rng)}
            for _ in range(rng.choice([1, 1, 1, 1, 2]))
        ]
    # Not between two results: those for serving ask for all results of the calls before.
    ends = [
        i for i in range(1, len(messages)) if [m["role"] for m in messages[i - 1 : i + 1]] != TWO
    ]
    return messages if rng.random() < 0.5 else messages[: rng.choice(ends)]


def calls_and_results(rng: random.Random) -> list[dict]:
    ids = ["".join(rng.choices("abcXYZ019", k=9)) for _ in range(rng.choice([1, 1, 2]))]
    calls = [
        {"id": id_, "function": {"name": rng.choice(TOOLS)["name"], "arguments": chosen}}
        for id_ in ids
        for chosen in [rng.choice(ARGUMENTS)]
    ]
    texts = [rng.choice(RESULTS) if rng.random() < 0.7 else words(rng, 2) for _ in ids]
    results = [
        {"role": "tool", "content": text, "tool_call_id": id_}
        for id_, text in zip(ids, texts, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def load() -> dict[tuple[str, str], object]:
    """Returns the library's encoders by version and mode."""
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    data = MistralTokenizer._data_path()
    files = {
        "v3": data / "mistral_instruct_tokenizer_240323.model.v3",
        "v3_tekken": data / "tekken_240718.json",
        "v7": data / "mistral_instruct_tokenizer_241114.model.v7",
        "v7_tekken": Path(tempfile.mkdtemp()) / "tekken_v7.json",
    }
    tekken = json.loads(files["v3_tekken"].read_text(encoding="utf-8"))
    tekken["config"]["version"] = "v7"
    files["v7_tekken"].write_text(json.dumps(tekken), encoding="utf-8")
    return {
        (version, mode): MistralTokenizer.from_file(str(path), mode=ValidationMode(mode))
        for version, path in files.items()
        for mode in ("serving", "finetuning")
    }


def encode(encoders: dict, version: str, messages: list[dict], tools: list[dict]):
    """Returns the library's tokens and text of a conversation."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    mode = "finetuning" if messages[-1]["role"] == "assistant" else "serving"
    request = ChatCompletionRequest(
        model="any",
        messages=messages,
        tools=[{"type": "function", "function": tool} for tool in tools] or None,
    )
    encoder = encoders[version, mode]
    found = encoder.encode_chat_completion(request)
    if version.endswith("tekken"):
        return found.tokens, found.text
    return found.tokens, spelled(encoder.instruct_tokenizer.tokenizer, found.tokens)


def spelled(tokenizer, tokens: list[int]) -> str:
    """Returns the text of pieces: ``▁`` is a space, ``<0x0A>`` a byte."""
    run = b""
    for token in tokens:
        piece = tokenizer.id_to_piece(token)
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        run += bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
    return run.decode()


def digest(text: str) -> str:
    """Returns what stands for a text of a SentencePiece vocabulary."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def packed(message: dict) -> list:
    """Returns a message as it is written to the file."""
    calls = [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", [])
    ]
    behind = [calls] if calls else [message["tool_call_id"]] if "tool_call_id" in message else []
    return [message["role"], message["content"], *behind]


def unpacked(row: list) -> dict:
    """Returns a message of the file as the OpenAI API spells it."""
    role, content, *behind = row
    message = {"role": role, "content": content}
    if role == "tool":
        return message | {"tool_call_id": behind[0]}
    calls = [
        {"id": id_, "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in (behind[0] if behind else [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


def main() -> None:
    rng = random.Random(7)
    encoders = load()
    lines = []
    while len(lines) < CONVERSATIONS:
        messages = conversation(rng)
        tools = rng.choice([0, 0, 0, 0, 1, 2])
        found = [encode(encoders, version, messages, TOOLS[:tools])[1] for version in VERSIONS]
        texts = [
            text if version.endswith("tekken") else digest(text)
            for version, text in zip(VERSIONS, found, strict=True)
        ]
        row = [[packed(message) for message in messages], tools, texts]
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
    VECTORS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
