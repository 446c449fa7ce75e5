"""Molecules with given atoms and rings: supervised learning, then RL with an exact reward.

    python -m recipes.research.molecules
    python -m recipes.research.molecules seeds=0 rl_steps=20 log_path=…

The question names atoms and rings ("carbon 3, nitrogen 1, oxygen 0, rings 1"), the
answer is a molecule in SMILES, and RDKit counts. The model that the study starts from (made in a
minute) writes molecules but ignores the question. Supervised learning teaches it to read the
question, and RL continues from there. Held-out questions ask for atoms and rings that no example
had. The study needs the extra ``molecules``.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.runs import PassBuilder, imitate, reinforce
from tinker_cookbook.recipes.tiny_models.dialogues import dialogue, dialogues_model
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_env import ProblemEnv
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import missing_extra

try:
    from rdkit import Chem, RDLogger
except ImportError as error:
    raise missing_extra("molecules", error, "molecules") from error

# A text that is no molecule is an answer like others here, so it is not worth a warning.
RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]

PATTERN = r"[a-z]+ \d+(?:, )?|[CNO=()\d]"
_VALENCES = {"C": 4, "N": 3, "O": 2}


class Target(NamedTuple):
    """What a molecule shall have: atoms of each element (hydrogen is free), and rings."""

    carbon: int
    nitrogen: int
    oxygen: int
    rings: int

    @property
    def question(self) -> str:
        """The question as the model reads it."""
        return ", ".join(f"{name} {count}" for name, count in self._asdict().items())


@cache
def target_of(smiles: str) -> Target | None:
    """Returns what RDKit counts in a molecule; ``None``: it is no molecule, or has other atoms."""
    molecule = Chem.MolFromSmiles(smiles)
    if molecule is None or not molecule.GetNumAtoms() or "." in smiles:
        return None
    # Independent rings: in a cage RDKit's own number also counts rings that others add up to.
    rings = molecule.GetNumBonds() - molecule.GetNumAtoms() + 1
    counts = dict.fromkeys("CNO", 0)
    for atom in molecule.GetAtoms():
        if atom.GetSymbol() not in counts or atom.GetFormalCharge() or atom.GetIsotope():
            return None
        counts[atom.GetSymbol()] += 1
    return Target(counts["C"], counts["N"], counts["O"], rings)


def random_molecule(rng: random.Random, max_atoms: int = 5) -> str:
    """Returns a random molecule of 3 to ``max_atoms`` heavy atoms in canonical SMILES."""
    molecule, free = Chem.RWMol(), list[int]()

    def bond(i: int, j: int) -> None:
        old = molecule.GetBondBetweenAtoms(i, j)
        if old is None:
            molecule.AddBond(i, j, Chem.BondType.SINGLE)
        else:
            old.SetBondType(Chem.BondType.DOUBLE)
        free[i] -= 1
        free[j] -= 1

    # A tree first, then bonds that close rings, then double bonds.
    for new in range(rng.randint(3, max_atoms)):
        element = rng.choices("CNO", (6, 1, 1))[0]
        places = [i for i in range(new) if free[i]]
        if new and not places:
            break  # the last atom took the last free valence
        molecule.AddAtom(Chem.Atom(element))
        free.append(_VALENCES[element])
        if new:
            bond(new, rng.choice(places))
    for low, high, count in ((2, 5, rng.choice((0, 1, 1, 2))), (1, 1, rng.choice((0, 0, 1, 2)))):
        for _ in range(count):
            distances = Chem.GetDistanceMatrix(molecule, force=True)
            pairs = [
                (i, j)
                for i in range(len(free))
                for j in range(i)
                if free[i] and free[j] and low <= distances[i][j] <= high
                and (low > 1 or molecule.GetBondBetweenAtoms(i, j).GetBondTypeAsDouble() == 1)
            ]  # fmt: skip
            if pairs:
                bond(*rng.choice(pairs))
    Chem.SanitizeMol(molecule)
    # Without aromatic atoms, which SMILES writes in lower case.
    Chem.Kekulize(molecule, clearAromaticFlags=True)
    return Chem.MolToSmiles(molecule)


class MoleculeEnv(ProblemEnv):
    """Write a molecule with given atoms and rings; the reward is 1 if RDKit counts the same."""

    def __init__(self, target: Target, renderer: Renderer) -> None:
        super().__init__(renderer)
        self.target = target

    def get_question(self) -> str:
        """Returns what is wanted."""
        return self.target.question

    def check_answer(self, sample_str: str) -> bool:
        """Returns whether the molecule is as wanted."""
        return target_of(sample_str) == self.target


@chz.chz
class MoleculesBuilder(PassBuilder):
    """Questions, with metrics for those that had examples (``seen``) and the others (``new``)."""

    def tag(self, problem: Target) -> str:
        """Returns the kind of a question."""
        return "seen" if problem in self.problems else "new"


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/molecules")
    sl_steps: int = number(100, "Supervised steps of 32 examples before RL", low=1)
    sl_learning_rate: float = peak_rate(3e-3, "Learning rate of supervised steps")
    rl_steps: int = number(30, "RL steps of 8 questions with 8 answers each", low=1)
    rl_learning_rate: float = peak_rate(1e-3, "Learning rate of RL steps")


class Data(NamedTuple):
    """Random molecules, and the questions about those that are held out."""

    molecules: list[str]
    questions: list[Target]
    held_out: list[Target]


def make_data() -> Data:
    """Returns the data of all arms and seeds."""
    rng = random.Random(0)
    molecules = [random_molecule(rng) for _ in range(4000)]
    counts = Counter(target for one in molecules if (target := target_of(one)))
    # Without the rare combinations, which no model of this size learns from one example.
    targets = sorted(target for target, count in counts.items() if count >= 20)
    rng.shuffle(targets)
    held_out, seen = targets[:12], set(targets[12:])
    return Data([one for one in molecules if target_of(one) in seen], targets[12:], held_out)


def rough_pairs(data: Data) -> list[list[Message]]:
    """Returns molecules as answers, half of them to another question."""
    rng = random.Random(0)
    others = data.questions + data.held_out
    return [
        dialogue((rng.choice(others) if rng.random() < 0.5 else target).question, molecule)
        for molecule in data.molecules
        if (target := target_of(molecule))
    ]


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(sl_steps=2, rl_steps=2)
    data = make_data()
    model = dialogues_model(
        "molecules", partial(rough_pairs, data), PATTERN, config.quick, steps=700
    )
    run = partial(run_arm, config, model, data)
    arms = {
        "SL, then RL": partial(run, 1, config.rl_steps),
        "SL, twice as long": partial(run, 2, 0),
        "SL, then random rewards": partial(run, 1, config.rl_steps, random_rewards=True),
        "SL": partial(run, 1, 0),
        "untrained": partial(run, 0, 0),
    }
    columns = {
        "seen": "seen",
        "seen of 8": "seen, pass@8",
        "new": "new",
        "new of 8": "new, pass@8",
    }
    study.run_study(config, arms, columns, partial(draw, config))


def run_arm(
    config: Config,
    model: str,
    data: Data,
    sl_parts: int,
    rl_steps: int,
    seed: int,
    random_rewards: bool = False,
) -> study.Row:
    """Trains with one arm; returns the share of right answers to held-out questions."""
    folder, start = Path(config.log_path), None
    if sl_parts:
        sl = folder / f"sl-{sl_parts}-{seed}"
        pairs = [
            dialogue(target.question, one) for one in data.molecules if (target := target_of(one))
        ]
        start = imitate(
            sl,
            model,
            seed,
            pairs,
            max_steps=sl_parts * config.sl_steps,
            learning_rate=config.sl_learning_rate,
        )
    rows = reinforce(
        folder / f"rl-{sl_parts}-{rl_steps}-{random_rewards}-{seed}",
        model,
        seed,
        MoleculeEnv,
        random.Random(seed).sample(data.questions, len(data.questions)),
        data.held_out + data.questions[:24],
        MoleculesBuilder,
        random_rewards=random_rewards,
        load_checkpoint_path=start,
        learning_rate=config.rl_learning_rate,
        max_tokens=16,
        max_steps=rl_steps,
        eval_every=10,
    )
    return {
        **{kind: rows[-1][f"test/env/{kind}/correct"] for kind in ("seen", "new")},
        **{f"{kind} of 8": rows[-1][f"test/env/{kind}/pass@8"] for kind in ("seen", "new")},
        "steps": [row["step"] for row in rows],
        **{f"curve {k}": [row[f"test/env/{k}/correct"] for row in rows] for k in ("seen", "new")},
    }


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws right answers over the steps, to seen and to new questions."""
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("seen", "new"), strict=True):
        for (name, rows), colour in zip(of_arm.items(), study.COLOURS, strict=False):
            if rows and len(rows[0]["steps"]) == 1:  # without RL
                mean = sum(row[kind] for row in rows) / len(rows)
                axes.axhline(mean, color=colour, linestyle="--", label=name)
            else:
                study.draw_curve(axes, rows, "steps", f"curve {kind}", name, colour)
        title = "Questions that had examples" if kind == "seen" else "New questions"
        study.finish_axes(axes, title, "RL step", "right answers", legend=kind == "new")


if __name__ == "__main__":
    run_entrypoint(main)
