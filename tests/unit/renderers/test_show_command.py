"""The command line of ``python -m tinker_cookbook.renderers.show``."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import forks
import pytest

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.renderers.show import ShowConfig, main

QUESTION = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = {"messages": [QUESTION, ANSWER]}
    lines = [
        json.dumps(good),
        "",
        json.dumps({"messages": [{"role": "user", "content": "Second"}, ANSWER]}),
        '{"messages": [{"role": "user", "content": "cut \\ud83e"}]}',
        '{"nope": 1}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_row_of_a_file(tokenizer_folder, rows, capsys):
    main(ShowConfig(model_name=tokenizer_folder("smollm2"), file=rows, index=1))
    shown = capsys.readouterr().out
    assert f"{rows}:3" in re.sub(r"\n *", "", shown)  # long paths are folded
    assert "│Second│" in shown
    assert "┃Hello┃.┃<|im_end|>\n" in shown


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"file": "absent.jsonl"}, DataValidationError, "there is no such file"),
        ({"index": 3}, DataFormatError, "rows.jsonl:5: .*columns nope; expected .* messages"),
        ({"index": 2}, DataFormatError, r"rows.jsonl:4: messages\[0\].content: got half"),
        ({"index": 9}, DataValidationError, "has 4 conversations; expected 0 to 3"),
        ({"index": -1}, ConfigurationError, "index: got -1"),
        ({"max_tokens": 1}, ConfigurationError, "max_tokens: got 1"),
        ({"template_options": "[1]"}, ConfigurationError, "template_options: got '\\[1\\]'"),
        ({"template_options": "{"}, ConfigurationError, "template_options: got '{'"),
        ({"renderer_name": "qwne3"}, ConfigurationError, "did you mean 'qwen3'"),
        ({"renderer_name": "llama3"}, ConfigurationError, "eot_id"),
    ],
)
def test_bad_input_is_said_in_a_sentence(tokenizer_folder, rows, settings, error, words):
    with pytest.raises(error, match=words):
        main(ShowConfig(**{"model_name": tokenizer_folder("smollm2"), "file": rows, **settings}))


def test_help_loads_nothing_heavy_and_a_run_ends_well(tokenizer_folder, rows):
    program = (
        "import runpy, sys\n"
        "sys.argv = ['tinker_cookbook.renderers.show', '--help']\n"
        "try:\n"
        "    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "print('LOADED', *(n for n in ('torch', 'transformers', 'tinker') if n in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "LOADED", done.stderr
    assert "template_options" in done.stdout
    command = [sys.executable, "-m", "tinker_cookbook.renderers.show"]
    arguments = [f"model_name={tokenizer_folder('smollm2')}", rows, "renderer_name=smollm2"]
    done = forks.run([*command, *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    assert "renderer    smollm2, asked for" in done.stdout
    done = forks.run([*command, arguments[0], "no.jsonl"])
    assert done.returncode == 1
    assert "DataValidationError: no.jsonl: there is no such file" in done.stderr
    assert "Traceback" not in done.stderr
