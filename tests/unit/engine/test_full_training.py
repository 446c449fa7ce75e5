"""``rank=0`` trains all weights, exactly as torch does."""

from __future__ import annotations

from pathlib import Path

import chz
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recipes.tiny_models.llama import word_tokenizer
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.exceptions import ConfigurationError, WeightsAdapterError
from tinker_cookbook.rl.train import Config
from tinker_cookbook.training.config import check_model
from tinker_cookbook.weights import commands

PROMPT = tinker.ModelInput.from_ints([3, 1, 4])
GREEDY = tinker.SamplingParams(max_tokens=4, seed=0)
ADAM = tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("full"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        tie_word_embeddings=request.param,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(["0123456789abcdefghi"], ".", Path(folder), ("<unk>",))
    return folder


def batch(step: int) -> list[tinker.Datum]:
    """Sequences of two lengths, with signed weights."""
    generator = torch.Generator().manual_seed(step)
    data = []
    for length in (5, 9, 7):
        tokens = torch.randint(0, 20, (length + 1,), generator=generator).tolist()
        fields = {
            "target_tokens": tokens[1:],
            "weights": torch.rand(length, generator=generator).tolist(),
        }
        whole = tinker.ModelInput.from_ints(tokens[:-1])
        data.append(tinker.Datum(model_input=whole, loss_fn_inputs=fields))
    return data


def torch_weights(model: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights after AdamW steps of torch."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        reference.parameters(), 1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    for step in range(steps):
        for datum in batch(step):
            logits = reference(torch.tensor([datum.model_input.to_ints()])).logits[0]
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            weights = datum.loss_fn_inputs["weights"].to_torch()
            logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            (-(logprobs * weights).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(reference.named_parameters())


def weights_of(client) -> dict[str, torch.Tensor]:
    return client._created.result().adapter.parameters()


def custom(data, logprobs):
    """The same loss as cross_entropy, as a custom loss."""
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
    return -sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True)), {}


def test_the_weights_are_those_of_torch_and_resume_exactly(model, tmp_path):
    with connect("local", device="cpu", dtype="float32", root=Path(tmp_path)) as connection:
        service = connection.service
        client = service.create_lora_training_client(model, rank=0).result()
        for step in range(2):
            client.forward_backward(batch(step), "cross_entropy")
            client.optim_step(ADAM).result()
        saved = client.save_state("two").result().path
        before = client.save_weights_and_get_sampling_client()
        early = before.sample(PROMPT, 1, GREEDY).result().sequences[0]
        client.forward_backward_custom(batch(2), custom)
        client.optim_step(ADAM).result()
        expected = torch_weights(model, 3)
        assert weights_of(client).keys() == expected.keys()
        for name, weight in weights_of(client).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)

        # The sampler of step 2 keeps its weights; the newest one agrees with the trainer.
        assert before.sample(PROMPT, 1, GREEDY).result().sequences[0].logprobs == early.logprobs
        newest = client.save_weights_and_get_sampling_client()
        tokens = [*PROMPT.to_ints(), 7, 2, 9]
        fields = {"target_tokens": tokens[1:], "weights": [1.0] * 5}
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=fields
        )
        trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        scores = newest.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
        assert scores[1:] == pytest.approx(trained.tolist(), abs=1e-5)

        # A resumed run equals the uninterrupted one, bit for bit; so does a saved sampler.
        resumed = service.create_training_client_from_state_with_optimizer(saved).result()
        resumed.forward_backward_custom(batch(2), custom)
        resumed.optim_step(ADAM).result()
        for name, weight in weights_of(resumed).items():
            assert torch.equal(weight, weights_of(client)[name]), name
        path = resumed.save_weights_for_sampler("end").result().path
        loaded = service.create_sampling_client(model_path=path).result()
        assert loaded.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result() == scores


def test_merge_writes_a_model_of_transformers(model, tmp_path):
    with connect("local", device="cpu", dtype="float32") as connection:
        client = connection.service.create_lora_training_client(model, rank=0).result()
        client.forward_backward(batch(0), "cross_entropy")
        client.optim_step(ADAM).result()
        path = client.save_weights_for_sampler("end").result().path
        trained = {name: weight.detach().clone() for name, weight in weights_of(client).items()}
    out = tmp_path / "out"
    with pytest.raises(WeightsAdapterError, match=r"has all weights.*weights merge tinker://"):
        commands.export(commands.ExportSettings(model_path=path, out=str(out)))
    settings = commands.MergeSettings(model_path=path, out=str(out), dtype="float32")
    with pytest.raises(ConfigurationError, match="merge_strategy: got 'shard'"):
        commands.merge(chz.replace(settings, merge_strategy="shard"))
    commands.merge(settings)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    expected = AutoModelForCausalLM.from_pretrained(model)
    expected.load_state_dict(trained, strict=False)
    tokens = torch.tensor([PROMPT.to_ints()])
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)


def test_what_rank_0_cannot_do_is_refused(model, tmp_path, monkeypatch):
    with connect("local", device="cpu", dtype="bfloat16", root=Path(tmp_path)) as connection:
        with pytest.raises(ConfigurationError, match="train_mlp: got False with lora_rank=0"):
            connection.service.create_lora_training_client(model, rank=0, train_mlp=False)
        client = connection.service.create_lora_training_client(model, rank=0)
        with pytest.raises(ConfigurationError, match="got dtype=bfloat16; set dtype=float32"):
            client.result().get_info()
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    with pytest.raises(ConfigurationError, match=r"lora_rank: got 0.*only the local engine"):
        check_model(Config(model_name=model, lora_rank=0, backend="http://127.0.0.1:1"))
