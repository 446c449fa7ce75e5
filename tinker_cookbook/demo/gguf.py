"""Turns a GGUF file of a Llama-shaped model into a folder that transformers loads.

transformers can read GGUF itself, but it rebuilds the tokenizer under another class whose ids are
wrong for byte-level vocabularies. So both halves are written out here: the weights, and a
``tokenizer.json`` made from the vocabulary, the merges and the pre-tokenizer the file names.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_ARCHITECTURE = "llama"
_PRE_TOKENIZER = "smollm"
_TOKEN_CONTROL, _TOKEN_USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def require_gguf() -> None:
    """Raises ``ConfigurationError`` where the ``gguf`` package is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(
            "reading a GGUF file needs the package 'gguf', which is not installed; "
            "run: pip install 'tinker_cookbook[demo]'"
        )


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes ``source`` as a transformers folder (bfloat16 weights) into the existing ``folder``.

    Every tensor is dequantised once; bfloat16 is the type these models were published in, and
    the perplexity of the result equals that of a float32 copy to three digits at half the size.

    Raises:
        ConfigurationError: the ``gguf`` package is missing.
        DataFormatError: the file is of another architecture or pre-tokenizer than is known here.
    """
    require_gguf()
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    _check_known(source, fields)
    weights = _weights(reader, fields)
    _write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))

    from safetensors.torch import save_file

    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it the owner's only


def _check_known(source: Path, fields: dict[str, Any]) -> None:
    found = {key: fields.get(key) for key in ("general.architecture", "tokenizer.ggml.pre")}
    known = {"general.architecture": _ARCHITECTURE, "tokenizer.ggml.pre": _PRE_TOKENIZER}
    for key, value in found.items():
        if value != known[key]:
            raise DataFormatError(
                f"{source}: {key} is {value!r}, but only {known[key]!r} can be converted without "
                "guessing; give a folder in transformers format instead"
            )


def _weights(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    weights: dict[str, torch.Tensor] = {}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        name, kind = _transformers_name(tensor.name)
        array = _dequantised(tensor)
        if kind in heads:
            array = _halves_from_pairs(array, heads[kind])
        weights[name] = torch.from_numpy(array).to(torch.bfloat16).contiguous()
    return weights


def _dequantised(tensor: Any) -> np.ndarray:
    import numpy as np
    from gguf.quants import dequantize

    flat = dequantize(tensor.data, tensor.tensor_type)
    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF names the inner axis first
    return np.array(flat, dtype=np.float32).reshape(shape)


def _transformers_name(name: str) -> tuple[str, str]:
    """Returns ``blk.3.attn_q.weight`` -> (``model.layers.3.self_attn.q_proj.weight``,
    ``attn_q``)."""
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name], name
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}", parts[2]
    raise DataFormatError(f"tensor {name!r} of the GGUF file has no counterpart in a Llama model")


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order of q and k.

    There a rotary pair lies in neighbouring rows (2i, 2i+1); transformers keeps it in rows
    (i, i + head_size/2).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        f"{short}_token_id": int(fields[f"tokenizer.ggml.{long}_token_id"])
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    rope_theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32, in which 1e-5 reads 9.99999974e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_special_ids(fields),
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # What the pre-tokenizer named "smollm" means: each digit alone, then GPT-2's byte-level split.
    split = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    for token, kind in zip(tokens, types, strict=True):
        if kind == _TOKEN_CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _TOKEN_USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{short}_token": tokens[fields[f"tokenizer.ggml.{long}_token_id"]]
            for short, long in roles.items()
        },
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
