"""The protocol's binary messages, described here rather than taken from the SDK, whose names move.

Field numbers have been stable since SDK 0.18. A field is ``name number type``; ``*T`` repeats,
``{T}`` is a map from strings, ``|group`` says that at most one field of the group is set.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tinker_cookbook.wire"

_MESSAGES = {
    "SparseCsr": ["values 1 bytes", "crow_indices 2 bytes", "col_indices 3 bytes"],
    "Tensor": [
        "dense 1 bytes |layout",
        "sparse_csr 2 SparseCsr |layout",
        "dtype 3 int32",
        "shape 4 *int64",
    ],
    "EncodedText": ["tokens 1 bytes"],
    "Image": ["data 1 bytes", "format 2 string"],
    "Dmel": ["dmel 1 bytes"],
    "Chunk": [
        "encoded_text 1 EncodedText |chunk",
        "image 2 Image |chunk",
        "dmel 3 Dmel |chunk",
    ],
    "Datum": ["model_input 1 *Chunk", "loss_fn_inputs 2 {Tensor}"],
    "LossConfigValue": ["number 1 double |value", "text 2 string |value"],
    "ForwardBackwardRequest": [
        "model_id 1 string",
        "seq_id 2 int32",
        "data 3 *Datum",
        "loss_fn 4 string",
        "loss_fn_config 5 {double}",
        "forward_only 6 bool",
        "loss_fn_config_v2 7 {LossConfigValue}",
    ],
    "BatchedTensor": [
        "data 1 bytes",
        "offsets 2 bytes",
        "dtype 3 int32",
        "trailing_shape 4 *int64",
    ],
    "ArrayRecord": ["type_tag 1 string", "fields 2 {BatchedTensor}", "num_datums 3 int64"],
    "ForwardBackwardOutput": [
        "loss_fn_output_type 1 string",
        "loss_fn_outputs 2 *ArrayRecord",
        "metrics 3 {double}",
    ],
    "TopkLogprobs": ["token_ids 1 bytes", "logprobs 2 bytes", "k 3 int32", "length 4 int32"],
    "SampledSequence": [
        "stop_reason 1 int32",
        "tokens 2 bytes",
        "logprobs 3 bytes",
        "topk_sampled_logprobs 4 TopkLogprobs",
    ],
    "SampleResponse": [
        "sequences 1 *SampledSequence",
        "prompt_logprobs 2 bytes",
        "topk_prompt_logprobs 3 TopkLogprobs",
        "prompt_cache_hit_tokens 4 int32",
        "target_prompt_logprobs 5 Tensor",
    ],
}

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of ``dtype``."""

STOP, LENGTH = 0, 1
"""Values of ``stop_reason``."""

_FIELD = descriptor_pb2.FieldDescriptorProto


def _set_type(field: Any, name: str) -> None:
    if name in _MESSAGES:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{name}"
    else:
        field.type = getattr(_FIELD, f"TYPE_{name.upper()}")


def _add_map(message: Any, field: Any, of: str) -> None:
    """A map is, on the wire, a repeated message of key and value."""
    entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), of)
    field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_field(message: Any, text: str) -> None:
    name, number, kind, *group = text.split()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("{"):
        _add_map(message, field, kind[1:-1])
        return
    if kind.startswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    _set_type(field, kind.removeprefix("*"))
    if group:
        title = group[0].removeprefix("|")
        if all(known.name != title for known in message.oneof_decl):
            message.oneof_decl.add(name=title)
        field.oneof_index = 0


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tinker_cookbook/wire.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES)
    return {one.name: message_factory.GetMessageClass(one) for one in found}


_CLASSES = _message_classes()

ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
