"""The teacher's signal: by hand, against plain autograd, and against plain transformers."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.distillation.on_policy_prompts import (
    AnswerEndings,
    TeacherGroupBuilder,
    TeacherView,
)
from tinker_cookbook.distillation.on_policy_teachers import Teacher, TeacherSignal, add_reverse_kl
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import assemble_training_data, trajectory_to_data
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.loop.adjuster import RolloutData
from tinker_cookbook.rl.loop.sources import RolloutGroup
from tinker_cookbook.rl.rollouts.hooks import teacher_observation
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.tokenizer_utils import get_tokenizer


class Scorer:
    """A teacher of whom every token has the log-probability ``-token / 10``."""

    def __init__(self, factor=0.1):
        self.factor, self.asked = factor, []

    def compute_logprobs(self, model_input, prompt_logprobs_last_n=None):
        tokens = model_input.to_ints()
        self.asked.append(tokens)

        async def wait():
            return [None, *(-self.factor * token for token in tokens[1:])]

        return wait()


def turn(ob, tokens, logprobs, *, masked=False, teacher_ob=None) -> Transition:
    return Transition(
        ob=tinker.ModelInput.from_ints(ob),
        ac=TokensWithLogprobs(list(tokens), list(logprobs)),
        reward=0.0,
        episode_done=True,
        masked=masked,
        teacher_ob=None if teacher_ob is None else tinker.ModelInput.from_ints(teacher_ob),
    )


def episode(*turns) -> Trajectory:
    return Trajectory(list(turns), tinker.ModelInput.empty())


def played(*groups, rewards=None) -> RolloutData:
    """Groups of ``(dataset, trajectories)``, with their data as a run makes them."""
    made = [
        RolloutGroup(
            0,
            i,
            result=TrajectoryGroup(
                list(trajectories), [0.0] * len(trajectories), [{}] * len(trajectories)
            ),
            tags=[f"dataset_{dataset}", "prompts"],
        )
        for i, (dataset, trajectories) in enumerate(groups)
    ]
    advantages = [
        np.zeros(len(one.group.trajectories_G)) if rewards is None else np.array(rewards[i])
        for i, one in enumerate(made)
    ]
    data_D, origins_D = assemble_training_data([one.group for one in made], advantages)
    return RolloutData(made, data_D, origins_D)


def advantages(data: RolloutData) -> list[list[float]]:
    return [datum.loss_fn_inputs["advantages"].tolist() for datum in data.data_D]


ONE = episode(turn([1, 2], [3, 4], [-1.0, -2.0]))  # teacher: -0.3, -0.4
# Two turns that are no extension, so two data; the second turn has a masked one before it.
TWO = episode(
    turn([5], [6], [-0.5]),
    turn([9], [8], [-0.1], masked=True),
    turn([7], [10], [-3.0]),
)


def test_each_token_gets_the_difference_to_its_own_teacher():
    data = played((0, [ONE]), (1, [TWO]))
    near, far = Scorer(0.1), Scorer(0.5)
    found = asyncio.run(TeacherSignal([Teacher(near), Teacher(far)], coef=2.0).adjust(data))
    # d = student - teacher: -0.7, -1.6 of the first; -0.5 + 3.0 and -3.0 + 5.0 of the second.
    flat = [value for values in advantages(data) for value in values]
    assert flat == pytest.approx([0, 1.4, 3.2, -5.0, 0, -4.0], abs=1e-6)
    means = {name: mean.mean for name, mean in found.means.items()}
    assert means == pytest.approx(
        {
            "teacher_kl": (-0.7 - 1.6 + 2.5 + 2.0) / 4,
            "teacher_kl/dataset_0": -1.15,
            "teacher_kl/dataset_1": 2.25,
            "teacher_kl/per_episode": (-0.7 - 1.6 + 2.5 + 2.0) / 2,
        }
    )
    assert found.has_signal
    assert [len(near.asked), len(far.asked)] == [1, 3]


def test_a_discount_lets_a_token_answer_for_later_ones():
    data = played((0, [ONE]))
    asyncio.run(TeacherSignal([Teacher(Scorer())], discount=0.5).adjust(data))
    assert advantages(data)[0] == pytest.approx([0, 0.7 + 0.5 * 1.6, 1.6], abs=1e-6)


def test_a_teacher_that_agrees_gives_no_signal_but_rewards_do():
    same = episode(turn([1, 2], [3, 4], [-0.3, -0.4]))
    signal = TeacherSignal([Teacher(Scorer())])
    silent = asyncio.run(signal.adjust(played((0, [same]))))
    assert not silent.has_signal
    assert silent.means["teacher_kl"].mean == pytest.approx(0, abs=1e-6)
    paid = played((0, [same]), rewards=[[1.0]])
    assert asyncio.run(signal.adjust(paid)).has_signal
    ignored = TeacherSignal([Teacher(Scorer())], reward_coef=0.0)
    assert not asyncio.run(ignored.adjust(played((0, [same]), rewards=[[1.0]]))).has_signal


def test_the_baseline_is_the_mean_of_the_same_dataset():
    data = played((0, [ONE]), (1, [TWO]))
    teachers = [Teacher(Scorer(0.1)), Teacher(Scorer(0.5))]
    asyncio.run(TeacherSignal(teachers, center=True).adjust(data))
    flat = [v for values in advantages(data) for v in values]
    near, far = (0.7 + 1.6) / 2, (-2.5 - 2.0) / 2
    expected = [0, 0.7 - near, 1.6 - near, -2.5 - far, 0, -2.0 - far]
    assert flat == pytest.approx(expected, abs=1e-6)


def test_nothing_is_trained_of_masked_turns():
    data = played((0, [episode(turn([5], [6], [-0.5], masked=True))]))
    found = asyncio.run(TeacherSignal([Teacher(Scorer())]).adjust(data))
    assert not found.has_signal
    assert found.means == {}


def test_the_advantages_give_the_gradient_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, weighed by their probability, the policy gradient is
    the gradient of -KL(student || teacher) that autograd finds."""
    torch.manual_seed(0)
    student = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    logprobs = student.log_softmax(-1)
    data_D = [
        trajectory_to_data(episode(turn([1], [token], [logprobs[token].item()])), 0.0)[0]
        for token in range(7)
    ]
    add_reverse_kl(data_D, teacher.numpy(), [0] * 7, coef=1.0, discount=0.0)
    weights = torch.tensor([float(d.loss_fn_inputs["advantages"].tolist()[0]) for d in data_D])
    surrogate = (logprobs.exp().detach() * weights * logprobs).sum()
    (ours,) = torch.autograd.grad(surrogate, student, retain_graph=True)
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    (exact,) = torch.autograd.grad(-kl, student)
    assert torch.allclose(ours, exact, rtol=1e-5, atol=1e-6)


