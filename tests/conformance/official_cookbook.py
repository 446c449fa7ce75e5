"""Runs the official tinker-cookbook's own tests, recipes and tutorials against this package.

    pip download --no-deps --no-binary :all: tinker-cookbook==0.6.1 && tar xzf tinker_cookbook-*.gz
    PYTHONPATH=.:tests python tests/conformance/official_cookbook.py tinker_cookbook-0.6.1 [PART]

Parts: ``downstream`` (its stability tests), ``unit`` (its unit tests), ``recipes`` (all of its
recipe programs, two steps each), ``tutorials`` (run as scripts), ``names`` (public names with
parameters, defaults and values, and imports), ``renderings`` (tokens of conversations).
``--write-page`` records the figures and writes them into ``docs/from-tinker-cookbook.md``.

A test counts only where the official package passes it in the same environment. That baseline is
run once and kept in the scratch folder; with ``--recorded`` it is that all pass, as all stability
tests do. The official package needs more libraries than this one (``PACKAGES`` of
``tests/environments.py``). Its program ``verifiers_rl.train`` needs verifiers 0.1.9 too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import official_names
import official_page
from official_page import Figures, share
from official_private import tests_of_private_names
from official_programs import run_recipes, run_tutorials
from official_renderings import RECORDED, digests, rendered_by, report_renderings
from official_tests import (
    Outcome,
    copy_tests,
    fresh_folder,
    is_test_file,
    read_outcomes,
    run_tests,
    write_outcomes,
)
from official_tokenizers import fill_hub_cache

REPO = Path(__file__).resolve().parents[2]
HELPERS = ("conftest.py", "sig_helpers.py")  # of the stability tests
PARTS = ("downstream", "unit", "recipes", "tutorials", "names", "renderings")
# Share of the tests with public names that must pass; a change may not fall below it.
REQUIRED = {"downstream": 0.97, "unit": 0.85}


def unit_files(source: Path) -> list[Path]:
    """Unit tests of the original, as paths relative to its source."""
    return sorted(path.relative_to(source) for path in source.glob("tinker_cookbook/**/*_test.py"))


def downstream_files(source: Path) -> list[Path]:
    """Stability tests of the original, with the helpers that they import."""
    folder = source / "tests" / "downstream_compat"
    return sorted(
        path.relative_to(source)
        for path in folder.glob("*.py")
        if path.name not in ("test_install_skills.py", "__init__.py")
    )


def offline(scratch: Path) -> dict[str, str]:
    """Environment variables of the programs that the parts start."""
    return {
        "HF_HOME": str(scratch / "hub-cache"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_HOME": str(scratch / "home"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def of_the_original(
    source: Path, suite: str, files: list[Path], scratch: Path
) -> dict[str, Outcome]:
    """Runs a suite against the original, or reads what an earlier run has found."""
    kept = scratch / f"{suite}.official.json"
    official = read_outcomes(kept) if kept.is_file() else {}
    folder = fresh_folder(scratch / f"{suite}-official")
    copies = copy_tests(source, files, folder, lenient=False)
    known = {name.split("::")[0] for name in official}
    unknown = [copy for copy in copies if copy.relative_to(folder).as_posix() not in known]
    if unknown:
        official |= run_tests(source, unknown, folder, offline(scratch))
        write_outcomes(kept, official)
    return official


def compare(
    source: Path, suite: str, files: list[Path], scratch: Path, recorded: bool = False
) -> tuple[bool, Figures]:
    """Runs a suite against both packages, prints the counts; whether enough tests pass."""
    official = {} if recorded else of_the_original(source, suite, files, scratch)
    environment = offline(scratch)
    folder = fresh_folder(scratch / f"{suite}-ours")
    copies = copy_tests(source, files, folder, lenient=True)
    ours = run_tests(REPO, copies, folder, environment)
    write_outcomes(scratch / f"{suite}.ours.json", ours)
    if recorded:
        official = dict.fromkeys(ours, Outcome("passed"))
    tested = [file for file in files if is_test_file(file)]
    origin = {
        copy.relative_to(folder).as_posix(): file for copy, file in zip(copies, tested, strict=True)
    }
    return _report(suite, official, ours, source, origin)


def _report(
    suite: str,
    official: dict[str, Outcome],
    ours: dict[str, Outcome],
    source: Path,
    origin: dict[str, Path],
) -> tuple[bool, Figures]:
    """Prints the counts of the files that are keys of ``origin``, and the causes of failures."""
    counts: Counter[tuple[str, bool]] = Counter()
    failed: dict[str, list[Outcome]] = defaultdict(list)
    for name, baseline in official.items():
        file = name.split("::")[0]
        if baseline.status != "passed" or file not in origin:
            continue
        got = ours.get(name, ours.get(file, Outcome("failed", "not collected")))
        private = tests_of_private_names(origin[file], source)
        is_private = name.split("::")[-1].split("[")[0] in private or got.needs_private_name
        kinds = ["all"] if is_private else ["all", "public", "public of " + _package(origin[file])]
        is_here = len(origin[file].parts) == 2 or (REPO / origin[file].parents[-3]).exists()
        if is_here and not is_private:
            kinds.append("present")
        counts.update((kind, got.status == "passed") for kind in kinds)
        if got.status != "passed" and not is_private:
            failed[file].append(got)
    for file, outcomes in sorted(failed.items()):
        print(f"{file}: {len(outcomes)} public tests fail")
        for cause, count in Counter(found.message[:150] for found in outcomes).most_common(4):
            print(f"    {count} x {cause}")
    shares = {
        kind: share(counts[kind, True], counts[kind, True] + counts[kind, False])
        for kind, _ in sorted(counts)
    }
    for kind, text in shares.items():
        print(f"{suite}, {kind}: {text} that the official package passes")
    passed, missed = (
        counts["present" if suite == "unit" else "public", is_in] for is_in in (True, False)
    )
    figures = {kind: text for kind, text in shares.items() if " " not in kind}
    return passed >= REQUIRED[suite] * (passed + missed), figures


def _package(file: Path) -> str:
    """The package of a test file that is relative to the source."""
    return file.parts[1] if len(file.parts) > 2 else "modules of the top level"


def report_names() -> tuple[bool, Figures]:
    """Prints the names that differ and have no reason; whether there are none."""
    exceptions = official_names.read_exceptions()
    found = official_names.differences() | official_names.unresolved_imports()
    for name, problem in found.items():
        print(f"{name}: {problem} ({official_names.excuse(name, exceptions) or 'NO REASON'})")
    figures = official_names.counts(found)
    print(figures)
    return all(official_names.excuse(name, exceptions) for name in found), figures


def main() -> int:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="unpacked source of tinker-cookbook 0.6.1")
    parser.add_argument("part", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/official-cookbook"))
    parser.add_argument("--tokenizers", type=Path, help="folder with a tokenizer for each family")
    parser.add_argument("--model", type=Path, help="small model that the recipes train")
    parser.add_argument("--recorded", action="store_true", help="do not run the original's side")
    parser.add_argument("--only", default="", help="run only files and programs that contain this")
    parser.add_argument("--write-page", action="store_true", help="write the figures to the docs")
    arguments = parser.parse_args()
    if not (arguments.source / "tinker_cookbook" / "__init__.py").is_file():
        parser.error(f"{arguments.source}: expected the unpacked source of tinker-cookbook")
    if arguments.write_page and arguments.only:
        parser.error("--write-page: got --only, expected a complete run")
    source, scratch = arguments.source.resolve(), arguments.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    if arguments.tokenizers is not None:
        fill_hub_cache(arguments.tokenizers, scratch / "hub-cache")
    environment = offline(scratch)
    good = True
    for part in arguments.part:
        if part == "names":
            ok, figures = report_names()
        elif part == "renderings":
            official = digests(rendered_by(source, scratch, environment))
            ok, figures = report_renderings(official, rendered_by(REPO, scratch, environment))
            if arguments.write_page:
                RECORDED.write_text(f"{json.dumps(official, indent=1)}\n", "utf-8")
        elif part in ("recipes", "tutorials"):
            if arguments.model is None:
                parser.error(f"{part}: got no --model, expected the folder of a small model")
            run = run_recipes if part == "recipes" else run_tutorials
            ok, figures = run(source, REPO, scratch, arguments.model, environment, arguments.only)
        else:
            files = downstream_files(source) if part == "downstream" else unit_files(source)
            files = [file for file in files if arguments.only in str(file) or file.name in HELPERS]
            ok, figures = compare(source, part, files, scratch, arguments.recorded)
        good &= ok
        if arguments.write_page:
            official_page.record(part, figures)
    if arguments.write_page:
        official_page.write_page()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
