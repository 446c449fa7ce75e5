"""Rewards from a sandbox: what the machine does wrong is no reward of 0 (about 1 s)."""

from __future__ import annotations

import asyncio
import sys

import byte_tokenizer
import pytest
from scripted_policy import Script

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.rollouts.strategy import LeaveOutUngraded
from tinker_cookbook.sandbox import PythonGrader, grading_worker
from tinker_cookbook.tokenizer_utils import get_tokenizer

pytestmark = [
    pytest.mark.usefixtures("bytes_registered"),
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux"),
]


class WriteFunction(ProblemEnv):
    def __init__(self, grader, renderer):
        super().__init__(renderer)
        self.grader = grader

    def get_question(self):
        return "Write f(x) = 2x."

    async def check_answer(self, sample_str):
        tests = ["assert f(1) == 2", "assert f(4) == 8"]
        return (await self.grader.grade(sample_str.strip(), tests)).score


class EachALine(Script):
    async def sample_many(self, model_input, stop, num_samples, *, max_tokens=None):
        return [await self(model_input, stop) for _ in range(num_samples)]


def test_programs_are_rewarded_by_test_and_a_broken_sandbox_is_left_out(monkeypatch):
    start = grading_worker.launch.start
    broken = []

    def fail_for_some(*args, **kwargs):
        # The machine cannot make the sandbox of one worker, also when it tries again.
        if broken:
            raise SandboxError("no memory for a sandbox")
        return start(*args, **kwargs)

    monkeypatch.setattr(grading_worker.launch, "start", fail_for_some)
    renderer = get_renderer("role_colon", get_tokenizer(byte_tokenizer.NAME))
    lines = ["f = lambda x: 2 * x", "f = lambda x: x + 1", "import os; os._exit(0)", "f = 1 / 0"]
    with PythonGrader(workers=1) as grader, PythonGrader(workers=1) as other:
        assert grader.grade_sync("x = 1", ["assert True"]).passed
        broken.append(True)
        graders = iter([grader, grader, grader, other])
        builder = ProblemGroupBuilder(
            lambda: WriteFunction(next(graders), renderer), num_envs=len(lines)
        )
        work = do_group_rollout(builder, EachALine(*lines), strategy=LeaveOutUngraded())
        group = asyncio.run(work)
    assert group.get_total_rewards() == [1.0, 0.5, 0.0]
    (error,) = group.rollout_errors
    assert error.error_type == "SandboxInfrastructureError"
    assert "no memory for a sandbox" in error.error_message
