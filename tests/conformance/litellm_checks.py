"""LiteLLM's calls on the bundled engine and on a server; run by ``test_litellm.py``."""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

import litellm
import pytest
import tinker

from tinker_cookbook import backends, model_info, renderers
from tinker_cookbook.third_party.litellm import register_litellm_provider
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL, URL, QWEN3 = sys.argv[1:]
MESSAGES = [{"role": "system", "content": "Tell"}, {"role": "user", "content": "Once upon a time"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ASKED = {"model": "tinker/label", "messages": MESSAGES, "base_model": MODEL, "max_tokens": 12}

local = backends.connect("local", device="cpu", dtype="float32").service
provider = register_litellm_provider(service_client=local)
assert register_litellm_provider() is provider
renderer = renderers.get_renderer(
    model_info.get_recommended_renderer_name(MODEL),
    local.create_sampling_client(base_model=MODEL).get_tokenizer(),
)
PROMPT = renderer.build_generation_prompt(MESSAGES).to_ints()


def direct(client, prompt=PROMPT):
    params = tinker.SamplingParams(max_tokens=12, temperature=0, stop=renderer.get_stop_sequences())
    model_input = tinker.ModelInput.from_ints(prompt)
    return client.sample(model_input, 1, params).result().sequences[0]


def check(response, client, prompt=PROMPT):
    """The response has the tokens that the client itself samples."""
    (choice,), expected = response.choices, direct(client, prompt)
    fields = choice.message.provider_specific_fields
    assert fields["prompt_token_ids"] == prompt
    assert fields["completion_token_ids"] == expected.tokens
    assert fields["completion_logprobs"] == expected.logprobs
    assert response.usage.total_tokens == len(prompt) + len(expected.tokens)
    text = renderers.get_text_content(renderer.parse_response(expected.tokens)[0])
    assert (choice.message.content, choice.finish_reason) == (text, "length")
    return text


base = local.create_sampling_client(base_model=MODEL)
text = check(litellm.completion(**ASKED, temperature=0), base)
check(asyncio.run(litellm.acompletion(**ASKED, temperature=0)), base)


async def within_a_loop():
    return litellm.completion(**ASKED, temperature=0)


check(asyncio.run(within_a_loop()), base)
print("ok completions")

word = text.split()[2]
stopped = litellm.completion(**ASKED, temperature=0, stop=[word]).choices[0]
assert (stopped.message.content, stopped.finish_reason) == (text.partition(word)[0], "stop")
print("ok stops")


class Scripted:
    """Calls the tool, in the format of Qwen3."""

    async def sample(self, prompt, **_):
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        tokens = qwen3.encode(f"<think>\nhmm\n</think>\n\n{call}<|im_end|>")
        sequence = SimpleNamespace(tokens=tokens, logprobs=None, stop_reason="stop")
        return SimpleNamespace(sequences=[sequence])


qwen3 = get_tokenizer(QWEN3)
provider._models["scripted"] = Scripted(), renderers.get_renderer("qwen3", qwen3)
made = litellm.completion(**ASKED | {"base_model": "scripted"}, tools=[TOOL]).choices[0]
template = {"tools": [TOOL], "add_generation_prompt": True, "tokenize": False}
reference = qwen3.encode(qwen3.apply_chat_template(MESSAGES, **template))
assert made.message.provider_specific_fields["prompt_token_ids"] == reference
assert (made.finish_reason, made.message.content) == ("tool_calls", None)
assert made.message.reasoning_content.strip() == "hmm"
(call,) = made.message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
print("ok tools")

training = local.create_lora_training_client(base_model=MODEL, rank=4, seed=0)
target = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(PROMPT),
    loss_fn_inputs={"target_tokens": [*PROMPT[1:], 9], "weights": [1.0] * len(PROMPT)},
)
for _ in range(3):
    training.forward_backward([target], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
trained = training.save_weights_and_get_sampling_client().result()
assert direct(trained).tokens != direct(base).tokens
provider.set_client(trained)
check(litellm.completion(**ASKED, temperature=0), trained)
print("ok checkpoint")

for error, word, more in (
    (litellm.BadRequestError, "n: got 2", {"n": 2}),
    (litellm.BadRequestError, "response_format", {"response_format": {"type": "json_object"}}),
    (litellm.BadRequestError, "stream", {"stream": True}),
    (litellm.BadRequestError, "declares no tools", {"tools": [TOOL]}),
    (litellm.BadRequestError, "nowhere", {"base_model": "/nowhere"}),
    (litellm.APIConnectionError, "base_model is required", {"base_model": None}),
):
    for call in (litellm.completion, lambda **kw: asyncio.run(litellm.acompletion(**kw))):
        with pytest.raises(error, match=word):
            call(**ASKED | more)
print("ok refusals")

os.environ["TINKER_API_KEY"] = os.environ["KEY"]
provider._models.clear()
provider._service_client = backends.connect(URL).service
check(asyncio.run(litellm.acompletion(**ASKED, temperature=0)), base)
print("ok server")
