"""Writes an Ollama ``Modelfile`` with the model's chat format as a template."""

from __future__ import annotations

from pathlib import Path

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights._chat_format import chat_format, stop_texts


def modelfile(base_folder: Path, renderer_name: str, model: str, context: int) -> str:
    """Returns a ``Modelfile``.

    Args:
        base_folder: Base model; its tokenizer is used.
        renderer_name: Chat format that the model was trained with.
        model: File of the model, relative to the ``Modelfile``.
        context: Maximum context length in tokens.
    """
    tokenizer = get_tokenizer(str(base_folder))
    renderer = get_renderer(renderer_name, tokenizer)
    found = chat_format(renderer, tokenizer)
    lines = [f"FROM ./{model}"]
    if (
        found is None
        or not found.has_system
        or "{{" in found.default + found.opening + str(found.around)
    ):
        lines.append(
            f"# The chat format {renderer_name} has no Ollama template: Ollama uses the "
            "chat template in the GGUF file."
        )
    else:
        lines.append(f'TEMPLATE """{found.template()}"""')
    lines += [f'PARAMETER stop "{_quoted(stop)}"' for stop in stop_texts(renderer, tokenizer)]
    # Ollama's default is at most 4096, and it silently truncates the beginning of longer texts.
    lines.append(f"PARAMETER num_ctx {min(context, 8192)}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
