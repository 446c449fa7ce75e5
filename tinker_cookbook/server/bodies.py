"""Bodies of the protocol's JSON requests. Unknown fields are ignored: newer SDKs send more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Id = Annotated[str, Field(min_length=1, max_length=300)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
"""Of a request. A copy of a sampling client in another process counts from a random number, 10^9
times one below 10^9."""
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What arrays can hold; JSON's numbers have no end."""
Metadata = dict[str, Any] | None


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(Body):
    """A client begins."""

    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionId(Body):
    """Which session."""

    session_id: Id


class FinishSession(Body):
    """Why a session ends."""

    reason: dict[str, Any] | None = None
    detail: str | None = None


class Lora(Body):
    """Shape of an adapter."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """A new adapter."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] | None = None


class ModelId(Body):
    """Which model."""

    model_id: Id


class LoadWeights(Body):
    """Weights for a model, or for one that begins with them."""

    path: Id
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Id | None = None
    user_metadata: Metadata = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class OptimStep(Body):
    """A step of the optimizer."""

    model_id: Id
    seq_id: Number | None = None
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """A checkpoint with its optimizer, by name."""

    model_id: Id
    path: str | None = None
    seq_id: Number | None = None
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SaveExternal(Body):
    """An adapter for use elsewhere."""

    model_id: Id
    path: str | None = None
    seq_id: Number | None = None
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: list[str] | None = None


class SaveForSampler(Body):
    """A checkpoint by name, or a sampler of the present weights."""

    model_id: Id
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    seq_id: Number | None = None
    ttl_seconds: Int64 | None = None
    user_metadata: Metadata = None


class CreateSampler(Body):
    """A sampler of a model or checkpoint."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: Id | None = None


class Tensor(Body):
    """Numbers, dense or in compressed sparse rows."""

    data: list[float]
    dtype: Literal["float32", "int64"] = "float32"
    shape: list[Annotated[int, Field(ge=0)]] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Chunk(Body):
    """A part of a prompt; only text is known here."""

    type: str = "encoded_text"
    tokens: list[Int64] = []


class Prompt(Body):
    """Token ids in parts."""

    chunks: list[Chunk]


class Sampling(Body):
    """How to draw."""

    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    stop: str | list[str] | list[Int64] | None = None
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0


class SampleBody(Body):
    """Samples of a prompt."""

    prompt: Prompt
    sampling_params: Sampling
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    base_model: Id | None = None
    model_path: Id | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=0)] | None = None
    record_stability_info: bool = False


class RequestId(Body):
    """Which request."""

    request_id: Id


class JsonDatum(Body):
    """One sequence to train on."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Tensor]


class PassInput(Body):
    """What a forward pass gets."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class PassHead(Body):
    """Whose pass it is, and the how manieth."""

    model_id: Id
    seq_id: Number | None = None


class JsonPass(PassHead):
    """A forward pass in JSON, as SDKs before 0.25 send it."""

    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None


class WeightsPath(Body):
    """Which checkpoint."""

    tinker_path: Id


class Ttl(Body):
    """How long a checkpoint stays; None: for good."""

    ttl_seconds: Int64 | None = None
