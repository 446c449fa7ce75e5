"""Turns a GGUF file of a Llama-shaped model into a folder that transformers loads.

transformers can read GGUF itself, but it rebuilds the tokenizer under another class with ids that
are wrong for byte-level vocabularies. So both parts are written here: the weights, and a
``tokenizer.json`` from the vocabulary, the merges and the pre-tokenizer that the file names.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, install_command
from tinker_cookbook.utils.gguf_reader import open_gguf

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

_KNOWN = {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}
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
            f"run: {install_command('demo')}"
        )


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes ``source`` as a transformers folder (bfloat16 weights) into the existing ``folder``.

    Every tensor is dequantized once; these models were published in bfloat16, and the perplexity
    of the result equals a float32 copy's to three digits at half the size.

    Raises:
        ConfigurationError: the ``gguf`` package is missing.
        DataFormatError: the architecture or the pre-tokenizer of the file is not supported.
    """
    require_gguf()
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = open_gguf(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, known in _KNOWN.items():
        # The names of tensors and the order of rows below are those of this architecture only.
        if fields.get(key) != known:
            raise DataFormatError(
                f"{source}: {key} is {fields.get(key)!r}, but only {known!r} can be converted "
                "without guessing; give a folder in transformers format instead"
            )
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        # blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight
        name, kind = _OUTER_TENSORS.get(tensor.name), tensor.name
        if name is None:
            parts = tensor.name.split(".")
            if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_TENSORS:
                raise DataFormatError(
                    f"tensor {tensor.name!r} of the GGUF file has no counterpart in a Llama model"
                )
            kind = parts[2]
            name = f"model.layers.{parts[1]}.{_LAYER_TENSORS[kind]}.{parts[3]}"
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF: the inner axis first
        flat = dequantize(tensor.data, tensor.tensor_type)
        array = np.array(flat, dtype=np.float32).reshape(shape)
        # Only q and k have rotary pairs, so only their rows are in another order.
        if kind in heads:
            array = _halves_from_pairs(array, heads[kind])
        weights[name] = torch.from_numpy(array).to(torch.bfloat16).contiguous()
    # A file without an output head shares the head's weights with the embedding.
    for file, content in _json_files(fields, tied="lm_head.weight" not in weights).items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / file).write_text(text + "\n", encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod((folder / "config.json").stat().st_mode)  # safetensors: readable by the owner only


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order of q and k.

    There a rotary pair is in neighbouring rows (2i, 2i+1); transformers keeps it in rows
    (i, i + head_size/2).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _json_files(fields: dict[str, Any], *, tied: bool) -> dict[str, dict[str, Any]]:
    """Returns the content of each JSON file of the folder but ``tokenizer.json``."""
    rope_theta = fields["llama.rope.freq_base"]
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {role: int(fields[f"tokenizer.ggml.{long}_token_id"]) for role, long in roles.items()}
    special_ids = {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": len(tokens),
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32, in which 1e-5 reads 9.99999974e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **special_ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": tokens[index] for role, index in ids.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "config.json": config,
        "generation_config.json": special_ids,
        "tokenizer_config.json": tokenizer_config,
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # The pre-tokenizer "smollm": single digits, then GPT-2's byte-level split.
    split = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    # Control and user-defined tokens are matched whole, before the text is split.
    for token, kind in zip(tokens, types, strict=True):
        if kind == _TOKEN_CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _TOKEN_USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
