"""What ``python -m`` can run: found without imports, listed, and none that does nothing."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.weights_paths import FORMS
from tinker_cookbook.training.commands import continue_command, own_evaluation, repeat_line
from tinker_cookbook.utils.command_line import completion, entrypoint
from tinker_cookbook.utils.command_line.entrypoint import (
    config_class_of,
    run_program,
    run_to_end,
)
from tinker_cookbook.utils.command_line.keys import keys_of
from tinker_cookbook.utils.command_line.programs import (
    Program,
    find_programs,
    module_of,
    short_name,
)

REPO = Path(__file__).resolve().parents[3]

LOOPS = [
    "tinker_cookbook.supervised.train",
    "tinker_cookbook.rl.train",
    "tinker_cookbook.preference.train_dpo",
    "tinker_cookbook.distillation.train_on_policy",
    "tinker_cookbook.distillation.train_off_policy",
    "tinker_cookbook.distillation.sdft",
]


def test_the_listing_has_every_program_with_a_line_of_its_own():
    names = {program.name for program in find_programs("tinker_cookbook")}
    assert names >= {*LOOPS, "tinker_cookbook.server", "tinker_cookbook.sweep"}
    assert "benchmarks.engine.worker" not in names  # started by a program
    assert "tinker_cookbook.utils.command_line.programs" not in names
    recipes = find_programs("recipes")
    opened = ("chat", "eval", "rl.train", "preference", "distillation")
    library = [p for p in find_programs("tinker_cookbook") if any(o in p.name for o in opened)]
    expected = {"recipes.sl_basic", "recipes.math_rl.train", "recipes.forecasting.train"}
    assert expected <= {program.name for program in recipes}
    for program in [*recipes, *library]:
        assert program.summary, program.name
        module = importlib.import_module(program.name)
        if hasattr(module, "__path__"):  # `python -m` runs the package's __main__
            module = importlib.import_module(f"{program.name}.__main__")
        # Official names of the main function differ: main, cli_main.
        names = ("main", "cli_main", "run_sweep", "_program")
        mains = [found for name in names if callable(found := getattr(module, name, None))]
        assert mains, program.name
        config = config_class_of(mains[0])
        for key in keys_of(config) if config else ():
            # Each path of weights may be a run's log folder too (see ``weights_field``).
            assert "tinker://" not in key.meaning or FORMS in key.meaning, (program.name, key.name)


def test_the_listing_imports_nothing_heavy():
    code = (
        "import sys, runpy; sys.argv = ['recipes'];"
        "runpy.run_module('recipes', run_name='__main__', alter_sys=True);"
        "print('LOADED', *(n for n in ('torch', 'tinker', 'transformers') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *_, last = done.stdout.splitlines()
    assert last == "LOADED", done.stderr[-2000:]
    assert "recipes.sl_basic " in done.stdout


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("sl_basic", "recipes.sl_basic"),
        ("recipes.math_rl.train", "recipes.math_rl.train"),
        ("tinker_cookbook.recipes.sl_loop", "tinker_cookbook.recipes.sl_loop"),
        ("eval", "tinker_cookbook.eval"),
        ("eval.compare", "tinker_cookbook.eval.compare"),
        # Of a recipe and a loop with one short name the recipe; the loop has its full name.
        ("distillation.sdft", "recipes.distillation.sdft"),
        ("tinker_cookbook.distillation.sdft", "tinker_cookbook.distillation.sdft"),
        ("math_rl", "did you mean math_rl.train?"),
        ("sl_bsic", "did you mean 'sl_basic'?"),
        ("utils.imports", "is no program"),
    ],
)
def test_the_program_of_a_name(name, module):
    if " " in module:
        with pytest.raises(ConfigurationError, match=re.escape(module)):
            module_of(name)
        return
    assert module_of(name) == module
    assert module_of(short_name(module)).endswith(module.removeprefix("tinker_cookbook."))


def console(folder, *words):
    """Starts the console command in a folder outside of the checkout."""
    code = f"import sys; sys.argv[0] = {str(folder / 'tinker-cookbook')!r};"
    code += "from tinker_cookbook.utils.command_line.console import main; main()"
    path = {"PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", code, *words]
    return forks.run(command, timeout=120, cwd=folder, env={**os.environ, **path})


def test_the_console_command_starts_programs_from_any_folder(tmp_path):
    (tmp_path / "mydata.py").write_text("print('imported from the working folder')")
    listed = console(tmp_path)
    assert listed.stdout.startswith("tinker-cookbook PROGRAM")
    assert "\n  sl_basic  " in listed.stdout
    assert "\n  runs  " in listed.stdout
    helped = console(tmp_path, "sl_loop", "--help")
    assert helped.stdout.startswith("python -m recipes.sl_loop [key=value")
    # The exit status and the error of the program.
    wrong = console(tmp_path, "rl.train", "dataset_builder=mydata:Data", "log_path=x")
    assert wrong.returncode == 1
    assert "imported from the working folder" in wrong.stdout
    assert "Traceback" not in wrong.stderr
    (tmp_path / "config.json").write_text('{"_type": "tinker_cookbook.rl.config:KLReferenceConfig",'
                                          '"base_model": "m"}')  # fmt: skip
    other = console(tmp_path, "sl_loop", f"config={tmp_path}")
    assert f"-m tinker_cookbook.rl.train config={tmp_path}" in other.stderr
    assert console(tmp_path, "sl_bsic").returncode == 1


@pytest.mark.parametrize(
    ("recorded", "program"),
    [
        ({"_type": "tinker_cookbook.supervised.train:Config"}, "supervised.train"),
        ({"_type": "tinker_cookbook.rl.config:Config", "a": ["m:f"]}, "rl.train"),
        ({"_type": "mine:Config"}, None),
        ({"_type": "tinker_cookbook.rl.config:Config", "a": {"_type": "__main__:Data"}}, None),
        ({"_type": "tinker_cookbook.rl.config:Config", "a": {"_not_rebuildable": "<f>"}}, None),
    ],
)
def test_a_run_names_the_command_that_repeats_it(tmp_path, recorded, program):
    line = repeat_line(str(tmp_path), recorded)
    words = f"-m tinker_cookbook.{program} config={tmp_path} log_path={tmp_path}-again"
    assert (line is None) == (program is None)
    assert line is None or line.endswith(words)
    # The settings changed at a step, so a file of them is not the whole run.
    (tmp_path / "config.history.jsonl").touch()
    assert repeat_line(str(tmp_path), recorded) is None


def test_bash_completes_programs_and_keys(monkeypatch, tmp_path):
    # A program that needs an extra which is not installed is completed without its keys.
    raises = "from tinker_cookbook.exceptions import ConfigurationError\nraise ConfigurationError"
    (tmp_path / "needs_extra.py").write_text(raises)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("recipes.sl_loop", "tinker_cookbook.runs", "needs_extra")
    programs = [Program(name, "") for name in names]
    monkeypatch.setattr(completion, "find_programs", lambda package: programs)
    script = completion.completion("bash")
    for typed, found in (
        ("sl_", "sl_loop"),
        ("sl_loop lr=1 lora", "lora_rank="),
        ("sl_loop log_path = my", ""),
        ("needs", "needs_extra"),
        ("runs l", ""),
    ):
        words = f"compopt() {{ :; }}\nCOMP_WORDS=(tinker-cookbook {typed})"
        asked = "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _tinker_cookbook; echo ${COMPREPLY[@]}"
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{words}\n{asked}"], capture_output=True, text=True
        )
        assert done.stdout.strip() == found, done.stderr
    with pytest.raises(ConfigurationError, match="got 'ksh', expected one of bash, zsh, fish"):
        completion.completion("ksh")


def test_work_runs_where_a_loop_is_running_and_is_cancelled_by_ctrl_c():
    seen = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return threading.current_thread() is threading.main_thread()

    async def cell_of_a_notebook():
        assert run_to_end(work(0)) is False
        with pytest.raises(ZeroDivisionError):
            run_to_end(asyncio.wait_for(broken(), 300))
        with pytest.raises(KeyboardInterrupt):
            run_to_end(interrupted())

    async def interrupted():
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGINT)
        await work(3600)

    async def broken():
        raise ZeroDivisionError

    # asyncio.run would take SIGINT itself, which the kernels of notebooks do not.
    loop = asyncio.new_event_loop()
    # A shell starts its background jobs with SIGINT ignored, and Python keeps that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop.run_until_complete(cell_of_a_notebook())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert seen == ["cancelled"]


def test_a_closed_pipe_ends_a_program_without_a_traceback(tmp_path):
    # More than a pipe holds, printed in parts.
    program = "for i in range(30000): print('a line', i)"
    code = (
        "from tinker_cookbook.utils.command_line.entrypoint import run_program\n"
        f"def main():\n    {program}\nrun_program(main)"
    )
    shell = '"$0" -c "$1" | head -1; echo "${PIPESTATUS[0]}"'
    words = ["bash", "-c", shell, sys.executable, code]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a line 0\n1\n", "")


@pytest.mark.parametrize(
    ("words", "error", "is_short"),
    [
        (["data=no.jsonl"], FileNotFoundError(2, "no such file", "no.jsonl"), True),
        (["merge", "nope", "out=x"], FileNotFoundError(2, "no such file", "nope/a.json"), True),
        (["--out", "/no/x/y"], FileNotFoundError(2, "no such file", "/no"), True),
        (["out=/etc"], PermissionError(13, "denied", "/etc/x"), True),
        (["merge", "nope"], FileNotFoundError("nope: there is no such file; expected …"), True),
        (["max_steps=2"], FileNotFoundError(2, "no such file", "rows.json"), False),
        (["max_steps=2"], PermissionError(13, "denied", os.getcwd()), False),
        (["data=no.jsonl"], TimeoutError(), False),
    ],
)
def test_a_wrong_path_of_the_command_line_ends_a_program_with_a_sentence(
    words, error, is_short, monkeypatch, capsys
):
    def program():
        raise error

    monkeypatch.setattr(sys, "argv", ["program", *words])
    monkeypatch.setattr(entrypoint, "_end_by_sigterm_as_by_ctrl_c", lambda: None)
    with pytest.raises(SystemExit if is_short else type(error)):
        run_program(program)
    assert (type(error).__name__ in capsys.readouterr().err) is is_short


@pytest.mark.parametrize("module", ["recipes.sl_basic", "tinker_cookbook"])
def test_a_python_without_the_package_is_told_where_one_is(module):
    # -S leaves the installed packages out.
    done = subprocess.run(
        [sys.executable, "-S", "-m", module],
        capture_output=True, text=True, cwd=REPO, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"{sys.executable} does not have tinker_cookbook's dependencies;")
    assert f"start the program with {REPO}/.venv/bin/python" in done.stderr


@pytest.mark.parametrize("module", LOOPS)
def test_a_loop_without_its_settings_says_what_it_needs(module):
    done = forks.run([sys.executable, "-m", module])
    assert done.returncode == 1
    assert "model_name" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_to_evaluate_has_the_data_of_the_run(monkeypatch):
    def started(name):
        main = SimpleNamespace(__spec__=SimpleNamespace(name=name))
        monkeypatch.setitem(sys.modules, "__main__", main)

    monkeypatch.setattr(sys, "orig_argv", ["python"])
    monkeypatch.setattr(sys, "argv", ["x", "dataset=my.jsonl", "max_steps=9", "log_path=/a"])
    started("recipes.sl_basic")
    assert own_evaluation("/a/", "tinker://r/weights/final") == (
        "evaluate     python -m recipes.sl_basic dataset=my.jsonl max_steps=0 "
        "load_checkpoint_path=tinker://r/weights/final log_path=/a-eval"
    )
    started("ipykernel_launcher")
    assert own_evaluation("/a", "tinker://r/weights/final") is continue_command("/a") is None
