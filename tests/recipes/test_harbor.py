"""Terminal tasks: Dockerfiles, rewards, and work in real sandboxes.

All ten tasks of the example data run in one slow test, which takes about half a minute.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from pathlib import Path

import chz
import pytest
from tiny_model import make_chat_model

from recipes.distillation import on_policy_distillation_harbor_multi_turn as distillation
from recipes.distillation.harbor_multiturn import zero_reward
from recipes.harbor_rl import train
from recipes.harbor_rl.check import check_task, check_tasks
from recipes.harbor_rl.dockerfile import read_dockerfile, read_workdir
from recipes.harbor_rl.eval import EvalConfig, run_eval
from recipes.harbor_rl.harbor_env import (
    HarborDatasetBuilder,
    HarborEnvGroupBuilder,
    load_harbor_tasks,
    workdir_of,
)
from recipes.harbor_rl.harbor_tools import HarborBashTool, HarborReward
from recipes.harbor_rl.scripts.eval_harbor_rl import parse_benchmarks
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.sandbox import SandboxInfrastructureError, SandboxResult
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import ToolInput
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

TASKS = {task.task_name: task for task in load_harbor_tasks("example_data")}
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


# Dockerfiles -------------------------------------------------------------------------------------


def dockerfile(folder: Path, text: str, **files: str):
    (folder / "Dockerfile").write_text(text)
    for name, content in files.items():
        (folder / name).write_text(content)
    return read_dockerfile(folder / "Dockerfile")


def test_steps_have_their_folder_and_variables(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    plan = dockerfile(
        tmp_path,
        "# a comment\nFROM python:3.11-slim\nENV A=1 B=\"2 3\"\nARG NAME=x\nWORKDIR /app\n"
        "COPY data /app/in\nCOPY one.py two.py ./\nWORKDIR sub\nRUN echo $A \\\n  # inside\n"
        "  && ls\nCMD bash\nENV C 4\nRUN [\"touch\", \"a b\"]\n",
        **{"one.py": "1", "two.py": "2"},
    )  # fmt: skip
    assert (plan.workdir, plan.folders) == ("/app/sub", ["/app", "/app/sub"])
    assert plan.environment == {"A": "1", "B": "2 3", "NAME": "x", "C": "4"}
    copies = [target for step in plan.steps for _, target in step.copies]
    assert copies == ["/app/in/a.txt", "/app/one.py", "/app/two.py"]
    first, second = [step for step in plan.steps if step.command]
    assert (first.command, first.workdir) == ("echo $A && ls", "/app/sub")
    assert dict(first.environment) == {"A": "1", "B": "2 3", "NAME": "x"}
    assert second.command == "touch 'a b'"


def test_the_folder_of_commands_follows_variables(tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        "FROM node AS build\nWORKDIR /built\nFROM nvidia/cuda:12\nARG ROOT=opt\n"
        "ENV APP=$ROOT/app\nworkdir ${APP}\nVOLUME /data\nWORKDIR \\\n  sub\n"
    )
    assert read_workdir(dockerfile) == "/opt/app/sub"


def test_packages_that_this_machine_has_are_not_installed(tmp_path):
    plan = dockerfile(
        tmp_path,
        "FROM debian\nRUN apt-get update && apt-get install -y --no-install-recommends bash "
        "coreutils=* && rm -rf /var/lib/apt/lists/* && echo done\n",
    )
    assert [step.command for step in plan.steps] == ["echo done"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("FROM nvidia/cuda:12\n", "FROM nvidia/cuda:12: expected one of debian"),
        ("FROM debian AS a\nFROM debian\n", "FROM debian: .* follows one FROM"),
        ("FROM debian\n\nCOPY missing.txt /a\n", "COPY missing.txt /a: there is no such file"),
        ("FROM debian\nCOPY ../ /a\n", "leads out of"),
        ("FROM debian\nADD https://a.b/c /c\n", "has no network"),
        ("FROM debian\nVOLUME /data\n", "VOLUME /data: the local sandbox follows"),
        ("FROM debian\nUSER nobody\n", "USER nobody: the local sandbox follows"),
        ("FROM debian\nRUN apt-get install -y no-such-package-x\n", "no-such-package-x.*lacks"),
    ],
)
def test_what_the_sandbox_cannot_do_is_named(tmp_path, text, names):
    folder = tmp_path / "environment"
    folder.mkdir()
    with pytest.raises(ConfigurationError, match=names):
        dockerfile(folder, text)


# Tasks -------------------------------------------------------------------------------------------


def test_example_tasks_are_whole():
    assert len(TASKS) == 10
    for task in TASKS.values():
        assert task.instruction
        assert (task.task_dir / "solution" / "solve.sh").is_file()
        assert workdir_of(task) == read_dockerfile(task.environment_dir / "Dockerfile").workdir
        assert task.seconds("verifier", 60) == 30
        assert task.seconds("agent", 60) == 60


def test_folders_may_be_one_level_deeper_and_lacks_are_named(tmp_path):
    deep = tmp_path / "8f3a" / "count"
    shutil.copytree(TASKS["count-errors"].task_dir, deep)
    assert [task.task_name for task in load_harbor_tasks(str(tmp_path))] == ["count"]
    (deep / "tests" / "test.sh").unlink()
    with pytest.raises(DataValidationError, match=r"count: the task has no tests/test\.sh"):
        load_harbor_tasks(str(tmp_path))
    with pytest.raises(ConfigurationError, match="dataset: got 'no-such'"):
        load_harbor_tasks("no-such")
    with pytest.raises(DataValidationError, match=r"no folder in it has a task\.toml"):
        load_harbor_tasks(str(deep))
    with pytest.raises(ConfigurationError, match="terminal_bench"):
        parse_benchmarks("terminal_bank")


def test_a_dataset_is_checked_before_anything_starts(stories_model):
    settings = {"batch_size": 4, "group_size": 2, "model_name": stories_model}
    tasks = list(TASKS.values())
    train_set, test_set = asyncio.run(HarborDatasetBuilder(tasks=tasks, num_test=2, **settings)())
    assert (len(train_set), len(test_set), len(test_set.get_batch(0))) == (2, 1, 2)
    _, all_tested = asyncio.run(HarborDatasetBuilder(tasks=tasks, **settings)())
    assert len(all_tested.get_batch(0)) == 10
    assert {group.group_size for group in train_set.get_batch(0)} == {2}
    pickle.loads(pickle.dumps(train_set.get_batch(0)[0]))
    with pytest.raises(ConfigurationError, match="num_test: got 10"):
        HarborDatasetBuilder(tasks=tasks, num_test=10, **settings).check()
    cli = train.CLIConfig(model_name=stories_model, renderer_name="role_colon", num_test=3)
    assert cli.build_dataset(tasks).num_test == 3


# Rewards -----------------------------------------------------------------------------------------


class Files:
    """A sandbox that only has files, and tests that write what it was given."""

    sandbox_id = "files"

    def __init__(self, exit_code: int = 0, **written: str) -> None:
        self.exit_code, self.written, self.files = exit_code, written, {}

    async def run_command(self, command, workdir=None, timeout=60, max_output_bytes=None):
        if command == "bash /tests/test.sh":
            assert isinstance(self.files["/tests/data.bin"], bytes)
            self.files |= {f"/logs/verifier/reward.{k}": v for k, v in self.written.items()}
            metrics = {"timed_out": self.exit_code == 124}
            return SandboxResult(stdout="", stderr="", exit_code=self.exit_code, metrics=metrics)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def read_file(self, path, max_bytes=None, timeout=60):
        found = self.files.get(path)
        return SandboxResult(stdout=found or "", stderr="", exit_code=int(found is None))

    async def write_file(self, path, content, executable=False, timeout=60):
        self.files[path] = content
        return SandboxResult(stdout="", stderr="", exit_code=0)


@pytest.fixture
def tests_dir(tmp_path):
    (tmp_path / "test.sh").write_text("exit 0")
    (tmp_path / "data.bin").write_bytes(b"\xff\x00")
    return tmp_path


@pytest.mark.parametrize(
    ("sandbox", "reward", "metrics"),
    [
        (Files(txt="0.5\n"), 0.5, {"test_passed": 1.0}),
        (Files(json='{"reward": 0.25, "style": 1}'), 0.25, {"style": 1.0}),
        (Files(json="1"), 1.0, {}),
        (Files(1, txt="0"), 0.0, {"test_passed": 0.0}),
        (Files(1), 0.0, {"no_reward_file": 1.0}),
        (Files(124), 0.0, {"grader_timeout": 1.0}),
    ],
)
def test_the_reward_is_what_the_tests_wrote(tests_dir, sandbox, reward, metrics):
    found, named = asyncio.run(HarborReward(tests_dir, sandbox)([]))
    assert found == reward == named["reward"]
    assert metrics.items() <= named.items()
    assert named.keys() > {"grader_timeout", "no_reward_file"}  # so that a mean is a share


@pytest.mark.parametrize("text", ["nan", "inf", "yes", '{"reward": null}', '{"score": 1}', "[1]"])
def test_a_reward_that_is_no_number_is_not_the_model_s_fault(tests_dir, text):
    with pytest.raises(SandboxInfrastructureError, match="expected a finite number"):
        asyncio.run(HarborReward(tests_dir, Files(txt=text))([]))
    with pytest.raises(SandboxInfrastructureError, match="succeeded, but wrote no"):
        asyncio.run(HarborReward(tests_dir, Files())([]))


# Real sandboxes ----------------------------------------------------------------------------------


async def work(task, *commands: str) -> tuple[float, dict[str, float], list[dict]]:
    """Runs commands by the model's tool, and grades."""
    builder = HarborEnvGroupBuilder(task, "", None, 1, 1, grader_timeout=20)
    sandbox = await builder.new_sandbox()
    try:
        tool = HarborBashTool(sandbox, 10, workdir_of(task)).bash
        results = [await tool.run(ToolInput({"command": command})) for command in commands]
        outputs = [json.loads(result.messages[0]["content"]) for result in results]
        reward, metrics = await builder.reward_of(sandbox, workdir_of(task))([])
        return reward, metrics, outputs
    finally:
        await sandbox.cleanup()