# --- a teacher of another chat format --------------------------------------------------------


@pytest.fixture(scope="module")
def plain(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def client(model):
    service = connect("local", device="cpu", dtype="float32").service
    return service.create_sampling_client(base_model=model).result()


def exact(plain, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of an answer by plain transformers."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        scores = plain(ids).logits[0].log_softmax(-1)
    at = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return [float(scores[i, token]) for i, token in zip(at, answer, strict=True)]


USER = [{"role": "user", "content": "Hi?"}]


def renderers(model, *names):
    return [get_renderer(name, get_tokenizer(model)) for name in names]


def test_a_mark_becomes_the_text_and_later_turns_are_rendered_anew(model, client, plain):
    student, teacher = renderers(model, "chatml", "role_colon")
    tokenizer = get_tokenizer(model)
    (mark,) = student.get_stop_sequences()
    later = [*USER, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "So"}]
    turns, expected = [], []
    for messages, text, cut in [(USER, "Yes", False), (later, "No", True)]:
        tokens = tokenizer.encode(text) + ([] if cut else [mark])
        sampled = [-0.5] * len(tokens)
        seen = teacher.build_generation_prompt(messages).to_ints()
        ob = student.build_generation_prompt(messages).to_ints()
        turns.append(turn(ob, tokens, sampled, teacher_ob=seen))
        ending = [] if cut else tokenizer.encode("\n\nUser:")
        judged = exact(plain, seen, [*tokenizer.encode(text), *ending])
        expected += [value + 0.5 for value in judged[: len(text)]]
        expected += [] if cut else [sum(judged[len(text) :]) + 0.5]
    data = played((0, [episode(*turns)]))
    asyncio.run(TeacherSignal([Teacher(client, AnswerEndings(student, teacher))]).adjust(data))
    assert len(data.data_D) == 1  # the student's turns are one sequence
    (datum,) = data.data_D
    mask = datum.loss_fn_inputs["mask"].to_numpy() != 0
    assert datum.loss_fn_inputs["advantages"].to_numpy()[mask] == pytest.approx(expected, abs=1e-4)


# --- what the teacher sees ----------------------------------------------------------------------


def test_the_teachers_prompt_comes_first_and_its_hint_last(model):
    (chatml,) = renderers(model, "chatml")
    shot = {"role": "user", "content": "A?"}
    view = TeacherView(chatml, "Be brief.", (shot,), " ({answer}!)")
    rest = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "1+1?"}]
    seen = view.messages("2", [{"role": "system", "content": "Adds."}, *rest])
    assert seen == [
        {"role": "system", "content": "Be brief.\n\nAdds."},
        shot,
        rest[0],
        {"role": "user", "content": "1+1? (2!)"},
    ]
    assert view.messages("2", rest)[0] == {"role": "system", "content": "Be brief."}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]
    assert TeacherView(chatml, answer_hint="!").messages("", parts)[0]["content"][1] == {
        "type": "text",
        "text": "!",
    }
    assert rest[1] == {"role": "user", "content": "1+1?"}  # the student's is left as it was


class Talk(ProblemEnv):
    def get_question(self):
        return "1+1?"

    def check_answer(self, sample_str):
        return True

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "2"


def test_a_group_takes_its_teachers_view_to_another_process(model):
    student, teacher = renderers(model, "role_colon", "chatml")
    group = ProblemGroupBuilder(partial(Talk, student), 2, "sums")
    taught = TeacherGroupBuilder(group, 1, TeacherView(teacher, answer_hint=" It is {answer}."))
    there = pickle.loads(pickle.dumps(taught))
    assert there.logging_tags() == ["dataset_1", "sums"]
    env = asyncio.run(there.make_env(0))
    seen = asyncio.run(teacher_observation(env))
    asked = [{"role": "user", "content": "1+1? It is 2."}]
    assert seen.to_ints() == teacher.build_generation_prompt(asked).to_ints()
    plainly = TeacherGroupBuilder(group, 0, None)
    assert asyncio.run(teacher_observation(asyncio.run(plainly.make_envs())[0])) is None
