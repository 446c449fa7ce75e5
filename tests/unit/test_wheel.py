"""What `pip install .` puts on a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # about 12 s: it builds the wheel
def test_an_installed_recipe_finds_its_data(tmp_path):
    # A copy, so that the build leaves nothing in the checkout.
    source = tmp_path / "source"
    for name in ("tinker_cookbook",):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "-q"]
    command += ["--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "setuptools" in done.stderr and done.returncode:
        pytest.skip("this environment has no setuptools to build with")
    assert done.returncode == 0, done.stderr[-2000:]

    installed = tmp_path / "installed"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
        names = wheel.namelist()
    folder = REPO / "recipes" / "example_data"
    data = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert sorted(n.partition("/example_data/")[2] for n in names if "/example_data/" in n) == data
    tutorials = {str(p.relative_to(REPO)) for p in (REPO / "tutorials").rglob("*") if p.is_file()}
    kept = {name for name in tutorials if "__pycache__" not in name and "README" not in name}
    assert {f"tinker_cookbook/{name}" for name in kept} <= {*names}
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {
        "tinker_cookbook"
    }
    assert {f"tinker_cookbook/server/page/chat.{kind}" for kind in ("html", "css", "js")} <= {
        *names
    }
    scripts = next(wheel for wheel in installed.glob("*.dist-info")) / "entry_points.txt"
    assert "tinker-cookbook = tinker_cookbook.utils.command_line.console:main" in (
        scripts.read_text()
    )
    code = (
        "from tinker_cookbook.recipes import sl_loop; from pathlib import Path;"
        "assert Path(sl_loop.Config().dataset_path).is_file(), sl_loop.Config().dataset_path;"
        "print(sl_loop.__file__)"
    )
    # -S leaves the editable installation of the checkout out, -P the current folder.
    paths = [str(installed), *(path for path in sys.path if path.endswith("site-packages"))]
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(paths), "PATH": ""},
    )
    assert done.stdout.strip().startswith(str(installed)), done.stderr[-2000:]
    # The console command of the installed package, in a folder without the checkout.
    code = (
        "import sys; from tinker_cookbook.utils.command_line.console import main;"
        "sys.argv = ['tinker-cookbook', *sys.argv[1:]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code, "sl_basic", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(paths), "PATH": ""},
    )
    assert "sl_basic model_name=" in done.stdout, done.stderr[-2000:]
