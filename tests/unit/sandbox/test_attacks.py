"""Programs that try to be scored without solving their problem, or to do harm.

The quick test takes 3 s; the slow one, all attacks in both tiers, half a minute.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

from benchmarks.sandbox.__main__ import attack_all
from benchmarks.sandbox.attacks import ATTACKS, Attack
from benchmarks.sandbox.graders import humaneval_reference, ours, plain_exec
from tinker_cookbook.sandbox import PythonGrader, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
TIERS = [tier for tier, problem in launch.tier_problems().items() if not problem]
QUICK = ("exit", "value", "patch", "verdict")


def fooled_by(scorer, attacks) -> list[str]:
    verdicts = asyncio.run(attack_all(scorer, attacks))
    return [attack.name for attack, verdict in zip(attacks, verdicts, strict=True) if verdict]


def grader(tier) -> PythonGrader:
    return PythonGrader(tier=tier, workers=3, test_seconds=0.2, total_seconds=5, memory_mb=256)


def test_no_attack_on_the_verdict_scores():
    assert len(ATTACKS) >= 60
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    large = {"result of 200 MB", "a million small objects", "settrace jumps over the assertion"}
    attacks = [a for a in ATTACKS if a.group in QUICK and a.name not in large and not a.slow]
    with grader(None) as made:
        assert fooled_by(ours(made), attacks) == []


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_no_attack_scores_or_does_harm(tier, tmp_path):
    """About 15 s for each tier."""
    canary = tmp_path / "canary"
    canary.write_text("alive")
    tmp_path.chmod(0o777)
    canary.chmod(0o666)
    harm = [
        ("overwrite", f"open({str(canary)!r}, 'w').write('dead')"),
        ("delete", f"import os; os.remove({str(canary)!r})"),
        (
            "link",
            f"import os; os.link({str(canary)!r}, '/tmp/canary'); os.truncate('/tmp/canary', 0)",
        ),
    ]
    attacks = [*ATTACKS, *(Attack(name, "harm", code, slow=False) for name, code in harm)]
    with grader(tier) as made:
        assert fooled_by(ours(made), attacks) == []
    assert canary.read_text() == "alive"


@pytest.mark.slow
def test_the_same_attacks_fool_other_graders():
    """Shows that the attacks work where they can; about 10 s."""
    named = {"os._exit(0) at the top", "__eq__ that is always true", "verdict printed"}
    attacks = [attack for attack in ATTACKS if attack.name in named]
    assert set(fooled_by(plain_exec(), attacks)) == named
    assert fooled_by(humaneval_reference(), attacks) == ["__eq__ that is always true"]