@needs_sandbox
def test_a_solution_scores_and_an_untouched_folder_does_not():
    """Two seconds: four sandboxes."""
    found = asyncio.run(check_task(TASKS["broken-links"]))
    assert found.ok, found
    # ``command_timeout`` is the only limit of a command.
    assert HarborBashTool(Files(), 900).bash.settings.timeout_seconds is None


REWARD = "/logs/verifier/reward.txt"
PYTHON = "#!/bin/sh\nmkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"
ATTACKS = {
    "writes the reward": f"mkdir -p /logs/verifier && echo 1 > {REWARD}",
    "replaces the tests": f"mkdir -p /tests && echo 'echo 1 > {REWARD}' > /tests/test.sh",
    "keeps writing the reward": "mkdir -p /logs/verifier; (while sleep 0.01; do echo 1 > "
    f"{REWARD}; done) > /dev/null 2>&1 &",
    "has another python": f"printf '{PYTHON}' | tee python3 bash env > python; chmod +x *",
    "has modules of the same names": f"""echo 'open("{REWARD}", "w").write("1")' | """
    "tee sitecustomize.py usercustomize.py collections.py > pathlib.py",
    "links to the tests": f"ln -s /tests tests; ln -s {REWARD} errors.txt",
    "has paths that are too long": "for i in $(seq 25); do mkdir {0}; cd {0}; done".format(
        200 * "d"
    ),
}


