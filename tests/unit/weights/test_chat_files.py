"""Exports answer in the run's chat format: template and stops of the renderers (8 s)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import tinker
import torch
from exports import make_adapter, make_base
from gguf_models import make_taught, make_tokenizer
from homes import new_home
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tinker_cookbook import weights
from tinker_cookbook.backends import connect
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights import Checkpoint
from tinker_cookbook.weights.__main__ import main
from tinker_cookbook.weights._chat_files import chat_of, copy_tokenizer, write_chat_files
from tinker_cookbook.weights.gguf import write_gguf

TALK = [
    {"role": "system", "content": "You know cats."},
    {"role": "user", "content": 'Why "purr"? {{ x }}'},
    {"role": "assistant", "content": "To calm."},
    {"role": "user", "content": "All\nof them?"},
]
KEPT, DEFAULTS, WRITTEN = "the base model's, which", "with the arguments", "written for"
# Tokenizer, whether it keeps its own template, renderer -> which template is written.
CASES = [
    ("smollm2", True, "chatml", KEPT),
    ("smollm2", True, "qwen3", WRITTEN),
    ("smollm2", False, "chatml", WRITTEN),
    ("smollm2", False, "smollm2", WRITTEN),
    ("smollm2", False, "chatml?default_system=Be+kind.", WRITTEN),
    ("smollm2", True, "role_colon", WRITTEN),
    ("smollm2", False, "role_colon", WRITTEN),
    ("qwen3", True, "qwen3_disable_thinking", DEFAULTS),
    ("small", False, "gemma3", WRITTEN),
    ("deepseek_v3_1", True, "deepseekv3", WRITTEN),
    ("deepseek_v3_1", True, "deepseekv3_thinking", WRITTEN),
]


@pytest.fixture(scope="module")
def base_of(tokenizer_folder, tmp_path_factory):
    """The tokenizer of a family as a base model's folder, with its chat template or without."""
    made: dict[tuple[str, bool], Path] = {}

    def folder(family: str, with_template: bool) -> Path:
        if (family, with_template) not in made:
            out = tmp_path_factory.mktemp(family) / "base"
            if family == "small":  # with Gemma's tokens; its own tokenizer takes seconds to load
                make_tokenizer(out, "gpt-2")
                tokenizer = AutoTokenizer.from_pretrained(out)
                names = ["<start_of_turn>", "<end_of_turn>"]
                tokenizer.add_special_tokens({"bos_token": "<bos>", "extra_special_tokens": names})
                tokenizer.save_pretrained(out)
            else:
                shutil.copytree(tokenizer_folder(family), out)
            (out / "config.json").write_text('{"eos_token_id": 7, "bos_token_id": 1}')
            if not with_template:
                (out / "chat_template.jinja").unlink(missing_ok=True)
                config = json.loads((out / "tokenizer_config.json").read_text())
                config.pop("chat_template", None)
                (out / "tokenizer_config.json").write_text(json.dumps(config))
            made[family, with_template] = out
        return made[family, with_template]

    return folder


@pytest.mark.parametrize(("family", "with_template", "name", "which"), CASES)
def test_the_template_and_the_stops_are_the_renderers(
    base_of, tmp_path, family, with_template, name, which
):
    base = base_of(family, with_template)
    chat = chat_of(Checkpoint("", str(base), base, {}, {}, {"renderer_name": name}))
    assert which in chat.facts["chat template"]
    copy_tokenizer(base, tmp_path)
    write_chat_files(chat, base, tmp_path)
    shutil.copy(base / "config.json", tmp_path)
    # A loaded export, and a conversation on which no template was chosen.
    tokenizer, renderer = (
        AutoTokenizer.from_pretrained(tmp_path),
        get_renderer(name, get_tokenizer(str(base))),
    )
    alone = name == "gemma3"  # without a system message of its own
    for talk in (TALK[1:2], TALK[1:], *([] if alone else [TALK])):
        expected = renderer.build_generation_prompt(talk).to_ints()
        found = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.encode(found, add_special_tokens=False)
        assert tokenizer.decode(tokens) == tokenizer.decode(expected)
        split = "some tokens are split otherwise" in chat.facts["chat template"]
        assert split == ((family, name) == ("smollm2", "role_colon"))
        assert tokens == expected or split
    settings = GenerationConfig.from_pretrained(tmp_path)
    ends, stops = settings.eos_token_id, renderer.get_stop_sequences()
    ends = set(ends if isinstance(ends, list) else [ends])
    assert ends == {7, *(stop for stop in stops if isinstance(stop, int))}
    assert settings.stop_strings == ([s for s in stops if isinstance(s, str)] or None)


