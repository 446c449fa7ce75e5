"""The update of one step here and of TRL's GRPOTrainer, on the same samples.

    PYTHON_WITH_TRL benchmarks/studies/per_step.py MODEL_FOLDER

Both sides start from the same adapter and train six steps on the same groups, whose answers become
shorter from step to step. Printed: the gradient's norm at each step, and how the adapter moved
(cosine and lengths), for ``loss_normalization`` ``sum`` and ``tokens``. Nothing is sampled by TRL:
its ``rollout_func`` gives the recorded answers.
"""

from __future__ import annotations

import random
import sys
import tempfile
from typing import Any

import numpy as np
import tinker
import torch

from tinker_cookbook.backends import connect
from tinker_cookbook.tokenizer_utils import get_tokenizer

GROUPS, SIZE, STEPS, MAX_TOKENS, LEARNING_RATE = 4, 8, 6, 24, 1e-3
OPENINGS = (
    "Once upon a time, there was a little",
    "Tom was in the garden with his",
    "Mom said: look, there is a",
    "The sun was warm. On the grass sat a",
)
ADAM = tinker.AdamParams(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-8)


def record(service: Any, model: str, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Samples of the plain model for each prompt, cut so that they shorten from step to step."""
    rng = random.Random(0)
    client = service.create_sampling_client(base_model=model).result()
    futures = [
        client.sample(
            tinker.ModelInput.from_ints(prompt),
            SIZE,
            tinker.SamplingParams(max_tokens=MAX_TOKENS, seed=index),
        )
        for index, prompt in enumerate(prompts)
    ]
    groups = []
    for index, future in enumerate(futures):
        most = 1.2 - 0.18 * (index // GROUPS)
        sampled = [list(sequence.tokens) for sequence in future.result().sequences]
        groups.append([d[: max(2, int(len(d) * rng.random() * most))] for d in sampled])
    return groups


def datums(prompt: list[int], answers: list[list[int]], rewards: list[float]) -> list[tinker.Datum]:
    """Centred advantages. ``logprobs`` are not read, as the loss below has fixed weights of 1."""
    found, mean = [], sum(rewards) / len(rewards)
    for answer, reward in zip(answers, rewards, strict=True):
        whole, before = prompt + answer, len(prompt) - 1
        action = np.concatenate([np.zeros(before), np.ones(len(answer))]).astype(np.float32)
        found.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(whole[:-1]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData.from_numpy(np.array(whole[1:])),
                    "logprobs": tinker.TensorData.from_numpy(-action),
                    "advantages": tinker.TensorData.from_numpy(np.float32(reward - mean) * action),
                },
            )
        )
    return found


def train_here(client: Any, steps: list[list[tinker.Datum]], divide: bool) -> list[float]:
    """Gradient norms of the steps. The ratio is 1 in TRL too, where nothing is off-policy."""
    norms = []
    for data in steps:
        tokens = sum(int((d.loss_fn_inputs["logprobs"].to_numpy() < 0).sum()) for d in data)
        if divide:
            for datum in data:
                scaled = datum.loss_fn_inputs["advantages"].to_numpy() / np.float32(tokens)
                datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(scaled)
        clip = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
        client.forward_backward(data, "cispo", clip)
        norms.append(client.optim_step(ADAM).result().metrics["grad_norm"])
    return norms


def train_trl(
    model: str,
    start: dict[str, torch.Tensor],
    prompts: list[list[int]],
    answers: list[list[list[int]]],
    rewards: list[list[float]],
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms, and how each tensor moved."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.trl_comparison import lora_config

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batches = iter(range(STEPS))

    def replay(_: Any, __: Any) -> dict[str, Any]:
        step = next(batches)
        places = [(g, m) for g in range(step * GROUPS, (step + 1) * GROUPS) for m in range(SIZE)]
        return {
            "prompt_ids": [prompts[g] for g, _ in places],
            "completion_ids": [answers[g][m] for g, m in places],
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], problem: list[int], **_: Any) -> list[float]:
        members = [i % SIZE for i in range(len(problem))]
        return [rewards[g][m] for g, m in zip(problem, members, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=plain,
            reward_funcs=reward,
            rollout_func=replay,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=GROUPS * SIZE,
                num_generations=SIZE,
                max_completion_length=MAX_TOKENS,
                max_steps=STEPS,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                adam_beta2=ADAM.beta2,
                adam_epsilon=ADAM.eps,
                max_grad_norm=0.0,
                beta=0.0,
                scale_rewards="none",
                shuffle_dataset=False,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [OPENINGS[g % len(OPENINGS)] for g in range(len(prompts))],
                    "problem": list(range(len(prompts))),
                }
            ),
            processing_class=tokenizer,
            peft_config=lora_config(plain, 32),
        )
        named = dict(trainer.model.named_parameters())
        ours = {name: named[name.replace(".weight", ".default.weight")] for name in start}
        with torch.no_grad():
            for name, tensor in start.items():
                ours[name].copy_(tensor)
        trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return norms, {name: ours[name].detach() - start[name] for name in start}


def main(model: str) -> None:
    """Prints both sides."""
    tokenizer = get_tokenizer(model)
    prompts = [tokenizer.encode(OPENINGS[g % len(OPENINGS)]) for g in range(GROUPS * STEPS)]
    moved, start, answers, rewards = {}, {}, [], []
    with connect("local", device="cpu", dtype="float32") as connection:
        service = connection.service
        answers = record(service, model, prompts)
        rewards = [
            [float("a" in tokenizer.decode(a)) + 0.01 * len(set(a)) for a in group]
            for group in answers
        ]
        for divide in (False, True):
            client = service.create_lora_training_client(model, seed=7, train_unembed=False)
            adapter = client.result()._created.result().adapter
            start = {name: t.detach().clone() for name, t in adapter.parameters().items()}
            steps = [
                [
                    datum
                    for g in range(step * GROUPS, (step + 1) * GROUPS)
                    for datum in datums(prompts[g], answers[g], rewards[g])
                ]
                for step in range(STEPS)
            ]
            name = "tokens" if divide else "sum"
            print(name, [round(norm, 4) for norm in train_here(client.result(), steps, divide)])
            after = client.result()._created.result().adapter.parameters()
            moved[name] = {key: after[key].detach() - start[key] for key in start}
    norms, theirs = train_trl(model, start, prompts, answers, rewards)
    print("trl", [round(norm, 4) for norm in norms])
    for name, ours in moved.items():
        a, b = (torch.cat([side[key].flatten() for key in start]) for side in (ours, theirs))
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        print(f"{name}: cosine {cosine:.6f}, moved {a.norm():.5f}, TRL {b.norm():.5f}")


if __name__ == "__main__":
    main(sys.argv[1])
