from __future__ import annotations

import copy
import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest

from tinker_cookbook import model_info, models
from tinker_cookbook.hyperparam_utils import get_lr
from tinker_cookbook.model_info import (
    ModelAttributes,
    get_model_attributes,
    get_recommended_renderer_name,
    get_recommended_renderer_names,
    resolve_renderer_name,
    warn_if_renderer_not_recommended,
)
from tinker_cookbook.model_table import LINEUP, UNAVAILABLE
from tinker_cookbook.renderers import check_renderer_name, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.2-1B", ("meta-llama", "3.2", "1B", False, "role_colon")),
        ("meta-llama/Llama-3.1-8B-Instruct", ("meta-llama", "3.1", "8B", True, "llama3")),
        ("Qwen/Qwen3-8B", ("Qwen", "3", "8B", True, "qwen3")),
        ("Qwen/Qwen3-8B-Base", ("Qwen", "3", "8B", False, "role_colon")),
        ("Qwen/Qwen3-4B-Instruct-2507", ("Qwen", "3", "4B", True, "qwen3_instruct")),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", ("Qwen", "3", "30B-A3B", True, "qwen3_vl_instruct")),
        ("Qwen/Qwen3.5-9B-Base", ("Qwen", "3.5", "9B", False, "role_colon")),
        ("Qwen/Qwen3.5-4B", ("Qwen", "3.5", "4B", True, "qwen3_5")),
        ("Qwen/Qwen3.6-35B-A3B", ("Qwen", "3.6", "35B-A3B", True, "qwen3_5")),
        ("Qwen/Qwen3.8-27B", ("Qwen", "3.8", "27B", True, "qwen3_8_xhigh_reasoning")),
        ("Qwen/Qwen3-4B-Thinking-2507", ("Qwen", "3", "4B", True, "template")),
        ("Qwen/Qwen2.5-Math-7B-Instruct", ("Qwen", "2.5", "7B", True, "template")),
        ("Qwen/Qwen2.5-0.5B-Instruct", ("Qwen", "2.5", "0.5B", True, "qwen2_5")),
        ("deepseek-ai/DeepSeek-V3.1", ("deepseek-ai", "3", "671B-A37B", True, "deepseekv3")),
        ("openai/gpt-oss-20b", ("openai", "1", "21B-A3.6B", True, "gpt_oss_no_sysprompt")),
        ("moonshotai/Kimi-K2-Thinking", ("moonshotai", "K2", "1T-A32B", True, "kimi_k2")),
        ("zai-org/GLM-5.3", ("zai-org", "5.3", "744B-A40B", True, "glm5_3_max_reasoning")),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            ("nvidia", "3", "30B-A3B", True, "nemotron3"),
        ),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", ("HuggingFaceTB", "2", "135M", True, "smollm2")),
        ("deepseek-ai/DeepSeek-V3", ("deepseek-ai", "3", "", True, "template")),
        ("deepseek-ai/DeepSeek-V3.2", ("deepseek-ai", "3.2", "", True, "template")),
        ("deepseek-ai/DeepSeek-V3.2-Exp", ("deepseek-ai", "3.2", "", True, "deepseekv3")),
        ("moonshotai/Kimi-K2-Instruct", ("moonshotai", "K2", "1T-A32B", True, "kimi_k2_instruct")),
        ("google/gemma-3-1b-it", ("google", "3", "1B", True, "gemma3")),
        *[
            (f"mistralai/{name}", ("mistralai", "", size, True, renderer))
            for name, size, renderer in [
                ("Mistral-7B-Instruct-v0.2", "7B", "template"),
                ("Mistral-7B-Instruct-v0.3", "7B", "mistral"),
                ("Mixtral-8x7B-Instruct-v0.1", "", "template"),
                ("Mixtral-8x22B-Instruct-v0.1", "", "mistral"),
                ("Mistral-Nemo-Instruct-2407", "", "mistral"),
                ("Ministral-8B-Instruct-2410", "8B", "mistral"),
                ("Ministral-3-8B-Instruct-2512", "8B", "template"),
                ("Mistral-Small-Instruct-2409", "", "mistral"),
                ("Mistral-Small-24B-Instruct-2501", "24B", "mistral"),
                ("Mistral-Small-3.2-24B-Instruct-2506", "24B", "template"),
                ("Mistral-Large-Instruct-2411", "", "mistral"),
            ]
        ],
        ("zai-org/GLM-4.6", ("zai-org", "4.6", "", True, "glm4_6")),
        ("HuggingFaceTB/SmolLM2-135M", ("HuggingFaceTB", "2", "135M", False, "role_colon")),
    ],
)
def test_known_models(name: str, expected: tuple, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        found = get_model_attributes(name)
    summary = (found.organization, found.version_str, found.size_str, found.is_chat)
    assert (*summary, found.recommended_renderers[0]) == expected
    assert found.is_vl == (
        "VL" in name or "Qwen3.6" in name or "Qwen3.5" in name or "3.8" in name or "K2.6" in name
    )
    assert not caplog.records


@pytest.mark.parametrize("name", sorted(LINEUP))
def test_every_recommended_renderer_exists(name: str):
    for renderer in get_recommended_renderer_names(name):
        if renderer not in UNAVAILABLE:
            check_renderer_name(renderer)
    check_renderer_name(resolve_renderer_name(name, None)[0])
    attributes, assumed = model_info._attributes(name)
    assert not assumed, "a rule of the table matches"
    assert attributes.organization == name.partition("/")[0]


def test_the_getters_hold_the_whole_lineup():
    getters = ("llama", "qwen", "deepseek", "gpt_oss", "moonshot", "zai", "nvidia")
    found = {}
    for name in (*getters, "thinkingmachines"):
        for short, attributes in getattr(model_info, f"get_{name}_info")().items():
            found[f"{attributes.organization}/{short}"] = attributes
    assert found.keys() == LINEUP.keys()
    assert all(get_model_attributes(f"{name}:peft:262144") == found[name] for name in LINEUP)
    inkling = get_model_attributes("thinkingmachines/Inkling-Untabled")
    assert (inkling.is_vl, inkling.is_audio_in, inkling.recommended_renderers) == (
        True,
        True,
        ("tml_v0",),
    )


def test_runs_take_the_form_of_the_models_own_template():
    # The recommended name is that of the public cookbook; a run adds what the template asks for.
    assert resolve_renderer_name("Qwen/Qwen3.6-27B", None)[0] == "qwen3_5?json_scalars=true"
    assert resolve_renderer_name("Qwen/Qwen3.5-27B", None)[0] == "qwen3_5"
    assert resolve_renderer_name("meta-llama/Llama-3.3-70B", None)[0] == "llama3"


def test_a_peft_suffix_and_a_folder_are_seen_through(tmp_path: Path):
    plain = get_model_attributes("Qwen/Qwen3-8B")
    assert get_model_attributes("Qwen/Qwen3-8B:peft:131072") == plain
    assert get_model_attributes(str(tmp_path / "Qwen3-8B")) == plain
    assert isinstance(plain, ModelAttributes)
    assert get_recommended_renderer_names("Qwen/Qwen3-8B") == ["qwen3", "qwen3_disable_thinking"]


@pytest.mark.parametrize(
    ("family", "model_type", "renderer"),
    [
        ("qwen3", "qwen3", "qwen3"),
        ("qwen2_5", "qwen2", "qwen2_5"),
        ("llama3", "llama", "llama3"),
        ("smollm2", "llama", "smollm2"),
        ("gemma3", "gemma3_text", "gemma3"),
        ("deepseek_v3", "deepseek_v3", "template"),
        ("gptoss", "gpt_oss", "template"),
    ],
)
def test_an_unknown_folder_is_judged_by_its_template(
    tokenizer_folder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    model_type: str,
    renderer: str,
):
    folder = tmp_path / "my-model"
    shutil.copytree(tokenizer_folder(family), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    model_info._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert get_recommended_renderer_name(str(folder)) == renderer
        assert get_recommended_renderer_name(str(folder)) == renderer
    said = [r.message for r in caplog.records if "was assumed" in r.message]
    assert len(said) == 1, "said once, not at every call"
    assert repr(renderer) in said[0]
    assert "set renderer_name" in said[0]


@pytest.mark.parametrize(
    ("file", "model_type", "renderer"),
    [
        ("qwen3/chat_template.qwen3_trl.jinja", "qwen3_moe", "qwen3"),
        ("qwen3/chat_template.qwen3_instruct_2507.jinja", "qwen3", "qwen3_instruct"),
        ("qwen3/chat_template.qwen3_vl.jinja", "qwen3_vl", "qwen3_vl_instruct"),
        ("templates_only/Qwen3.5-4B.jinja", "qwen3_5", "qwen3_5"),
        ("templates_only/trl_qwen3_6.jinja", "qwen3_5_moe", "qwen3_5?json_scalars=true"),
        ("templates_only/trl_qwen3_5_nothink.jinja", "qwen3_5", "template"),
        ("templates_only/Qwen3-Coder.jinja", "qwen3_moe", "template"),
        ("templates_only/trl_qwen2_5_vl.jinja", "qwen2_5_vl", "qwen2_5_vl"),
        ("templates_only/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja", "nemotron_h", "template"),
        ("templates_only/HuggingFaceTB-SmolLM3-3B.jinja", "smollm3", "template"),
        # The end of the template of Qwen3-2507 Thinking.
        ("qwen3/chat_template.qwen3_trl.jinja + <think>", "qwen3", "template"),
    ],
)
def test_a_renamed_model_has_the_prompt_of_its_template(
    tokenizer_folder, shared_dir: Path, tmp_path: Path, file: str, model_type: str, renderer: str
):
    file, thinks, _ = file.partition(" + ")
    template = (shared_dir / "tokenizers" / file).read_text(encoding="utf-8")
    if thinks:
        template = template.partition("{%- if add_generation_prompt %}")[0] + (
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
        )
    for source in Path(tokenizer_folder("qwen3")).glob("tokenizer*.json"):
        (tmp_path / source.name).symlink_to(source)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    name, _ = resolve_renderer_name(str(tmp_path), None)
    assert name == renderer
    tokenizer = copy.copy(get_tokenizer(tokenizer_folder("qwen3")))
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "Hi"}]
    prompt = get_renderer(name, tokenizer).build_generation_prompt(messages).to_ints()
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert prompt == expected


