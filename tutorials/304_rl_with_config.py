"""304 RL with Config (8 s): one object is the whole run; another run is a copy with a change."""

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
    # 304 RL with Config

    `rl.run` (tutorial 302) takes an environment and a list. Behind it is a **Config**, as in
    tutorial 303, with a **dataset builder**: the object that makes problems, environments and
    groups. Write both yourself for a task with settings of its own, that others run and that a
    sweep can vary.

    The task: answers to *Tell me about the owl* should have a given number of sentences.
    """)
    return


@app.cell
def _():
    import json
    from functools import partial
    from pathlib import Path

    import chz

    from tinker_cookbook import cli_utils
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
    from tinker_cookbook.rl.envs.problem_env import ProblemEnv
    from tinker_cookbook.rl.train import Config, main
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    class Sentences(ProblemEnv):
        def __init__(self, animal, sentences, renderer):
            super().__init__(renderer)
            self.animal, self.sentences = animal, sentences

        def get_question(self):
            return f"Tell me about the {self.animal}."

        def check_answer(self, sample_str):
            return sample_str.count(".") == self.sentences

    @chz.chz
    class AnimalDatasetBuilder(ProblemDatasetBuilder):
        sentences: int = 1

        def load(self):
            """Returns the problems to train on, and those held out."""
            animals = list(SOUNDS)
            return animals[:6], animals[6:]

        def env_thunk(self, problem, renderer):
            """Returns a call that makes an environment; a group calls it once for each member."""
            return partial(Sentences, problem, self.sentences, renderer)

        def tag(self, problem):
            """Returns the name of the task in the metrics."""
            return "animals"

    return (
        AnimalDatasetBuilder,
        Config,
        ConfigurationError,
        Path,
        RENDERER,
        chz,
        cli_utils,
        expect,
        json,
        main,
        mistake,
        picture,
        tutorial_model,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The config

    `groups` and `members`: a step has `batch_size` problems and `group_size` answers to each. An
    answer is pushed up if it is better than the mean of its group.

    The recommended `learning_rate` of a model is `get_lr(model_name)`, here 7e-3. RL wants less.
    """)
    return


@app.cell
def _(AnimalDatasetBuilder, Config, RENDERER, cli_utils, tutorial_model):
    model_name = tutorial_model()
    config = Config(
        log_path=cli_utils.default_log_path("tutorial_304/one"),
        model_name=model_name,
        renderer_name=RENDERER,
        dataset_builder=AnimalDatasetBuilder(
            model_name_for_tokenizer=model_name,
            renderer_name=RENDERER,
            batch_size=6,
            group_size=8,
        ),
        max_tokens=40,
        learning_rate=4e-3,
        max_steps=8,
        eval_every=8,
        save_every=0,
        backend="local",
        device="cpu",
        dtype="float32",
        behavior_if_log_dir_exists="delete",
    )
    return (config,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Two runs

    A config does not change. `chz.replace` gives a copy with other values, so the difference
    between two runs is one line.
    """)
    return


@app.cell
async def _(Path, chz, cli_utils, config, expect, json, main):
    four = chz.replace(
        config,
        log_path=cli_utils.default_log_path("tutorial_304/four"),
        dataset_builder=chz.replace(config.dataset_builder, sentences=4),
    )
    for _config in (config, four):
        await main(_config)

    def rewards(config):
        lines = (Path(config.log_path) / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["reward/total"] for row in map(json.loads, lines) if row["step"]}

    expect("one sentence, first step", rewards(config)[1], 0.25, abs=0.15)
    expect("one sentence, last step", rewards(config)[8], 0.9, abs=0.1)
    expect("four sentences, first step", rewards(four)[1], 0.25, abs=0.15)
    expect("four sentences, last step", rewards(four)[8], 0.9, abs=0.1)
    return four, rewards


@app.cell
def _(config, four, picture, rewards):
    figure, axes = picture("step", "mean reward")
    for _config, _style in ((config, "o-"), (four, "s--")):
        _sentences = _config.dataset_builder.sentences
        axes.plot(
            *zip(*rewards(_config).items(), strict=True), _style, label=f"sentences={_sentences}"
        )
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    GRPO is no loss function of its own: it is the loss `ppo` or `importance_sampling` with
    advantages that are divided by their standard deviation (`advantage_normalization="std"`). Who
    sets it as the loss is told what there is, before a model is loaded:
    """)
    return


@app.cell
async def _(ConfigurationError, chz, config, main, mistake):
    with mistake(ConfigurationError, "grpo"):
        await main(chz.replace(config, loss_fn="grpo"))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: leave out `device` and `dtype`. With a model of billions of parameters:
      `batch_size=64`, `group_size=16`, a learning rate of about a quarter of `get_lr(model_name)`,
      and `max_tokens` so large that few answers are cut off (`env/all/frac_cut_off`).
    - **Hosted API**: `backend="tinker"`. There, sampling a batch takes tens of seconds;
      `async_config` lets sampling and training overlap.
    - A config is also a command line: `python -m tinker_cookbook.rl.train
      dataset_builder=my_task:AnimalDatasetBuilder dataset_builder.sentences=4 …`, and `python -m
      tinker_cookbook.view /tmp/tinker-examples/tutorial_304` compares the runs.
    """)
    return


if __name__ == "__main__":
    app.run()