@needs_sandbox
def test_tricks_of_the_first_sandbox_do_not_reach_the_tests():
    """Three seconds."""

    async def all_at_once():
        task = TASKS["count-errors"]
        return await asyncio.gather(*(work(task, command) for command in ATTACKS.values()))

    for name, (reward, metrics, outputs) in zip(ATTACKS, asyncio.run(all_at_once()), strict=True):
        assert reward == 0.0, (name, metrics, outputs)
        assert metrics.get("work_not_readable", 0.0) == float("too long" in name)


@needs_sandbox
def test_a_link_to_the_tests_is_not_the_work(tmp_path):
    """Three seconds: six sandboxes."""
    test = "mkdir -p /logs/verifier\ncat a/out.txt | cmp - /tests/expected.txt\n"
    test += "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    files = {"environment/Dockerfile": "FROM debian\nENV A=/app\nWORKDIR $A\nWORKDIR sub\n"}
    files |= {"tests/test.sh": test, "tests/expected.txt": "25\n", "instruction.md": "Square it."}
    for name, text in {**files, "task.toml": ""}.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (task,) = load_harbor_tasks(str(tmp_path))

    async def rewards():
        theft = "mkdir b; ln -s b a; ln -s /tests b/t; ln -s t/expected.txt b/out.txt"
        kept = f"{theft}; chmod 555 b"
        honest = "mkdir b; ln -s b a; ln -s one b/out.txt; echo 25 > b/one; ln -s none b/broken"
        return await asyncio.gather(*(work(task, command) for command in (theft, kept, honest)))

    assert [reward for reward, *_ in asyncio.run(rewards())] == [0.0, 0.0, 1.0]


