"""Self-distillation: what the teacher reads, the targets it gives, and both losses."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import numpy as np
import pytest
import soft_samples as ref
import tinker
import torch
from transformers import AutoModelForCausalLM

from recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.distillation import sdft
from tinker_cookbook.distillation.sdft_data import Demonstration
from tinker_cookbook.distillation.sdft_targets import ReverseKL, answer_datum
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

DEMONSTRATIONS = [("What is big?", "The sun is big."), ("Who ran?", "Tom ran to the park.")]


@pytest.fixture(scope="module")
def renderer(place):
    return get_renderer("role_colon", place.tokenizer)


def rollout(place, renderer):
    """Prompts of student and teacher, and answers of six tokens and more."""
    answers = [" The sun is a very big star.", " Tom and the dog ran and ran."]
    data, prompts = [], []
    for (question, golden), text in zip(DEMONSTRATIONS, answers, strict=True):
        student = renderer.build_generation_prompt([{"role": "user", "content": question}])
        tokens = place.tokenizer.encode(text, add_special_tokens=False)
        data.append(answer_datum(student, tokens))
        prompts.append(sdft.build_sdft_teacher_prompt(question, golden, renderer))
    return data, prompts


def build(place, data, prompts, **settings):
    metadata = [{"group_idx": i} for i in range(len(data))]
    return asyncio.run(
        sdft.build_topk_distillation_datums(data, metadata, place.teacher, prompts, **settings)
    )


def test_the_teacher_reads_question_and_demonstration(place, renderer):
    prompt = sdft.build_sdft_teacher_prompt("Why {x}?", "So {y}.", renderer, "Be kind.")
    text = place.tokenizer.decode(prompt.to_ints())
    assert "Why {x}?" in text
    assert "So {y}." in text
    assert "Be kind." in text
    assert text.endswith("Assistant:")
    short = sdft.build_sdft_teacher_prompt(
        "Q", "A", renderer, demo_template="{golden_answer}+{question}"
    )
    assert "A+Q" in place.tokenizer.decode(short.to_ints())


def test_earlier_messages_stay_in_the_teachers_prompt(place, renderer):
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who ran?"},
        {"role": "assistant", "content": "Tom."},
    ]
    demonstration = Demonstration.of(talk, 0)
    text = place.tokenizer.decode(
        demonstration.teacher_prompt(renderer, "Another.", "{question} {golden_answer}").to_ints()
    )
    assert "Be brief." in text
    assert "Another." not in text  # the conversation has a system message of its own
    assert text.index("Hello") < text.index("Who ran? Tom.")


def test_targets_are_the_teachers_behind_its_own_prompt(place, renderer):
    data, prompts = rollout(place, renderer)
    built, metrics = build(place, data, prompts, topk=7, skip_first_n_tokens=2)
    model = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float64).eval()
    entropies = []
    for item, made, prompt in zip(data, built, prompts, strict=True):
        at = np.flatnonzero(item.loss_fn_inputs["mask"].to_numpy())
        answer = item.loss_fn_inputs["target_tokens"].to_numpy()[at]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.to_ints(), *answer]])).logits[0]
        top = logits[prompt.length - 1 : -1].softmax(-1).topk(7)
        q = top.values / top.values.sum(-1, keepdim=True)
        targets = made.loss_fn_inputs["target_tokens"].to_numpy()
        weights = made.loss_fn_inputs["weights"].to_numpy()
        assert np.array_equal(targets[at[2:]], top.indices[2:].numpy())
        assert np.abs(weights[at[2:]] - q[2:].numpy()).max() < 1e-5
        assert not np.delete(weights, at[2:], axis=0).any()
        entropies += (-q * q.log()).sum(-1)[2:].tolist()
    assert metrics["sdft/total_completion_tokens"] == len(entropies)
    assert metrics["sdft/mean_teacher_entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)
    assert metrics["sdft/num_datums"] == 2
    assert metrics["sdft/teacher_truncated_count"] == 0


def test_an_answer_too_long_behind_the_teachers_prompt_is_cut_and_counted(place, renderer):
    data, prompts = rollout(place, renderer)
    limit = prompts[0].length + 5
    built, metrics = build(place, data, prompts, topk=3, max_context_length=limit)
    mask = data[0].loss_fn_inputs["mask"].to_numpy()
    trained = built[0].loss_fn_inputs["weights"].to_numpy().any(-1)
    assert trained.sum() == 2  # of five that fit, the first three are skipped
    assert np.flatnonzero(trained).tolist() == np.flatnonzero(mask)[3:5].tolist()
    assert metrics["sdft/teacher_truncated_count"] >= 1


def test_reverse_kl_and_its_gradient_equal_autograd_through_peft(place, renderer):
    data, prompts = rollout(place, renderer)
    built, _ = build(place, data, prompts, topk=20)
    # A target that is none: its slot takes no part.
    weights = built[0].loss_fn_inputs["weights"].to_numpy().copy()
    weights[:, -1] = 0
    built[0].loss_fn_inputs["weights"] = tinker.TensorData.from_numpy(weights)
    output = place.student.forward_backward_custom(built, ReverseKL()).result()

    def reverse_kl(item, logits):
        total = torch.zeros((), dtype=torch.float64)
        targets = item.loss_fn_inputs["target_tokens"].to_numpy()
        q_all = item.loss_fn_inputs["weights"].to_numpy().astype(np.float64)
        for t in range(len(targets)):
            chosen = [k for k in range(targets.shape[1]) if q_all[t, k] > 0]
            if not chosen:
                continue
            # Renormalised probabilities are a softmax of the logits of the chosen tokens alone.
            p = logits[t, targets[t, chosen].tolist()].softmax(-1)
            q = torch.from_numpy(q_all[t, chosen])
            total = total + (p * (p / q).log()).sum()
        return total

    value, expected = ref.reference_gradients(place.peft_model(), built, reverse_kl)
    assert value > 0.01
    assert output.metrics["loss:sum"] == pytest.approx(value, rel=1e-4)
    assert ref.relative_error(place.gradients(), expected) < 1e-5
    logprobs = [record["logprobs"].to_torch() for record in output.loss_fn_outputs]
    loss, metrics = sdft.reverse_kl_custom_loss(built, logprobs)
    count = sum(d.loss_fn_inputs["weights"].to_numpy().any(-1).sum() for d in built)
    assert float(loss) == pytest.approx(value, rel=1e-4)
    assert metrics["sdft/reverse_kl_mean"] == pytest.approx(value / count, rel=1e-4)


def write(path, *talks):
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(path)


def talk(question="What is big?", answer="The sun is big."):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def config_of(place, tmp_path, *talks, **settings):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=place.model, renderer_name="role_colon", batch_size=1
    )
    builder = sdft.DemonstrationBuilder(
        common_config=common, file_path=write(tmp_path / "demos.jsonl", *(talks or [talk()]))
    )
    values = {"model_name": place.model, "log_path": str(tmp_path / "run"), "backend": "local"}
    return sdft.Config(**{**values, "dataset_builder": builder, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"topk": 0}, "topk: got 0, expected 1 to 512"),
        ({"topk": 513}, "topk: got 513, expected 1 to 512"),
        ({"group_size": 0}, "group_size: got 0"),
        ({"group_size": 2, "on_policy": False}, "group_size: got 2 with on_policy=False"),
        ({"teacher_sync_every": 30}, "multiple of save_every (20)"),
        ({"teacher_sync_every": 20, "save_every": 0}, "multiple of save_every (0)"),
        ({"demo_template": "{question}"}, "demo_template"),
        ({"skip_first_n_tokens": -1}, "skip_first_n_tokens: got -1"),
    ],
)
def test_invalid_settings_are_refused(place, tmp_path, settings, words):
    with pytest.raises(ConfigurationError) as error:
        asyncio.run(sdft.main(config_of(place, tmp_path, **settings)))
    assert words in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("reverse", [False, True])
def test_training_moves_the_student_to_its_teacher(place, tmp_path, reverse):
    config = config_of(
        place, tmp_path, talk(), talk("Who ran?", "Tom ran to the park."),
        renderer_name="role_colon", num_epochs=4, lora_rank=4, learning_rate=1e-3, reverse=reverse,
        on_policy=False, save_every=0, device="cpu", dtype="float32",
    )  # fmt: skip
    asyncio.run(sdft.main(config))
    rows = ref.rows(config.log_path)
    assert len(rows) == 8
    name = "sdft/reverse_kl_mean" if reverse else "sdft/forward_kl"
    # The texts are the same in every epoch: what falls is the distance, not what is measured.
    assert sum(row[name] for row in rows[-2:]) < 0.6 * sum(row[name] for row in rows[:2])


def test_data_as_arguments_of_main(place, tmp_path):
    """The official form of the call; 1.5 s."""
    renderer = get_renderer("role_colon", place.tokenizer)
    group = ProblemGroupBuilder(partial(ArithmeticEnv, 1, 2, renderer), 2)

    class Sums:
        def __len__(self):
            return 1

        def get_batch(self, index):
            return [group], ["What is 1 + 2?"], ["3"]

    config = config_of(
        place, tmp_path, talk(), renderer_name="role_colon", dataset_builder=None, lora_rank=4,
        save_every=0, max_tokens=4, device="cpu", dtype="float32",
    )  # fmt: skip
    asyncio.run(sdft.main(config, Sums()))
    assert [row["env/all/total_episodes"] for row in ref.rows(config.log_path)] == [2]
