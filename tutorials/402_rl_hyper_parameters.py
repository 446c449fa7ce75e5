"""402 RL hyper-parameters (12 s): the learning rate comes first, and entropy shows a bad one."""

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
    # 402 RL hyper-parameters

    Of all settings of RL, the **learning rate** matters most. Too low, and nothing moves before
    you lose patience. Too high, and the model forgets how to answer at all. Here are three rates
    on one task, with everything else equal: answers to *Tell me about the owl* should have one
    sentence.
    """)
    return


@app.cell
def _():
    import json
    from pathlib import Path

    from tinker_cookbook import cli_utils, rl
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.hyperparam_utils import get_lr
    from tinker_cookbook.rl.envs.problem_env import ProblemEnv
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    class OneSentence(ProblemEnv):
        def __init__(self, animal, renderer):
            super().__init__(renderer)
            self.animal = animal

        def get_question(self):
            return f"Tell me about the {self.animal}."

        def check_answer(self, sample_str):
            return sample_str.count(".") == 1

    recommended = get_lr(tutorial_model())
    expect("recommended rate for SFT", recommended, 7.3e-3, rel=0.01)
    return (
        ConfigurationError,
        OneSentence,
        Path,
        RENDERER,
        SOUNDS,
        cli_utils,
        expect,
        json,
        mistake,
        picture,
        recommended,
        rl,
        tutorial_model,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Where to begin

    `get_lr(model_name)` is the rate for supervised training with LoRA. It does not depend on the
    rank. `rl.run` takes a quarter of it, because the gradient of RL is noisier. We also take a
    hundredth of it, and four times as much.
    """)
    return


@app.cell
async def _(
    OneSentence,
    Path,
    RENDERER,
    SOUNDS,
    cli_utils,
    expect,
    json,
    recommended,
    rl,
    tutorial_model,
):
    rates = {"1/100": recommended / 100, "1/4": recommended / 4, "4": recommended * 4}
    settings = {
        "model_name": tutorial_model(),
        "renderer_name": RENDERER,
        "backend": "local",
        "device": "cpu",
        "dtype": "float32",
        "batch_size": 5,
        "group_size": 8,
        "max_tokens": 40,
        "max_steps": 8,
        "eval_every": 0,
        "save_every": 0,
        "behavior_if_log_dir_exists": "delete",
    }
    curves = {}
    for _name, _rate in rates.items():
        _folder = await rl.run_async(
            env=OneSentence,
            problems=list(SOUNDS),
            learning_rate=_rate,
            log_path=cli_utils.default_log_path(f"tutorial_402/{_rate:.0e}"),
            **settings,
        )
        _lines = (Path(_folder) / "metrics.jsonl").read_text().splitlines()
        curves[_name] = [row for row in map(json.loads, _lines) if "reward/total" in row]

    def last_rewards(name):
        return sum(row["reward/total"] for row in curves[name][-2:]) / 2

    print("times get_lr")
    for _name, _rows in curves.items():
        _first, _last = _rows[0], _rows[-1]
        print(
            f"{_name:5} reward {_first['reward/total']:.2f} -> {_last['reward/total']:.2f}   "
            f"entropy {_first['optim/entropy']:.2f} -> {_last['optim/entropy']:.2f}"
        )
    # RL amplifies the rounding of a CPU: the bounds only separate the three rates.
    expect("last rewards, 1/100", last_rewards("1/100"), 0.36, abs=0.15)
    expect("last rewards, 1/4", last_rewards("1/4"), 0.95, abs=0.1)
    expect("last rewards, 4", last_rewards("4"), 0.0, abs=0.2)
    return (curves,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    The **entropy** says how many answers the model still considers. It falls slowly while the
    model learns. If it jumps up, the model has begun to talk at random; if it falls to 0 at once,
    the model repeats one answer, and there is nothing left to compare.
    """)
    return


@app.cell
def _(curves, picture):
    figure, panels = picture("step", "", columns=2)
    for _name, _style in zip(curves, ("o-", "s--", "D:"), strict=True):
        _steps = [row["step"] for row in curves[_name]]
        for _panel, _key in zip(panels, ("reward/total", "optim/entropy"), strict=True):
            _panel.plot(_steps, [row[_key] for row in curves[_name]], _style, label=_name)
            _panel.set_ylabel({"reward/total": "mean reward"}.get(_key, "entropy (nats per token)"))
    panels[0].set_ylim(-0.02, 1.02)
    panels[0].legend(title="times get_lr")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    Other libraries have other names for these settings. An unknown name is refused with the name
    that it has here; nothing is ignored.
    """)
    return


@app.cell
async def _(ConfigurationError, OneSentence, SOUNDS, mistake, rl):
    with mistake(ConfigurationError, "group_size"):
        await rl.run_async(env=OneSentence, problems=list(SOUNDS), num_generations=16)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - Real models: begin with `learning_rate=None`. `python -m tinker_cookbook.sweep
      recipes.rl_basic learning_rate=3e-5,1e-4,3e-4 log_dir=…` compares rates with one loaded
      model.
    - `group_size` 8 to 16 and 32 to 128 problems a step; the usual rule lets the rate grow
      with the square root of their number. In supervised learning we found less
      (`docs/research.md`, learning rate and batch size).
    - Groups whose rewards are all equal teach nothing: `env/all/by_group/frac_mixed` is the share
      that does.
    - Judge a setting by three seeds. One curve of RL is noise.
    """)
    return


if __name__ == "__main__":
    app.run()
