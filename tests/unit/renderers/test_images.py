"""Image chunks: as many tokens as transformers' processor makes, and the same pixels."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_cases import pictures, qwen_image_processor
from PIL import Image
from tiny_vlm import tiny_vlm

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.image_processing_utils import image_to_data_uri
from tinker_cookbook.image_text_processor import get_image_text_processor
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import (
    ImagePart,
    TextPart,
    TrainOnWhat,
    ensure_list,
    get_renderer,
    image_to_chunk,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

NAMES = ["qwen3_vl", "qwen3_vl_instruct", "qwen3_5", "qwen3_5_disable_thinking"]


def qwen2_vl_processor():
    """Of other numbers: Qwen2-VL's."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil()


def pixels(chunk):
    return Image.open(io.BytesIO(chunk.data))


@pytest.mark.parametrize("make", [qwen_image_processor, qwen2_vl_processor])
def test_tokens_are_what_the_processor_makes(make):
    processor = make()

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(width=st.integers(1, 700), height=st.integers(1, 700))
    def check(width, height):
        image = Image.new("RGB", (width, height))
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(RendererError, match=r"refuses .* pixels: .* aspect ratio"):
                image_to_chunk(image, processor)
            with pytest.raises(RendererError, match=r"^image: 'data:image/png;base64,… \(\d+ ch"):
                image_to_chunk(image_to_data_uri(image), processor)
            return
        chunk = image_to_chunk(image, processor)
        grid = processor(images=[image], return_tensors="np")["image_grid_thw"]
        assert chunk.expected_tokens == chunk.length == grid.prod() // processor.merge_size**2

    check()


def test_max_image_size_bounds_the_image_and_its_tokens(tokenizer_folder):
    image, processor = Image.new("RGB", (1000, 400)), qwen_image_processor()
    chunk = image_to_chunk(image, processor, max_image_size=500)
    assert pixels(chunk).size == (500, 200)
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    for name in NAMES:
        renderer = get_renderer(f"{name}?max_image_size=500", tokenizer, processor)
        prompt = renderer.build_generation_prompt([says(image)])
        assert prompt.chunks[1] == chunk


def says(image, role="user"):
    text = TextPart(type="text", text="What?")
    return {"role": role, "content": [ImagePart(type="image", image=image), text]}


@pytest.mark.parametrize("name", NAMES)
def test_images_are_context(tokenizer_folder, name):
    renderer = get_renderer(name, get_tokenizer(tokenizer_folder("qwen3")), qwen_image_processor())
    image = pictures()[1]
    messages = [says(image), {"role": "assistant", "content": "A cat."}]
    example, weights = renderer.build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    before, chunk, _ = example.chunks
    assert before.tokens[-1] == renderer.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    start, end = before.length, before.length + chunk.length
    assert weights.tolist()[start:end] == [0.0] * chunk.length
    assert all(weights.tolist()[:start] + weights.tolist()[end:])
    assert len(weights) == example.length
    prompt = renderer.build_generation_prompt([says(image_to_data_uri(image))])
    assert prompt.chunks[1] == chunk
    again = pickle.loads(pickle.dumps(renderer))
    assert again.build_generation_prompt([says(image)]) == prompt


@pytest.mark.parametrize("name", NAMES)
def test_images_out_of_place_are_refused(tokenizer_folder, name):
    tokenizer = get_tokenizer(tokenizer_folder("qwen3"))
    blind = get_renderer(name, tokenizer)
    with pytest.raises(RendererError, match=r"messages\[0\].content\[0\]: .* lacks preprocessor_c"):
        blind.build_generation_prompt([says(pictures()[0])])
    renderer = get_renderer(name, tokenizer, qwen_image_processor())
    question = {"role": "user", "content": "Draw a cat."}
    for before, role in (([], "system"), ([question], "assistant")):
        place = rf"messages\[{len(before)}\].content: .* type 'image'"
        with pytest.raises(RendererError, match=place):
            renderer.build_supervised_example([*before, says(pictures()[0], role)])
    with pytest.raises(RendererError, match=r"messages\[0\].content\[0\]: image: .* download it"):
        renderer.build_generation_prompt([says("https://example.com/cat.png")])
    audio = {"role": "user", "content": [{"type": "audio", "audio": "x"}]}
    with pytest.raises(RendererError, match="'audio'"):
        renderer.build_generation_prompt([audio])
    with pytest.raises(RendererError, match="'image'"):
        get_renderer("qwen3", tokenizer).build_generation_prompt([says(pictures()[0])])


SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}:"
    "{{ '' if message.content[0].type == 'image' else ' ' }}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
MARKS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def idefics_processor(tokenizer, **options):
    """transformers' whole processor, without that of videos, which needs torchvision."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *TILES]})
    sizes = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}
    images = Idefics3ImageProcessorPil(**sizes, **options)
    images.image_seq_len = 4
    template = SMOLVLM.replace("<|im_start|>", tokenizer.bos_token)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def qwen_processor(tokenizer, template):
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    kind = Qwen3VLProcessor if "qwen3_vl" in template.name else Qwen2_5_VLProcessor
    # Its processor of videos needs torchvision.
    with mock.patch.object(kind, "check_argument_for_proper_class"):
        return kind(qwen_image_processor(), tokenizer, None, chat_template=template.read_text())


def gemma3_processor(tokenizer, **options):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
    tokenizer.image_token = "<image_soft_token>"
    for name in ("boi", "eoi", "image"):
        token = tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
        setattr(tokenizer, f"{name}_token_id", token)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_len = 256
    return Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template)


@pytest.mark.parametrize("kind", ["internvl", "llava", "mistral3"])
def test_the_template_places_images_as_transformers_does(tmp_path, kind):
    """Of a model without a renderer of its own."""
    folder = str(tiny_vlm(tmp_path, kind))
    whole = get_image_text_processor(folder)
    assert get_recommended_renderer_name(folder) == "template"
    renderer = get_renderer("template", get_tokenizer(folder), model_name=folder)
    image = [{"type": "image", "image": picture.convert("RGB")} for picture in pictures()]
    said = [{"type": "text", "text": text} for text in ("What?", " or ", "")]
    talks = [
        [[said[0]]],
        [[image[2], said[0]]],
        [[image[1], said[0], image[5]], "red", [said[1], image[4], said[0]]],
        [[said[0]], "a\n\nb", [image[2], image[2]]],
    ]
    for contents in talks:
        roles = ["user", "assistant", "user"]
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
        parts = [{**m, "content": ensure_list(m["content"])} for m in messages]
        expected = whole._processor.apply_chat_template(
            parts, tokenize=True, add_generation_prompt=True
        )[0]
        prompt, position, found = renderer.build_generation_prompt(messages), 0, []
        for chunk in prompt.chunks:
            run = list(expected[position : position + chunk.length])
            position += chunk.length
            if chunk.type == "image":
                found.append(chunk)
                assert run[0] == whole.mark_id or kind == "internvl"
                assert run.count(whole.mark_id) > len(run) / 2
            else:
                assert run == list(chunk.tokens)
        assert (position, len(found)) == (len(expected), str(contents).count("'image':"))
        if roles[len(messages) - 1] == "user":
            messages = [*messages, {"role": "assistant", "content": "A cat."}]
        answers = TrainOnWhat.ALL_ASSISTANT_MESSAGES
        for what, text in ((TrainOnWhat.ALL_TOKENS, "What?"), (answers, "cat.")):
            example, weights = renderer.build_supervised_example(messages, what)
            assert example.chunks[: len(prompt.chunks) - 1] == prompt.chunks[:-1]
            tokens = [t for c in example.chunks for t in getattr(c, "tokens", [-1] * c.length)]
            on = [t for t, w in zip(tokens, weights.tolist(), strict=True) if w]
            assert text in renderer.tokenizer.decode(on)
            assert -1 not in on
            if what is TrainOnWhat.ALL_TOKENS:
                assert len(on) == len(tokens) - sum(chunk.length for chunk in found)
    twice = [{"role": "user", "content": [image[0], {"type": "text", "text": whole.mark}]}]
    assert renderer.build_generation_prompt(twice).chunks[1].type == "image"
    renderer.split_special_tokens(False)
    with pytest.raises(RendererError, match=r"writes the mark .* 2 times for 1 images"):
        renderer.build_generation_prompt(twice)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("processor_config.json", None, "TypeError: .*the folder lacks processor_config.json"),
        ("tokenizer.json", ("<image>", "<other>"), "mark .* is token None, but .* own is 300"),
    ],
)
def test_folders_whose_processor_cannot_read_images(tmp_path, file, change, why):
    path = tiny_vlm(tmp_path, "llava") / file
    if change is None:
        path.unlink()
    else:
        for changed in (path, tmp_path / "tokenizer_config.json"):
            changed.write_text(changed.read_text().replace(*change))
    with pytest.raises(ConfigurationError, match=f"cannot be used: .*{why}"):
        get_image_text_processor(str(tmp_path))
    # No other renderer or model is the cure.
    renderer = get_renderer("template", get_tokenizer(str(tmp_path)), model_name=str(tmp_path))
    part = ImagePart(type="image", image=Image.new("RGB", (64, 64)))
    with pytest.raises(RendererError, match=f"cannot be used: .*{why}") as refused:
        renderer.build_generation_prompt([{"role": "user", "content": [part]}])
    assert "renderer_name" not in str(refused.value)


def shown_part(part):
    return {key: value for key, value in part.items() if key != "image"}


@pytest.mark.parametrize(
    ("name", "family", "make", "options"),
    [
        ("smolvlm", "smollm2", idefics_processor, {}),
        ("smolvlm", "smollm2", idefics_processor, {"do_image_splitting": False}),
        ("idefics3", "llama3", idefics_processor, {}),
        ("gemma3", "gemma3", gemma3_processor, {}),
        (
            "qwen2_5_vl",
            "qwen2_5",
            qwen_processor,
            {"template": "templates_only/trl_qwen2_5_vl.jinja"},
        ),
        (
            "qwen3_vl_instruct",
            "qwen3",
            qwen_processor,
            {"template": "qwen3/chat_template.qwen3_vl.jinja"},
        ),
    ],
)
def test_tokens_equal_the_processors(tokenizer_folder, name, family, make, options):
    """Text around images, and an image's own tokens, against transformers' processor."""
    if "template" in options:
        family_folder, file = options["template"].split("/")
        options = {"template": pathlib.Path(tokenizer_folder(family_folder)) / file}
    whole = make(get_tokenizer(tokenizer_folder(family)), **options)
    renderer = get_renderer(name, whole.tokenizer, whole.image_processor)
    images = [image.convert("RGB") for image in pictures()]
    picture = [{"type": "image", "image": image} for image in images]
    said = [{"type": "text", "text": text} for text in ("What?", "\nor", " this", "")]
    talks = [
        [[picture[0], said[0]]],
        [[said[0], picture[4]], "red", [picture[1], picture[5], said[1], picture[2], said[2]]],
        [[said[2], picture[3], said[0]], "a\n\nb", "And?"],
        *([[p]] for p in picture),
    ]
    for contents in talks:
        roles = ["user", "assistant", "user"]
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
        parts = [p for content in contents if isinstance(content, list) for p in content]
        shown = [part["image"] for part in parts if part["type"] == "image"]
        listed = [
            {**m, "content": [shown_part(part) for part in ensure_list(m["content"])]}
            for m in messages
        ]
        text = whole.tokenizer.apply_chat_template(
            listed, chat_template=whole.chat_template, tokenize=False, add_generation_prompt=True
        )
        options = {"text_kwargs": {"add_special_tokens": False}}
        expected = whole(images=[shown], text=[text], **options)["input_ids"][0]
        prompt, position = renderer.build_generation_prompt(messages), 0
        for chunk in prompt.chunks:
            run = list(expected[position : position + chunk.length])
            position += chunk.length
            if chunk.type == "image":
                tiled = make is idefics_processor
                around = whole.tokenizer.convert_tokens_to_ids(MARKS) if tiled else []
                soft = whole.tokenizer.convert_tokens_to_ids(whole.image_token)
                if name == "gemma3":  # its processor calls the mark before the image so
                    soft = whole.tokenizer.image_token_id
                assert {run[0], run[-1]} <= {soft, *around}
                assert tiled or set(run) == {soft}
            else:
                assert run == list(chunk.tokens)
        assert position == len(expected)
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "red"}]
    example, weights = renderer.build_supervised_example(dialogue)
    trained = [t for t, w in zip(example.to_ints(), weights.tolist(), strict=True) if w]
    assert renderer.parse_response(trained)[0] == dialogue[1]