@pytest.mark.parametrize(
    ("model_type", "vision", "renderer"),
    [
        ("qwen3_vl", {}, "qwen3_vl_instruct"),
        ("qwen3_vl_moe", {}, "qwen3_vl_instruct"),
        ("qwen2_vl", {}, "qwen2_5_vl"),
        ("qwen2_5_vl", {}, "qwen2_5_vl"),
        ("qwen3_5", {}, "qwen3_5"),
        ("smolvlm", {}, "smolvlm"),
        ("idefics3", {}, "idefics3"),
        ("gemma3", {}, "gemma3"),
        ("llava", {}, "role_colon"),
        # Text models of the same families.
        ("qwen3_5", None, "role_colon"),
        ("gemma3_text", None, "role_colon"),
        ("qwen3", None, "role_colon"),
    ],
)
def test_the_type_of_a_vision_model_without_template_decides(
    tmp_path, model_type, vision, renderer
):
    config = {"model_type": model_type} | ({} if vision is None else {"vision_config": vision})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_renderer_name(str(tmp_path), None)[0] == renderer
    assert get_model_attributes(str(tmp_path)).is_vl is (vision is not None)


def test_a_configured_renderer_wins_and_a_misfit_is_said(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    model_info._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert resolve_renderer_name("Qwen/Qwen3-8B", "qwen3") == ("qwen3", "asked for")
        assert not warn_if_renderer_not_recommended("Qwen/Qwen3-8B", None)
        assert not caplog.records
        assert resolve_renderer_name("Qwen/Qwen3-8B", "llama3") == ("llama3", "asked for")
    assert "got 'llama3'" in caplog.text
    assert "qwen3, qwen3_disable_thinking" in caplog.text
    (tmp_path / "tokenizer.json").write_text("{}")
    warns = partial(warn_if_renderer_not_recommended, str(tmp_path))
    # Without a chat template any format may do.
    assert not warns("role_colon")
    (tmp_path / "chat_template.jinja").write_text("<|im_start|>")
    assert warns("role_colon")
    assert not any(map(warns, ("chatml", "chatml?x=y", "template", "of_the_user")))
    # A template that no rule knows may be that of any chat format.
    (tmp_path / "chat_template.jinja").write_text("another")
    assert warns("role_colon")
    assert not warns("llama3")


def test_the_list_of_models_has_the_settings_of_a_run(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    models.main(models.ModelsConfig(lora_rank=8))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "/" in line}
    assert set(lines) == set(LINEUP)
    for word in ("qwen3", f"{get_lr('Qwen/Qwen3-8B'):.2e} ", "23.1M"):
        assert word in lines["Qwen/Qwen3-8B"]
    # A run cannot use the renderer that the service recommends, and no rate was fitted.
    assert "template" in lines["moonshotai/Kimi-K3.1-Pro"]
    assert "1.85e-04*" in lines["moonshotai/Kimi-K3.1-Pro"]
