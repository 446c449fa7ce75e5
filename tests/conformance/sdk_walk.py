"""A walk through the SDK's calls that every version has, run by the Python of any version:

    PYTHON sdk_walk.py MODEL     (with TINKER_BASE_URL and TINKER_API_KEY)

Prints one JSON object of what it got; it needs tinker and numpy alone.
"""

import json
import sys
import warnings
from importlib.metadata import version

import numpy as np
import tinker
from tinker import types

warnings.simplefilter("ignore")
TOKENS = [1, 44, 101, 7, 9, 300]


def result_of(value):
    """The value of a future, or a value: what creates clients differs by version."""
    return value.result() if hasattr(value, "result") else value


def datum(tokens, weight=1.0):
    """All tokens after the first are trained."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.full(len(tokens) - 1, weight, dtype=np.float32),
        },
    )


def losses(client, steps):
    """A few steps, each submitted before the results of the last are there."""
    futures = []
    for _ in range(steps):
        futures.append(client.forward_backward([datum(TOKENS), datum(TOKENS[:4])], "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=1e-2))
    return [future.result().metrics["loss:sum"] for future in futures]


def walk(model):
    """Trains, saves, loads, samples, lists and deletes."""
    service = tinker.ServiceClient()
    client = result_of(service.create_lora_training_client(model, rank=4, seed=0))
    said = {"sdk": version("tinker"), "losses": losses(client, 3)}
    output = client.forward([datum(TOKENS)], "cross_entropy").result()
    said["logprobs"] = np.asarray(output.loss_fn_outputs[0]["logprobs"].data).tolist()
    output = client.forward([datum(TOKENS, 3e38)], "cross_entropy").result()
    said["overflow"] = str(output.metrics["loss:sum"])  # JSON has no word for it
    path = client.save_state("walk").result().path
    again = result_of(service.create_training_client_from_state(path))
    said["again"] = losses(again, 1)
    said["straight"] = losses(client, 1)
    live = result_of(client.save_weights_and_get_sampling_client("walk"))
    prompt = types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=4, seed=1, temperature=1.0)
    drawn = live.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    drawn = drawn.result()
    said["samples"] = [list(map(int, one.tokens)) for one in drawn.sequences]
    said["prompt_logprobs"] = list(drawn.prompt_logprobs)
    said["topk"] = [row and [list(pair) for pair in row] for row in drawn.topk_prompt_logprobs]
    said["scores"] = live.compute_logprobs(prompt).result()
    saved = client.save_weights_for_sampler("walk-s").result().path
    other = result_of(service.create_sampling_client(model_path=saved))
    same = other.sample(prompt, 2, params).result()
    said["saved_samples"] = [list(map(int, one.tokens)) for one in same.sequences]
    rest = service.create_rest_client()
    run = client.model_id
    listed = rest.list_checkpoints(run).result().checkpoints
    said["listed"] = sorted(one.checkpoint_id for one in listed)
    rest.delete_checkpoint(run, "weights/walk").result()
    listed = rest.list_checkpoints(run).result().checkpoints
    said["after"] = [one.checkpoint_id for one in listed]
    try:
        client.forward([datum(TOKENS)], "nonsense").result()
    except Exception as error:
        said["error"] = str(error)
    return said


if __name__ == "__main__":
    print(json.dumps(walk(sys.argv[1])))
