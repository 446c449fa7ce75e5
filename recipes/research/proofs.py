"""Proofs by induction that z3 checks: what do RL and a second attempt add to pass@k?

    python -m recipes.research.proofs
    python -m recipes.research.proofs seeds=0 steps=20 log_path=…

``x`` starts at a number and changes by another in each step; the model shall prove that it never
has a third value. Its proof is an induction hypothesis, ``x >= 5`` or ``x % 3 == 2``, for which z3
checks three statements over all integers: it is true at the start (base), a step keeps it (step),
and it excludes the value (claim). After a wrong proof the checker names the statement that fails,
and the model may try once more. The study needs the extra ``proofs``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.eval.statistics import pass_at_k
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.runs import reinforce
from tinker_cookbook.recipes.tiny_models.dialogues import dialogue, dialogues_model
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.task import TaskDatasetBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import missing_extra

try:
    import z3
except ImportError as error:
    raise missing_extra("proofs", error, "proofs") from error

PROVED = "proved"
FAILURES = ("not a proof", "base fails", "step fails", "claim fails")
PATTERN = r"x [!=<>%+-]+ ?|, x [!=+-]+ |\d+| == |(?:not|base|step|claim|a|proof|fails|wrong) ?"
ATTEMPTS = (1, 2, 4, 8)
_PROOF = re.compile(r"x (>=|<=) ([0-9]+)|x % ([0-9]+) == ([0-9]+)")
_LARGEST = 20
_HELD_OUT = 40
_X: Any = z3.Int("x")
# One solver for all checks: a new one takes eight times as long as a check.
_SOLVER = z3.Solver()


class Claim(NamedTuple):
    """``x`` starts at ``start`` and never becomes ``excluded``."""

    start: int
    change: int
    excluded: int

    @property
    def text(self) -> str:
        """The claim as the model reads it."""
        sign = "-" if self.change < 0 else "+"
        return f"x = {self.start}, x {sign}= {abs(self.change)}, x != {self.excluded}"


def check(claim: Claim, proof: str) -> str:
    """Returns ``PROVED`` or what fails, the first of ``FAILURES``."""
    found = _PROOF.fullmatch(proof)
    # In z3 the remainder of a division by zero may be any number.
    if found is None or (found[3] and not int(found[3])):
        return FAILURES[0]
    for failure, value in zip(FAILURES[1:], claim, strict=True):
        if not _is_true(failure, value, found.groups(default="")):
            return failure
    return PROVED


@cache
def _is_true(failure: str, value: int, proof: tuple[str, ...]) -> bool:
    """Returns whether z3 proves a statement, given the number of the claim that is in it."""
    relation, bound, modulus, remainder = proof

    def holds(x: Any) -> Any:
        if modulus:
            return x % int(modulus) == int(remainder)
        return x >= int(bound) if relation == ">=" else x <= int(bound)

    # A statement is true for all integers if its opposite has no solution.
    opposite = {
        "base fails": z3.Not(holds(z3.IntVal(value))),
        "step fails": z3.And(holds(_X), z3.Not(holds(_X + value))),
        "claim fails": holds(z3.IntVal(value)),
    }[failure]
    # "unknown" is no proof.
    return _SOLVER.check(opposite) == z3.unsat


def a_proof(claim: Claim, rng: random.Random) -> str:
    """Returns a proof of a claim that is true."""
    start, change, excluded = claim
    if (excluded - start) * change < 0:
        low, high = sorted((start, excluded + (1 if change > 0 else -1)))
        return f"x {'>=' if change > 0 else '<='} {rng.randint(low, high)}"
    return f"x % {abs(change)} == {start % abs(change)}"


def an_attempt(claim: Claim, rng: random.Random) -> str:
    """Returns a proof, or more often a text that looks like one."""
    if rng.random() < 0.15:
        return a_proof(claim, rng)
    if rng.random() < 0.5:
        return f"x {rng.choice(('>=', '<='))} {rng.randint(0, _LARGEST)}"
    modulus = rng.randint(2, 5)
    return f"x % {modulus} == {rng.randrange(modulus)}"


def another_failure(claim: Claim, proof: str) -> str:
    """Returns another wrong attempt, the same one for the same arguments."""
    rng = random.Random(f"{claim} {proof}")
    while (other := an_attempt(claim, rng)) == proof or check(claim, other) == PROVED:
        pass
    return other


def true_claims() -> list[Claim]:
    """Returns all claims with small numbers that are true."""
    return [
        Claim(start, change, excluded)
        for start in range(4, 17)
        for change in (-5, -4, -3, -2, 2, 3, 4, 5)
        for excluded in range(_LARGEST + 1)
        if (excluded - start) * change < 0 or (excluded - start) % change
    ]


def attempts(claims: list[Claim]) -> list[list[Message]]:
    """Returns conversations of one attempt or two; the second does not fail in the same way."""
    rng = random.Random(0)
    found: list[list[Message]] = []
    for claim in rng.choices(claims, k=8000):
        contents = [claim.text, an_attempt(claim, rng)]
        verdict = check(claim, contents[1])
        if verdict != PROVED:
            while check(claim, second := an_attempt(claim, rng)) == verdict:
                pass
            # Both forms of the message, so that no arm meets an unknown one.
            contents += [rng.choice((verdict, "wrong")), second]
        found.append(dialogue(*contents))
    return found


Reply = Literal["what fails", "wrong", "another"]
"""What a second attempt sees: the first and the checker's message, the first and no message, or
another wrong attempt at the claim and its message, which says nothing about the first."""


class Problem(NamedTuple):
    """A claim, and how it may be tried."""

    claim: Claim
    tries: int
    reply: Reply


class ProofEnv(MessageEnv):
    """Prove a claim in at most ``tries`` attempts; the reward is 1 if the last one is a proof."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tried = problem, 0
        self.messages = dialogue(problem.claim.text)

    async def initial_observation(self) -> list[Message]:
        """Returns the claim."""
        return self.messages

    # On the event loop and not in a thread, because z3 is not safe in several threads.
    async def step(self, message: Message) -> MessageStepResult:
        """Checks an attempt, and answers it."""
        claim, tries, reply = self.problem
        verdict = check(claim, get_text_content(message))
        right = verdict == PROVED
        self.tried += 1
        if reply == "another" and not right:
            other = another_failure(claim, get_text_content(message))
            message, verdict = Message(role="assistant", content=other), check(claim, other)
        answer = "wrong" if reply == "wrong" else verdict
        self.messages = [*self.messages, message, Message(role="user", content=answer)]
        return MessageStepResult(float(right), right or self.tried == tries, self.messages)