class Solver(TokenCompleter):
    """Calls the tool with the commands of a solution, then ends."""

    def __init__(self, model: str, *commands: str) -> None:
        self.tokenizer, self.commands = get_tokenizer(model), list(commands)

    async def __call__(self, model_input, stop, *, max_tokens=None):
        text = "Done."
        if self.commands:
            call = {"name": "bash", "arguments": {"command": self.commands.pop(0)}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        tokens = self.tokenizer.encode(text + "<|im_end|>")
        return TokensWithLogprobs(tokens, [0.0] * len(tokens))


@needs_sandbox
def test_a_model_that_solves_a_task_gets_its_reward(tokenizer_folder):
    """One second: an episode of three answers."""
    task, model = TASKS["unique-addresses"], tokenizer_folder("qwen3")
    script = (task.task_dir / "solution" / "solve.sh").read_text()
    builder = HarborEnvGroupBuilder(task, model, "qwen3", 5, 1)
    group = asyncio.run(do_group_rollout(builder, Solver(model, "ls /app; pwd", script)))
    assert group.get_total_rewards() == [1.0]
    (trajectory,) = group.trajectories_G
    assert len(trajectory.transitions) == 3
    assert '"stdout": "addresses.txt\\n/app\\n"' in trajectory.transitions[0].logs["tool_result_0"]
    assert trajectory.transitions[-1].metrics["test_passed"] == 1.0
    assert builder._sandboxes == []


def test_distillation_needs_a_teacher_and_runs_no_tests(stories_model):
    given = {"model_name": str(stories_model), "renderer_name": "role_colon"}
    with pytest.raises(ConfigurationError, match="teacher_model, teacher_checkpoint: got neither"):
        distillation.CLIConfig(**given).resolved()
    given["teacher_model"] = str(stories_model)
    cli = parse_arguments(
        distillation.CLIConfig,
        [
            *(f"{key}={value}" for key, value in given.items()),
            "sandbox_factory=None",
            "max_tokens=64",
            "max_turns=3",
        ],
    )
    config = chz.replace(cli, dataset_configs=cli.build_dataset(list(TASKS.values()))).resolved()
    config.check()
    (part,) = config.dataset_configs
    assert part.teacher_config.base_model == str(stories_model)
    train, test = asyncio.run(part.dataset_builder())
    assert (len(train), test) == (2, None)
    (group, *_) = train.get_batch(0)
    assert (group.reward_fn, group.max_turns) == (zero_reward, 3)
    assert asyncio.run(zero_reward([])) == (0.0, {})


@pytest.mark.slow
@needs_sandbox
def test_all_solutions_score_one_and_untouched_folders_zero():
    """Half a minute: forty sandboxes."""
    results = asyncio.run(check_tasks(list(TASKS.values()), max_concurrent=2))
    assert [result for result in results if not result.ok] == []


@pytest.mark.slow
@needs_sandbox
def test_a_run_and_an_evaluation_of_a_model(tmp_path, capsys):
    """Ten seconds: two steps of two episodes, and two tasks."""
    model = make_chat_model(tmp_path / "model")
    common = {"model_name": model, "renderer_name": "qwen3", "device": "cpu", "dtype": "float32"}
    cli = train.CLIConfig(
        **common, log_path=str(tmp_path / "run"), behavior_if_log_dir_exists="raise", max_steps=2,
        group_size=2, groups_per_batch=1, max_tokens=8, max_turns=2, eval_every=0, lora_rank=4,
        loss_normalization="tokens",
    )  # fmt: skip
    asyncio.run(train.cli_main(cli, [TASKS["count-errors"], TASKS["iso-dates"]]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows][-1] == 2
    assert "env/all/reward/total" in rows[-1]
    config = EvalConfig(
        **common, output_path=str(tmp_path / "eval"), max_tokens=8, max_turns=2, max_tasks=2
    )
    results = asyncio.run(run_eval(config, list(TASKS.values())))
    # Noise is cut off at max_tokens, which earns context_overflow_reward.
    assert [(result.reward, result.error) for result in results] == [(-0.1, None)] * 2
    (written,) = (tmp_path / "eval").glob("*/results.jsonl")
    assert len(written.read_text().splitlines()) == 2
    assert "mean reward -0.100 of 2 tasks" in capsys.readouterr().out
