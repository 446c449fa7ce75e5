"""302 Own environment (6 s): a question and a rule that grades the answer are a task for RL."""

import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell(hide_code=True)
def _():
    import marimo as mo

    return (mo,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # 302 Own environment

    An **environment** asks the model something and gives a reward for the answer. Most tasks have
    one question and an answer that a program can check. Such a task is a class with two methods,
    and `rl.run` trains a model on it.

    Our task: an answer to *Tell me about the owl* should have three different sentences. About a
    quarter of the answers of the model have.
    """)
    return


@app.cell
def _():
    import json
    from pathlib import Path

    from tinker_cookbook import cli_utils, rl
    from tinker_cookbook.exceptions import DataValidationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.envs.problem_env import ProblemEnv
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    class ThreeSentences(ProblemEnv):
        def __init__(self, animal, renderer):
            super().__init__(renderer)
            self.animal = animal

        def get_question(self):
            return f"Tell me about the {self.animal}."

        def check_answer(self, sample_str):
            sentences = [part.strip() for part in sample_str.split(".") if part.strip()]
            return len(sentences) == 3 and len(set(sentences)) == 3

    return (
        DataValidationError,
        Path,
        RENDERER,
        SOUNDS,
        ThreeSentences,
        cli_utils,
        expect,
        get_renderer,
        get_tokenizer,
        json,
        mistake,
        picture,
        rl,
        tutorial_model,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Try the grader first

    A wrong grader costs more time than anything else in RL. So give it answers that you wrote: a
    right one, a wrong one, and one that cheats. A model finds every way to cheat that a grader
    allows.
    """)
    return


@app.cell
def _(
    RENDERER,
    ThreeSentences,
    expect,
    get_renderer,
    get_tokenizer,
    tutorial_model,
):
    renderer = get_renderer(RENDERER, get_tokenizer(tutorial_model()))
    owl = ThreeSentences("owl", renderer)
    expect("right", owl.check_answer("The owl is nice. It says hoot. I like it."), True)
    expect("wrong", owl.check_answer("The owl is nice."), False)
    expect("cheating", owl.check_answer("I like it. I like it. I like it."), False)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Train

    `problems` is any list; each entry makes an environment. Four of the ten animals are held out,
    in `test_problems`. A step samples eight answers about each of the six others.

    The reward rises from 0.2 to 0.85, and for the held-out animals from 0 to 0.75, three of four.
    """)
    return


@app.cell
async def _(
    Path,
    RENDERER,
    SOUNDS,
    ThreeSentences,
    cli_utils,
    expect,
    json,
    rl,
    tutorial_model,
):
    animals = list(SOUNDS)
    settings = {
        "model_name": tutorial_model(),
        "renderer_name": RENDERER,
        "backend": "local",
        "device": "cpu",
        "dtype": "float32",
        "batch_size": 6,
        "group_size": 8,
        "max_tokens": 40,
        "behavior_if_log_dir_exists": "delete",
    }
    # In a notebook `rl.run_async` with await; in a program `rl.run` with the same arguments.
    run = await rl.run_async(
        env=ThreeSentences,
        problems=animals[:6],
        test_problems=animals[6:],
        learning_rate=5e-3,
        max_steps=10,
        eval_every=5,
        save_every=0,
        log_path=cli_utils.default_log_path("tutorial_302"),
        **settings,
    )
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["step"]: row["reward/total"] for row in rows if "reward/total" in row}
    held_out = {row["step"]: row[key] for row in rows if (key := "test/env/all/correct") in row}
    expect("reward of the first step", rewards[1], 0.21, abs=0.1)
    expect("reward of the last step", rewards[10], 0.85, abs=0.15)
    # One animal is a quarter. RL amplifies the rounding of a CPU, so another may give one more.
    expect("held-out animals before", held_out[0], 0.0, abs=0.25)
    expect("held-out animals after", held_out[10], 0.75, abs=0.25)
    return animals, held_out, rewards, settings


@app.cell
def _(held_out, picture, rewards):
    figure, axes = picture("step", "share of answers with three sentences")
    axes.plot(list(rewards), list(rewards.values()), "o-", label="six animals, trained on")
    axes.plot(list(held_out), list(held_out.values()), "s--", label="four held-out animals")
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A grader that forgets `return` gives `None`. This is no reward, not even 0, so the run stops
    and names the class and the turn. An exception of the grader does the same.
    """)
    return


@app.cell
async def _(
    DataValidationError,
    ThreeSentences,
    animals,
    cli_utils,
    mistake,
    rl,
    settings,
):
    class ForgetsReturn(ThreeSentences):
        def check_answer(self, sample_str):
            super().check_answer(sample_str)

    with mistake(DataValidationError, "check_answer returned None"):
        await rl.run_async(
            env=ForgetsReturn,
            problems=animals,
            max_steps=1,
            log_path=cli_utils.default_log_path("tutorial_302_mistake"),
            **settings,
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: leave out `device` and `dtype`. Give a real model, such as
      `model_name="Qwen/Qwen3-4B-Instruct-2507"`, leave out `renderer_name` and `learning_rate` (a
      model has its own format and a recommended rate), and raise `max_tokens` and `batch_size`.
    - **Hosted API**: `backend="tinker"`, with `TINKER_API_KEY` set. The environment runs on your
      machine; only sampling and training go to the service.
    - A task with several turns is a `MessageEnv` (404). A slow grader is an `async def
      check_answer`.
    - `python -m tinker_cookbook.view /tmp/tinker-examples/tutorial_302` shows each answer with its
      reward.
    """)
    return


if __name__ == "__main__":
    app.run()