def test_a_processors_template_that_knows_content_in_parts_alone_stays(base_of, tmp_path):
    """As in SmolVLM's folders: a template written anew would have no images."""
    base = shutil.copytree(base_of("smollm2", False), tmp_path / "base")
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in "
        "message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (base / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    chat = chat_of(Checkpoint("", str(base), base, {}, {}, {"renderer_name": "chatml"}))
    assert chat.own
    assert chat.facts["chat template"].startswith(KEPT)


def test_without_a_recorded_renderer_the_base_models_files_stay(base_of, tmp_path):
    base = base_of("smollm2", True)
    for name in (None, "of another package"):
        metadata = {} if name is None else {"renderer_name": name}
        chat = chat_of(Checkpoint("", str(base), base, {}, {}, metadata))
        assert chat.own
        assert "renderer" in chat.facts["chat template"]
        assert chat.stop_ids == [7]


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("role_colon", "\n\nUser:")])
def test_generate_stops_where_the_engine_stops(name, end, tmp_path, monkeypatch):
    """On a base model: no template, and another end of text."""
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    base = tmp_path / "base"
    prompt, answer = make_taught(base, name, f" house{end} and the dog")
    tokenizer = AutoTokenizer.from_pretrained(base)
    renderer = get_renderer(name, tokenizer)
    adapter = make_adapter(tmp_path / "adapter", base, ("q_proj",), lora_alpha=1e-4)
    out = tmp_path / "out"
    weights.build_hf_model(
        base_model=str(base), adapter_path=str(adapter), output_path=str(out),
        dtype="float32", renderer_name=name, verify=False,
    )  # fmt: skip
    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_sampling_client(base_model=str(out))
        params = tinker.SamplingParams(
            temperature=0.0, max_tokens=len(answer), stop=renderer.get_stop_sequences()
        )
        (expected,) = (
            client.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences
        )
    merged, tokenizer = (
        AutoModelForCausalLM.from_pretrained(out),
        AutoTokenizer.from_pretrained(out),
    )
    talk = [{"role": "user", "content": "the cat"}]
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert text == tokenizer.decode(prompt)
    inputs = torch.tensor([prompt])
    found = merged.generate(
        inputs, tokenizer=tokenizer, do_sample=False, max_new_tokens=len(answer)
    )
    found = found[0, inputs.shape[1] :].tolist()
    assert found == list(expected.tokens)
    assert tokenizer.decode(found) == f" house{end}"
    # llama.cpp stops at the tokens in the file; a string has to come with each request.
    checkpoint = weights.open_checkpoint(str(adapter), base_model=str(base)).with_renderer(name)
    write_gguf(checkpoint, tmp_path / "m.gguf", verify=False)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    assert fields["tokenizer.ggml.eot_token_id"].contents() == (2 if name == "chatml" else 1)


def test_an_adapter_and_a_merge_of_it_keep_format_and_base_model(tmp_path, monkeypatch, capsys):
    """From a run of the engine to an exported adapter, and to a merge of that."""
    monkeypatch.setenv("TINKER_COOKBOOK_HOME", new_home(tmp_path / "home"))
    base = make_base(tmp_path / "base", "llama")
    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_lora_training_client(
            str(base), rank=4, seed=0, user_metadata={"renderer_name": "role_colon"}
        )
        path = client.save_weights_for_sampler("final").result().path
    main(["export", path, f"out={tmp_path / 'lora'}"])
    printed = capsys.readouterr().out
    out = tmp_path / "lora"
    for words in (f"--generation-config {out} --chat-template {out}/chat_template.jinja",
                  "chat template: written for the renderer role_colon", r'"\n\nUser:"',
                  "base model: the weights of the training"):  # fmt: skip
        assert words in printed
    # A copy of the base model in one file is the same model; a changed one is not.
    copy = make_base(tmp_path / "copy", "llama", shard="1GB")
    main(["merge", str(tmp_path / "lora"), f"out={tmp_path / 'out'}", f"base_model={copy}"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "tokenizer=tokenizer" in card
    assert r'answers end at: "\n\nUser:"' in card
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["stop_strings"] == ["\n\nUser:"]
    other = AutoModelForCausalLM.from_pretrained(base)
    other.model.norm.weight.data[0] = 1.01
    other.save_pretrained(copy)
    for source in (path, str(tmp_path / "lora")):
        with pytest.raises(ConfigurationError, match=r"other weights .* was trained on"):
            weights.open_checkpoint(source, base_model=str(copy))
    # Adapters of other programs record nothing, which the output says.
    old = make_adapter(tmp_path / "old", base)
    main(["merge", str(old), f"out={tmp_path / 'of_old'}", "verify=False"])
    assert "base model: not compared" in capsys.readouterr().out
