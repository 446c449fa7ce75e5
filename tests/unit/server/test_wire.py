"""Requests and results in the SDK's messages and in JSON."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from tinker import types
from tinker.proto import request_conv, response_conv, tinker_public_pb2
from tinker.types.topk_logprobs import TopkLogprobs

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.server.bodies import SampleBody, Tensor
from tinker_cookbook.server.errors import BodyTooLargeError
from tinker_cookbook.server.wire import (
    ImageExample,
    PassRequest,
    model_input,
    pass_message,
    read_pass,
    sample_message,
    tensor_of,
)


def test_the_sdk_reads_what_a_pass_gives():
    """Rows of one and of several targets, of other lengths."""
    rows = [np.array([-1.5, -2.0]), np.array([-3.0]), np.array([[-1.0, -2.0], [-3.0, -4.0]])]
    output = types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": types.TensorData.from_numpy(row.astype(np.float32))} for row in rows
        ],
        metrics={"loss:sum": 3.25},
    )
    found = response_conv.deserialize_forward_backward_output(pass_message(output))
    assert found.metrics == {"loss:sum": 3.25}
    for row, record in zip(rows, found.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(record["logprobs"].to_numpy(), row)


def test_the_sdk_reads_samples():
    topk = TopkLogprobs(np.array([[5, 6]], dtype=np.int32), np.array([[-1, -2]], dtype=np.float32))
    response = types.SampleResponse(
        sequences=[
            types.SampledSequence(
                stop_reason="stop",
                sequence_id="a",
                tokens_np=np.array([7], dtype=np.int32),
                logprobs_np=np.array([-0.5], dtype=np.float32),
                topk_logprobs_np=topk,
            )
        ],
        prompt_logprobs_np=np.array([np.nan, -1.0], dtype=np.float32),
        prompt_cache_hit_tokens=3,
    )
    found = response_conv.deserialize_sample_response(sample_message(response))
    (sequence,) = found.sequences
    assert (list(sequence.tokens), list(sequence.logprobs)) == ([7], [-0.5])
    assert sequence.stop_reason == "stop"
    assert sequence.topk_logprobs_np.token_ids.tolist() == [[5, 6]]
    assert found.prompt_logprobs == [None, -1.0]
    assert found.prompt_cache_hit_tokens == 3


def request(**fields):
    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=3, **fields)
    return read_pass(message.SerializeToString(), "", 1 << 20)


@pytest.mark.parametrize(
    ("datum", "said"),
    [
        ({"model_input": [{"encoded_text": {"tokens": b"abc"}}]}, "model_input: 3 bytes"),
        ({"model_input": [{"image": {"format": "png"}}]}, "chunk 0 is of type 'image'"),
        ({"model_input": [{"image": {"format": "gif", "data": b"x"}}]}, "'png' or 'jpeg'"),
        ({"model_input": [{"dmel": {"dmel": b"x"}}]}, "'dmel', expected text"),
        ({"loss_fn_inputs": {"w": {"dense": b"\0" * 8, "dtype": 1, "shape": [3]}}}, r"shape \[3\]"),
        ({"loss_fn_inputs": {"w": {"dense": b"\0" * 8, "dtype": 9}}}, "dtype 9"),
    ],
)
def test_invalid_datums_are_refused(datum, said):
    found = request(data=[datum])  # whose it is must be known, for the order of the requests
    assert (found.model_id, found.seq_id, found.data) == ("m", 3, [])
    with pytest.raises(ValueError, match=said):
        raise found.error


def test_images_of_the_sdk_arrive_as_they_were_sent():
    chunks = [
        types.EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=bytes(range(256)), format="png", expected_tokens=3),
        types.ImageChunk(data=b"x" * 100_000, format="jpeg"),
        types.EncodedTextChunk(tokens=[3]),
    ]
    sent = types.ModelInput(chunks=chunks)
    params = types.SamplingParams(max_tokens=1)
    asked = types.SampleRequest(prompt=sent, sampling_params=params, num_samples=1)
    body = SampleBody.model_validate_json(asked.model_dump_json())
    assert model_input(body.prompt.chunks, "prompt") == sent
    inputs = {"target_tokens": types.TensorData(data=[0] * 7, dtype="int64", shape=[7])}
    datums = [types.Datum(model_input=sent, loss_fn_inputs=inputs)]
    step = types.ForwardBackwardInput(data=datums, loss_fn="cross_entropy")
    message = request_conv.forward_backward_request_to_proto(
        types.ForwardBackwardRequest(model_id="m", seq_id=3, forward_backward_input=step)
    )
    (found,) = read_pass(message.SerializeToString(), "", 1 << 20).data
    assert isinstance(found, ImageExample)
    assert (found.model_input, found.where, len(found)) == (sent, "datum 0: model_input", 7)
    np.testing.assert_array_equal(found.inputs["target_tokens"], [0] * 7)


def test_invalid_bodies_are_refused():
    for body, encoding, said in [
        (b"\xff\xff\xff", "", "not a ForwardBackwardRequest"),
        (b"{}", "", "from version 0.25 on"),
        (b"abc", "zstd", "zstd"),
    ]:
        with pytest.raises(DataValidationError, match=said):
            read_pass(body, encoding, 1 << 20)


def test_a_packed_body_cannot_grow_beyond_the_limit():
    packed = zstandard.ZstdCompressor().compress(b"\0" * (4 << 20))
    with pytest.raises(BodyTooLargeError, match="more than 1 MiB"):
        read_pass(packed, "zstd", 1 << 20)


def test_the_sparse_tensors_of_a_pass_have_one_bound():
    rows = {"crow_indices": b"\0" * 16, "col_indices": b"", "values": b""}
    wide = {"sparse_csr": rows, "dtype": 2, "shape": [1, 50_000]}
    datum = {"model_input": [], "loss_fn_inputs": {"weights": wide}}
    assert [one.inputs["weights"].shape for one in request(data=[datum] * 2).data] == [
        (1, 50_000)
    ] * 2
    assert "must not be larger" in str(request(data=[datum] * 3).error)
    wide["shape"] = [1, -50_000]
    assert "expected two numbers" in str(request(data=[datum]).error)


def test_memory_that_torch_does_not_get_fails_the_pass_in_its_turn():
    def examples():
        raise RuntimeError("not enough memory: you tried to allocate")
        yield

    found = PassRequest("m", 3).read_data(examples())
    assert isinstance(found.error, RuntimeError)


LIMIT = 1 << 20
GOOD = {"data": [1, 2], "shape": [2, 3], "sparse_crow_indices": [0, 1, 2]}
EMPTY = {"data": [], "sparse_crow_indices": [0, 0], "sparse_col_indices": []}


def test_sparse_and_dense_tensors_are_read():
    read = tensor_of(Tensor(**GOOD, sparse_col_indices=[2, 0]), LIMIT).to_numpy()
    np.testing.assert_array_equal(read, [[0, 0, 1], [2, 0, 0]])
    dense = tensor_of(Tensor(data=[1, 2, 3], dtype="int64", shape=[3, 1]), LIMIT).to_numpy()
    assert (dense.tolist(), dense.dtype) == ([[1], [2], [3]], np.int64)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"data": [], "sparse_crow_indices": []}, "expected two numbers"),
        ({**GOOD, "sparse_col_indices": [2, 3]}, "columns below 3"),
        ({**GOOD, "sparse_col_indices": [2, -1]}, "columns below 3"),
        ({**GOOD, "sparse_col_indices": [2]}, "must be 2 columns"),
        ({**EMPTY, "shape": [1, 10**13]}, "must not be larger"),
        ({**EMPTY, "shape": [1, 2**61]}, "must not be larger"),
        ({**GOOD, "sparse_crow_indices": [0, 3, 2], "sparse_col_indices": [0, 0]}, "rise from 0"),
        ({**GOOD, "sparse_crow_indices": [0, 2**70, 2], "sparse_col_indices": [0, 0]}, "beyond"),
        ({"data": [float("inf")], "dtype": "int64"}, "beyond int64"),
    ],
)
def test_invalid_tensors_are_refused(tensor, message):
    with pytest.raises(DataValidationError, match=message):
        tensor_of(Tensor(**tensor), LIMIT)
