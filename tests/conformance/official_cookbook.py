"""Runs the official tinker-cookbook's own tests and recipes against this package.

    pip download --no-deps --no-binary :all: tinker-cookbook==0.6.1 && tar xzf tinker_cookbook-*.gz
    PYTHONPATH=.:tests python tests/conformance/official_cookbook.py tinker_cookbook-0.6.1 [PART]

Parts: ``downstream`` (its stability tests), ``unit`` (its unit tests of packages that exist here),
``recipes`` (two steps each on the bundled engine), ``names`` (public names and parameters),
``renderings`` (tokens of conversations by each renderer).
A test counts only where the official package passes it in the same environment; that baseline is
run once and kept in the scratch folder. Tests that use private names do not count. The official
package needs more libraries than this one:
``pip install pytest-asyncio blobfile cloudpickle pyrage termcolor tiktoken``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import official_names
from official_private import tests_of_private_names
from official_recipes import (
    RECIPES,
    Recipe,
    copy_model,
    copy_recipes,
    make_served_model,
    run_recipe,
)
from official_renderings import report_renderings
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
from official_tutorials import imported_names, resolves
from serving import Serving

REPO = Path(__file__).resolve().parents[2]
HELPERS = ("conftest.py", "sig_helpers.py")  # of the stability tests
PARTS = ("downstream", "unit", "recipes", "names", "renderings")
# Share of the counted tests that must pass, and so what a change may not fall below.
REQUIRED = {"downstream": 0.95, "unit": 0.85}
# Packages of the original that this project has not built yet; their tests are not counted.
LATER = (
    "capture", "inference", "scripts", "stores", "third_party",
    "weights", "xmux", "recipes", "eval", "audio_processing_utils",
)  # fmt: skip


def unit_files(source: Path, *, built_only: bool = True) -> list[Path]:
    """Unit tests of the original, as paths relative to its source."""
    files = sorted(path.relative_to(source) for path in source.glob("tinker_cookbook/**/*_test.py"))
    if not built_only:
        return files
    return [file for file in files if file.parts[1].removesuffix("_test.py") not in LATER]


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
    }


def compare(source: Path, suite: str, files: list[Path], scratch: Path) -> bool:
    """Runs a suite against both packages, prints the counts; whether enough tests pass."""
    environment = offline(scratch)
    kept = scratch / f"{suite}.official.json"
    official = read_outcomes(kept) if kept.is_file() else {}
    folder = fresh_folder(scratch / f"{suite}-official")
    copies = copy_tests(source, files, folder, lenient=False)
    known = {name.split("::")[0] for name in official}
    unknown = [copy for copy in copies if copy.relative_to(folder).as_posix() not in known]
    if unknown:
        official |= run_tests(source, unknown, folder, environment)
        write_outcomes(kept, official)
    folder = fresh_folder(scratch / f"{suite}-ours")
    copies = copy_tests(source, files, folder, lenient=True)
    ours = run_tests(REPO, copies, folder, environment)
    write_outcomes(scratch / f"{suite}.ours.json", ours)
    tested = [file for file in files if is_test_file(file)]
    private = {
        copy.relative_to(folder).as_posix(): tests_of_private_names(file, source)
        for copy, file in zip(copies, tested, strict=True)
    }
    return _report(suite, official, ours, private)


def _report(
    suite: str,
    official: dict[str, Outcome],
    ours: dict[str, Outcome],
    private: dict[str, frozenset[str]],
) -> bool:
    """Prints the counts of the files that are keys of ``private``, and the causes of failures."""
    passing = {
        name
        for name, outcome in official.items()
        if outcome.status == "passed" and name.split("::")[0] in private
    }
    counted = {
        name
        for name in passing
        if name.split("::")[-1].split("[")[0] not in private[name.split("::")[0]]
    }
    missing = Outcome("failed", "not collected")
    got = {name: ours.get(name, ours.get(name.split("::")[0], missing)) for name in counted}
    later = {name for name, outcome in got.items() if outcome.needs_package(LATER)}
    counted -= later
    # What the source does not show, such as a private name used by a helper of another package.
    counted -= {name for name in counted if got[name].needs_private_name}
    failed = {name: got[name] for name in counted if got[name].status != "passed"}
    for file in sorted({name.split("::")[0] for name in counted}):
        here = [name for name in counted if name.startswith(f"{file}::")]
        bad = [name for name in here if name in failed]
        print(f"{file:64} {len(here) - len(bad):5} of {len(here)}")
        causes = Counter(failed[name].message[:150] for name in bad)
        for cause, count in causes.most_common(4):
            print(f"    {count} x {cause}")
    passed = len(counted) - len(failed)
    print(
        f"{suite}: {passed} of {len(counted)} that the official package passes "
        f"({100 * passed / max(1, len(counted)):.1f}%). Not counted: {len(later)} that need "
        f"packages that are not built yet, {len(passing) - len(counted) - len(later)} that use "
        "private names"
    )
    return passed >= REQUIRED[suite] * len(counted)


def run_recipes(source: Path, scratch: Path, model: Path, only: str) -> bool:
    """Runs the official recipes and prints how each ended; whether all ran."""
    copy_recipes(source, scratch)
    model = copy_model(model, scratch)
    environment = {**offline(scratch), "OMP_NUM_THREADS": "1"}
    results: dict[Recipe, str] = {}
    served = make_served_model(scratch / "hub-cache")
    os.environ.update(environment)
    server = Serving(scratch / "server", {"model_name": served}).start()
    over_server = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key()}
    try:
        for recipe in RECIPES:
            if only not in recipe.name:
                continue
            extra = {**environment, **(over_server if recipe.over_server else {})}
            name = served if recipe.over_server else str(model)
            results[recipe] = run_recipe(recipe, scratch, REPO, name, extra)
            print(f"{recipe.name:40} {results[recipe]}", flush=True)
    finally:
        server.stop()
    ran = sum(result.startswith("ok") for result in results.values())
    print(f"recipes: {ran} of {len(results)} run two steps unchanged")
    return ran == len(results)


def report_names() -> bool:
    """Prints the public names that differ and have no reason; whether there are none."""
    exceptions = official_names.read_exceptions()
    found = official_names.differences()
    for name, problem in found.items():
        print(f"{name}: {problem} ({official_names.excuse(name, exceptions) or 'NO REASON'})")
    print(f"names: {len(found)} differ")
    return all(official_names.excuse(name, exceptions) for name in found)


def report_tutorials(source: Path) -> bool:
    """Prints the imports of tutorials that do not resolve; whether all of built packages do."""
    names = imported_names(source)
    missing = {name: file for name, file in names.items() if not resolves(name)}
    exceptions = official_names.read_exceptions()
    later = {
        name
        for name in missing
        if name.split(".")[1] in LATER or official_names.excuse(name, exceptions)
    }
    for name, file in sorted(missing.items()):
        print(f"{name} ({file}){': listed as an exception' if name in later else ''}")
    built = len(names) - len(later)
    print(
        f"tutorials: {len(names) - len(missing)} of {built} imports resolve; {len(later)} more are "
        "of packages that are not built yet, or listed exceptions"
    )
    return len(missing) == len(later)


def main() -> int:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="unpacked source of tinker-cookbook 0.6.1")
    parser.add_argument("part", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/official-cookbook"))
    parser.add_argument("--tokenizers", type=Path, help="folder with a tokenizer for each family")
    parser.add_argument("--model", type=Path, help="small model that the recipes train")
    parser.add_argument("--only", default="", help="run only test files whose path contains this")
    arguments = parser.parse_args()
    if not (arguments.source / "tinker_cookbook" / "__init__.py").is_file():
        parser.error(f"{arguments.source}: expected the unpacked source of tinker-cookbook")
    source, scratch = arguments.source.resolve(), arguments.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    if arguments.tokenizers is not None:
        fill_hub_cache(arguments.tokenizers, scratch / "hub-cache")
    good = True
    for part in arguments.part:
        if part == "names":
            good &= report_names()
        elif part == "tutorials":
            good &= report_tutorials(source)
        elif part == "renderings":
            good &= report_renderings(source, REPO, scratch, offline(scratch))
        elif part == "recipes":
            if arguments.model is None:
                parser.error("recipes: got no --model, expected the folder of a small model")
            good &= run_recipes(source, scratch, arguments.model, arguments.only)
        else:
            files = downstream_files(source) if part == "downstream" else unit_files(source)
            files = [file for file in files if arguments.only in str(file) or file.name in HELPERS]
            good &= compare(source, part, files, scratch)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