def make_env(problem: Problem, renderer: Renderer) -> Env:
    """Returns the environment of a problem."""
    return EnvFromMessageEnv(renderer, ProofEnv(problem))


@dataclass(frozen=True)
class ProofGroup(ProblemGroupBuilder):
    """Episodes of one problem, with the share of claims that some numbers of attempts prove."""

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns no reward and two metrics for the same number of attempts: ``pass@k``, the first
        of k episodes, and ``corrected@k``, both of k / 2 episodes."""
        size = len(trajectory_group)
        first = sum(one.transitions[0].reward == 1 for one in trajectory_group)
        either = sum(one.reward == 1 for one in trajectory_group)
        metrics: Metrics = {f"pass@{k}": pass_at_k(size, first, k) for k in ATTEMPTS}
        for k in ATTEMPTS[1:]:
            metrics[f"corrected@{k}"] = pass_at_k(size, either, k // 2)
        return [(0.0, metrics) for _ in trajectory_group]


@chz.chz
class ProofsBuilder(TaskDatasetBuilder):
    """Problems with the metrics of ``ProofGroup``."""

    def group(self, renderer: Renderer, size: int, problem: Problem) -> EnvGroupBuilder:
        """Returns ``size`` episodes of a problem."""
        return ProofGroup(self.env_thunk(problem, renderer), size)


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/proofs")
    steps: int = number(40, "Steps of 8 claims with 16 attempts each", low=1)
    learning_rate: float = peak_rate(2e-3, "Learning rate")


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(steps=2)
    claims = true_claims()
    random.Random(0).shuffle(claims)
    # The model that the study starts from has not seen the proofs of the held-out claims either.
    model = dialogues_model(
        "proofs", lambda: attempts(claims[_HELD_OUT:]), PATTERN, config.quick, steps=1600
    )
    run = partial(run_arm, config, model, claims)
    arms = {
        "one attempt": partial(run, 1, "what fails", config.steps),
        "two, told what fails": partial(run, 2, "what fails", config.steps),
        "two, told: wrong": partial(run, 2, "wrong", config.steps),
        "two, shown another": partial(run, 2, "another", config.steps),
        "two, random rewards": partial(run, 2, "what fails", config.steps, random_rewards=True),
        "untrained": partial(run, 2, "what fails", 0),
        "untrained, told: wrong": partial(run, 2, "wrong", 0),
        "untrained, shown another": partial(run, 2, "another", 0),
    }
    names = ("pass@1", "pass@2", "corrected@2", "pass@8", "corrected@8", "tokens")
    study.run_study(config, arms, {name: name for name in names}, draw)


def run_arm(
    config: Config,
    model: str,
    claims: list[Claim],
    tries: int,
    reply: Reply,
    steps: int,
    seed: int,
    random_rewards: bool = False,
) -> study.Row:
    """Trains with one kind of episode; returns the shares of held-out claims that are proved."""
    train = random.Random(seed).sample(claims[_HELD_OUT:], len(claims) - _HELD_OUT)
    rows = reinforce(
        Path(config.log_path) / f"{tries}-{reply}-{steps}-{random_rewards}-{seed}",
        model,
        seed,
        make_env,
        [Problem(claim, tries, reply) for claim in train],
        # All arms are tested with a second attempt, even if they are trained without.
        [Problem(claim, 2, reply) for claim in claims[:_HELD_OUT]],
        ProofsBuilder,
        # All arms sample the same number of attempts, or fewer where the first one is right.
        {"group_size": 16 // tries, "test_group_size": 16},
        random_rewards=random_rewards,
        learning_rate=config.learning_rate,
        max_tokens=8,
        max_steps=steps,
        eval_every=10,
    )
    names = [f"pass@{k}" for k in ATTEMPTS] + [f"corrected@{k}" for k in ATTEMPTS[1:]]
    curves = {name: [row[f"test/env/all/{name}"] for row in rows] for name in names}
    return {
        **{name: curve[-1] for name, curve in curves.items()},
        "tokens": rows[-1].get("tokens/cumulative/sampled", 0),
        "steps": [row["step"] for row in rows],
        **{f"curve {name}": curve for name, curve in curves.items()},
    }


def draw(figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws pass@1 over the steps, and pass@k beside corrected@k over k."""
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, rows), colour in zip(of_arm.items(), study.COLOURS, strict=False):
        if rows and len(rows[0]["steps"]) > 1:
            study.draw_curve(left, rows, "steps", "curve pass@1", name, colour)
        if name not in ("one attempt", "two, told what fails", "untrained"):
            continue
        for kind, style in (("pass", "-"), ("corrected", "--")):
            at = [k for k in ATTEMPTS if k > 1 or kind == "pass"]
            means = [sum(row[f"{kind}@{k}"] for row in rows) / len(rows) for k in at]
            label = f"{name}: {kind}@k"
            right.plot(at, means, color=colour, linestyle=style, marker=".", label=label)
    right.set_xscale("log", base=2)
    right.set_xticks(ATTEMPTS, ATTEMPTS)
    study.finish_axes(left, "pass@1 over the steps", "step", "held-out claims proved")
    study.finish_axes(right, "With and without correction", "attempts k", "")


if __name__ == "__main__":
    run_entrypoint(main)
