"""Runs the recipe programs and tutorials of the official cookbook, unchanged, with this package.

The recipes are copied into a package of their own, as a user keeps them who copied them from the
official repository. Programs that create ``tinker.ServiceClient`` themselves, and the tutorials,
talk to this project's server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tinker
from official_page import Figures, share
from official_recipes import (
    CANNOT,
    CHECKOUT,
    PACKAGE,
    QWEN,
    RECIPES,
    VISION,
    Recipe,
    copy_model,
    copy_recipes,
    make_served_models,
    programs_of,
    write_data,
    write_experiment,
)
from serving import Serving

LAUNCHER = Path(__file__).with_name("official_launcher.py")
_LIMIT_SECONDS = 600
# What a tutorial asks for and cannot have here: other weights, the Hub, hours.
TUTORIALS_CANNOT = {
    "102_first_sft": "its second part samples from Kimi-K2.6",
    "407_rlhf_pipeline": "trains for more than the limit of time",
}


@contextmanager
def _serving(scratch: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Environment variables by which a program reaches a server of tiny models."""
    models = make_served_models(scratch / "hub-cache")
    os.environ.update(environment)
    server = Serving(scratch / "server", {"model_name": ",".join(models)}).start()
    try:
        yield {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key()}
    finally:
        server.stop()


def run_recipes(
    source: Path,
    repository: Path,
    scratch: Path,
    model: Path,
    environment: dict[str, str],
    only: str,
) -> tuple[bool, Figures]:
    """Runs the recipe programs that exist here and prints how each ended; whether all ran."""
    copy_recipes(source, scratch)
    home = scratch / "home"
    data = write_data(scratch, home)
    names = programs_of(source)
    here = [
        name
        for name in names
        if (repository / "recipes" / Path(*name.split("."))).with_suffix(".py").is_file()
    ]
    known = {recipe.name: recipe for recipe in RECIPES}
    results: dict[str, str] = {}
    places = {"model": str(copy_model(model, scratch)), "qwen": QWEN}
    places |= {"vision": VISION, "data": str(data)}
    environment = {**environment, "HOME": str(home)}
    with _serving(scratch, environment) as over_server:
        places["checkpoint"] = _checkpoint(over_server, QWEN)
        places["vision_checkpoint"] = _checkpoint(over_server, VISION)
        write_experiment(data, places["vision_checkpoint"])
        for name in names:
            if only not in name or (name not in here and name not in known):
                continue
            reason = CANNOT.get(name)
            if reason is None:
                extra = over_server if known[name].over_server else {}
                results[name] = _run_recipe(
                    known[name], scratch, repository, places, {**environment, **extra}
                )
            print(
                f"{name:55} {'here' if name in here else 'not here':8} {reason or results[name]}",
                flush=True,
            )
    ran = {name for name, result in results.items() if result.startswith("ok")}
    print(f"recipes: {len(here)} of {len(names)} programs exist here; {len(ran & set(here))} ran")
    figures = {
        "exist": share(len(here), len(names)),
        "run": share(len(ran & set(here)), len(here)),
        "failed": sorted(set(here) - ran),
    }
    return all(name in ran for name in here if name in results), figures


def _checkpoint(over_server: Mapping[str, str], model: str) -> str:
    """Path of sampler weights of a model on the server."""
    os.environ.update(over_server)
    client = tinker.ServiceClient().create_lora_training_client(base_model=model, rank=8).result()
    path = client.save_weights_for_sampler(name="start").result().path
    for name in over_server:
        del os.environ[name]
    return path


def _run(
    words: list[str], log: Path, scratch: Path, repository: Path, env: Mapping[str, str]
) -> int:
    """Exit status of a program of the original, whose output goes to ``log``; -1 out of time."""
    environments = Path(__file__).parent / "verifiers_checks"  # of the verifiers library
    path = os.pathsep.join(map(str, [repository, scratch, environments]))
    command = [sys.executable, "-P", str(LAUNCHER), *words]
    with open(log, "w", encoding="utf-8") as out:
        try:
            return subprocess.run(
                command, env={**os.environ, **env, "PYTHONPATH": path}, cwd=scratch / CHECKOUT,
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                timeout=_LIMIT_SECONDS,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _run_recipe(
    recipe: Recipe,
    scratch: Path,
    repository: Path,
    places: Mapping[str, str],
    environment: dict[str, str],
) -> str:
    """Runs two steps of a recipe; ``ok (N rows)`` or the last line of its error."""
    folder = scratch / "runs" / recipe.name
    shutil.rmtree(folder, ignore_errors=True)
    runs = scratch / "home" / "tinker-runs"
    shutil.rmtree(runs, ignore_errors=True)
    words = [] if recipe.own_words else ["max_steps=2", f"log_path={folder}"]
    if not recipe.own_words and "model_name=" not in recipe.settings:
        served = recipe.over_server
        words.append(f"model_name={places['qwen' if served else 'model']}")
    words += recipe.settings.format(**places, log=folder).split()
    if recipe.own_words:
        folder.mkdir(parents=True)
    log = scratch / f"{recipe.name}.log"
    status = _run([f"{PACKAGE}.{recipe.name}", *words], log, scratch, repository, environment)
    metrics = [*folder.rglob("metrics.jsonl"), *runs.rglob("metrics.jsonl")]
    rows = max((len(file.read_text("utf-8").splitlines()) for file in metrics), default=0)
    if status == 0 and rows >= recipe.rows:
        return f"ok ({rows} rows of metrics)"
    return f"status {status}, {rows} rows: {_last_line(log)}"


def run_tutorials(
    source: Path,
    repository: Path,
    scratch: Path,
    model: Path,
    environment: dict[str, str],
    only: str,
) -> tuple[bool, Figures]:
    """Runs the tutorials as scripts and prints how each ended; whether all ran that can."""
    del model
    (scratch / CHECKOUT).mkdir(exist_ok=True)
    results: dict[str, str] = {}
    with _serving(scratch, environment) as over_server:
        for file in sorted(source.glob("tutorials/*.py")):
            if only not in file.stem:
                continue
            log = scratch / f"{file.stem}.log"
            env = {**environment, **over_server, "HOME": str(scratch / "home")}
            status = _run([str(file)], log, scratch, repository, env)
            results[file.stem] = "ok" if status == 0 else f"status {status}: {_last_line(log)}"
            reason = TUTORIALS_CANNOT.get(file.stem, "") if status else ""
            print(f"{file.stem:30} {results[file.stem]} {reason}", flush=True)
    ran = [name for name, result in results.items() if result == "ok"]
    print(f"tutorials: {len(ran)} of {len(results)} run to their end")
    failed = sorted(set(results) - set(ran))
    figures = {"run": share(len(ran), len(results)), "failed": failed}
    return set(failed) <= set(TUTORIALS_CANNOT), figures
