"""Tasks of the research recipes: rewards against the packages that decide them, and short runs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
from functools import partial

import chz
import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.research import words_model
from tinker_cookbook.recipes.research.judge import RulePreference, agreement
from tinker_cookbook.recipes.research.noisy_student import SelfLabelledGroup, Sum, SumEnv
from tinker_cookbook.recipes.research.study import StudyConfig, run_study
from tinker_cookbook.recipes.research.two_agents import PairsGroup, PartEnv, hear
from tinker_cookbook.recipes.tool_use.shop import make_questions
from tinker_cookbook.recipes.tool_use.tiny_model import RENDERER, make_tokenizer
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.tool_use import ToolEpisode
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.terminal import get_console


def test_all_columns_of_a_study_fit_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(get_console(), "width", 80)
    arm = "one that has a name [b] of some length"
    columns = {f"number {i}": f"number {i}" for i in range(7)}
    config = StudyConfig(log_path=str(tmp_path), seeds=[0, 1], quick=True)
    run = {arm: lambda seed: dict.fromkeys(columns, seed + 0.125)}
    run_study(config, run, columns, lambda *_: None)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(arm)]
    assert max(map(len, rows)) <= 80
    assert "".join(rows).count("0.625 (0.125–1.12)") == 7


@pytest.mark.parametrize("seeds", [[], [0, 0], [-1]])
def test_seeds_are_different_numbers_and_at_least_one(seeds):
    with pytest.raises(ConfigurationError, match="seeds: got"):
        StudyConfig(log_path="unused", seeds=seeds)


@chz.chz
class _OwnConfig(StudyConfig):
    names: list[str] = chz.field(default_factory=lambda: ["a", "b"])
    rates: list[float] = chz.field(default_factory=lambda: [0.1])


def test_a_study_names_a_wrong_setting_or_folder_before_it_makes_a_model(tmp_path):
    with pytest.raises(ConfigurationError, match="rates: got"):
        _OwnConfig(log_path="unused", rates=[float("nan")])
    config = _OwnConfig(log_path=str(tmp_path))
    file = tmp_path / "results.json"
    file.write_text('{"settings": {"quick": false}, "rows": []}')  # of a version without lists
    with pytest.raises(ConfigurationError, match=r"names: got .* has results with no such setting"):
        config.resolved()
    file.write_text("{")
    with pytest.raises(ConfigurationError, match=r"log_path: .*results.json is not the result"):
        config.resolved()
    with pytest.raises(
        ConfigurationError, match=r"log_path=.*results.json/quick cannot be written"
    ):
        chz.replace(config, log_path=str(file), quick=True).resolved()


def test_a_table_has_only_the_seeds_asked_for_and_a_quick_run_a_folder_of_its_own(tmp_path, capsys):
    config = StudyConfig(log_path=str(tmp_path), seeds=[0, 1, 2])
    drawn: list[int] = []

    def run(config: StudyConfig) -> str:
        config = config.resolved()
        run_study(
            config,
            {"arm": lambda seed: {"value": seed}},
            {"value": "value"},
            lambda figure, of_arm: drawn.append(len(of_arm["arm"])),
        )
        return capsys.readouterr().out

    assert "1 (0–2)" in run(config)
    full = (tmp_path / "results.json").read_bytes()
    one = run(chz.replace(config, seeds=[2]))
    assert "0–2" not in one
    assert "mean nothing" not in one
    assert "numbers mean nothing" in run(chz.replace(config, quick=True, seeds=[0]))
    assert (tmp_path / "results.json").read_bytes() == full
    assert (tmp_path / "quick/results.json").exists()
    with pytest.raises(ConfigurationError, match="quick: got False, but"):
        chz.replace(config, log_path=str(tmp_path / "quick")).resolved()
    if importlib.util.find_spec("matplotlib"):
        assert drawn == [3, 1, 1]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    """A folder for the base models, of which some are those of several studies."""
    return str(tmp_path_factory.mktemp("models"))


@pytest.mark.slow  # 3 to 8 s each
@pytest.mark.parametrize(
    "name",
    [
        "noisy_student",
        "memory",
        "learning_rate",
        "lora",
        "molecules",
        "monitor",
        "proofs",
        "judge",
        "constitution",
        "two_agents",
        "gan",
        "distillation",
    ],
)
def test_a_quick_study_writes_its_results_and_is_not_repeated(
    name, models, tmp_path, monkeypatch, capsys
):
    if package := {"molecules": "rdkit", "proofs": "z3"}.get(name):
        pytest.importorskip(package)
    monkeypatch.setenv("TINKER_COOKBOOK_RUNS_DIR", models)
    study = importlib.import_module(f"tinker_cookbook.recipes.research.{name}")
    config = study.Config(quick=True, seeds=[0], log_path=str(tmp_path / "study"))
    study.main(config)
    rows = json.loads((tmp_path / "study/quick/results.json").read_text())["rows"]
    assert len(rows) == 1
    assert (tmp_path / "study/quick/study.png").exists()
    capsys.readouterr()
    study.main(config)
    assert "1/1" not in capsys.readouterr().out


def test_a_molecule_is_counted_as_rdkit_counts_it():
    chem = pytest.importorskip("rdkit.Chem")
    molecules = importlib.import_module("tinker_cookbook.recipes.research.molecules")
    descriptors = importlib.import_module("rdkit.Chem.rdMolDescriptors")
    rng = random.Random(1)
    for _ in range(200):
        smiles = molecules.random_molecule(rng)
        target, molecule = molecules.target_of(smiles), chem.MolFromSmiles(smiles)
        formula = descriptors.CalcMolFormula(molecule)
        # "C3H7NO" without its hydrogen, where no number stands for 1.
        found = {name: int(count or 1) for name, count in re.findall(r"([CNO])(\d*)", formula)}
        counts = {"C": target.carbon, "N": target.nitrogen, "O": target.oxygen}
        assert found == {name: count for name, count in counts.items() if count}
        assert target.rings == len(chem.GetSSSR(molecule))
    for wrong in ("", "C(", "C1CC", "CC(C)(C)(C)C", "CF", "C.C", "[NH4+]", "[13CH4]"):
        assert molecules.target_of(wrong) is None


def test_a_proof_is_accepted_only_if_its_three_statements_are_true():
    pytest.importorskip("z3")
    proofs = importlib.import_module("tinker_cookbook.recipes.research.proofs")
    rng, numbers = random.Random(0), range(-60, 60)
    seen = set()
    for _ in range(300):
        # Some of these claims are false, so that no attempt proves them.
        claim = proofs.Claim(rng.randint(4, 16), rng.choice((-4, -2, 3, 5)), rng.randint(0, 20))
        attempt = proofs.an_attempt(claim, rng)
        statement = compile(attempt, "attempt", "eval")
        inside = {x for x in numbers if eval(statement, {"x": x})}
        kept = all(eval(statement, {"x": x + claim.change}) for x in inside)
        expected = (
            "base fails" if claim.start not in inside
            else "step fails" if not kept
            else "claim fails" if claim.excluded in inside
            else proofs.PROVED
        )  # fmt: skip
        assert proofs.check(claim, attempt) == expected, (claim, attempt)
        seen.add(expected)
    assert seen == {*proofs.FAILURES[1:], proofs.PROVED}
    claim = proofs.Claim(4, 2, 3)
    assert proofs.check(claim, "x % 2 == 0") == proofs.PROVED
    # A hypothesis that no number has would imply everything; the base excludes it.
    assert proofs.check(claim, "x % 2 == 5") == "base fails"
    for text in ("", "x", "x >= y", "x % 0 == 0", "x % 00 == 4", "x >= 4 ", "x >= 4\nx >= 4"):
        assert proofs.check(claim, text) == "not a proof"
    assert all(proofs.check(one, proofs.a_proof(one, rng)) == proofs.PROVED
               for one in rng.sample(proofs.true_claims(), 100))  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "second", "reward"),
    [("what fails", "x >= 4", 1), ("wrong", "x <= 4", 0), ("another", "x >= 4", 1)],
)
def test_a_second_proof_is_the_last_and_sees_the_message_of_its_arm(reply, second, reward):
    pytest.importorskip("z3")
    proofs = importlib.import_module("tinker_cookbook.recipes.research.proofs")
    claim = proofs.Claim(4, 2, 3)
    env = proofs.ProofEnv(proofs.Problem(claim, 2, reply))
    result = asyncio.run(env.step({"role": "assistant", "content": "x <= 4"}))
    assert (result.reward, result.episode_done) == (0, False)
    _, shown, answer = (one["content"] for one in result.next_messages)
    assert (shown == "x <= 4") == (reply != "another")
    assert answer == ("wrong" if reply == "wrong" else proofs.check(claim, shown)) != proofs.PROVED
    result = asyncio.run(env.step({"role": "assistant", "content": second}))
    assert (result.reward, result.episode_done) == (reward, True)


@pytest.mark.parametrize(("labelled", "rewards"), [(True, [0, 0, 0]), (False, [0.5, 0.5, 0])])
def test_a_sum_without_a_label_is_rewarded_by_the_majority(labelled, rewards):
    envs = [SumEnv(Sum(3, 4, labelled), None) for _ in range(3)]  # type: ignore[arg-type]
    own = [env.check_answer(text) for env, text in zip(envs, ("8", "8", "7"), strict=True)]
    assert own == [False, False, labelled]
    group = SelfLabelledGroup(partial(SumEnv, Sum(3, 4), None), 3, "no carry", 0.5)  # type: ignore[arg-type]
    empty = Trajectory([], tinker.ModelInput.empty())
    found = asyncio.run(group.compute_group_rewards([empty] * 3, envs))
    assert [reward for reward, _ in found] == rewards
    if not labelled:
        assert found[0][1] == {"label_right": 0.0}


def test_a_list_of_words_has_a_point_for_each_right_word_and_loses_one_for_each_fault():
    answers = {"-cat-owl": 2, "-cat-cat": 0, "-cat-gin-tiger": -1, "": 0}
    assert {one: words_model.points("animal", one) for one in answers} == answers
    rng = random.Random(0)
    for kind in words_model.SAFE:
        for _ in range(50):
            answer = words_model.random_answer(rng, kind)
            better = words_model.revised(rng, kind, answer)
            gain = words_model.points(kind, better) - words_model.points(kind, answer)
            # A fault is replaced by a right word, or left out.
            assert gain in ((1, 2) if words_model.faults(kind, answer) else (0,))


def test_the_rule_agrees_with_itself_and_counts_no_tie():
    answers = [("animal", one) for one in ("-cat", "-cat-owl", "-cow", "-cat", "-gin-hen", "-hen")]
    assert asyncio.run(agreement(RulePreference(), answers)) == 1
    labels = [
        words_model.comparison("animal", *pair).label
        for pair in (("-cat", "-cow"), ("-gin", "-cow"))
    ]
    assert labels == ["Tie", "B"]


def test_the_second_agent_is_told_the_number_of_the_first_and_both_have_the_reward(tmp_path):
    renderer = get_renderer(RENDERER, make_tokenizer(tmp_path))
    question = make_questions(1, 0, ["total"])[0]

    async def play(said: str, second_learns: bool) -> tuple[str, list[float]]:
        group = PairsGroup(question, renderer, 2, 0.0, second_learns)
        envs = [env for env in await group.make_envs() if isinstance(env, PartEnv)]
        first, second = envs[:2]
        waiting = asyncio.create_task(second.initial_observation())
        await hear(first.task, 0, [Message(role="assistant", content="17")], ToolEpisode(()))
        first.rollout_ended(False)
        observed = await waiting
        await hear(second.task, 1, [Message(role="assistant", content=said)], ToolEpisode(()))
        rewards = await group.compute_group_rewards([], envs)
        prompt = renderer.tokenizer.decode(observed[0].to_ints())
        return str(prompt), [reward for reward, _ in rewards]

    prompt, rewards = asyncio.run(play(str(question.answer()), True))
    assert f'Price of "{question.items[1]}"?\n17<' in prompt
    assert rewards == [1, 1, 0, 0]
    assert asyncio.run(play(str(question.answer()), False))[1] == [1, 0.5, 0, 0.5]
    assert asyncio.run(play("99", True))[1] == [0, 0, 0, 0]
