"""301 Env, EnvGroupBuilder, RLDataset (2 s): the three objects between a task and the RL loop."""

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
    # 301 Env, EnvGroupBuilder, RLDataset

    The RL loop knows three things about a task:

    - An **Env** is one episode: it gives a prompt, takes the tokens of an answer, and returns a
      reward.
    - An **EnvGroupBuilder** makes the members of a **group**: several episodes of one problem. It
      may also give rewards that depend on the whole group.
    - An **RLDataset** returns the groups of a step.

    `ProblemEnv` and `rl.run` (tutorial 302) write all three for you. You need them for a task that
    they do not have, such as the one here: of eight answers to a question, the **shortest** wins.
    No answer has a reward of its own, only a rank in its group.
    """)
    return


@app.cell
def _():
    from dataclasses import dataclass

    import numpy as np

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.completers import TinkerTokenCompleter
    from tinker_cookbook.exceptions import DataValidationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.advantages import compute_advantages
    from tinker_cookbook.rl.data_processing import assemble_training_data
    from tinker_cookbook.rl.rollouts import do_group_rollout
    from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, StepResult
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    return (
        DataValidationError,
        Env,
        EnvGroupBuilder,
        RENDERER,
        RLDataset,
        SOUNDS,
        StepResult,
        TinkerTokenCompleter,
        assemble_training_data,
        compute_advantages,
        connect,
        dataclass,
        do_group_rollout,
        expect,
        get_renderer,
        get_tokenizer,
        mistake,
        np,
        picture,
        tutorial_model,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## One episode

    An `Env` speaks tokens, because the loop must train on exactly what was sampled. There is no
    reset: each episode gets a new object.
    """)
    return


@app.cell
def _(Env, StepResult):
    class TellEnv(Env):
        def __init__(self, animal, renderer):
            self.renderer = renderer
            self.question = [{"role": "user", "content": f"Tell me about the {animal}."}]

        async def initial_observation(self):
            prompt = self.renderer.build_generation_prompt(self.question)
            return prompt, self.renderer.get_stop_sequences()

        async def step(self, action, *, extra=None):
            # The answer ends the episode. The group gives its reward, not this method.
            return StepResult.final(0.0, self.renderer.get_stop_sequences())

    return (TellEnv,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## One group

    `make_envs` is called once for a group. A builder is small and has no model in it, so it can be
    sent to another process.
    """)
    return


@app.cell
def _(EnvGroupBuilder, TellEnv, dataclass):
    @dataclass(frozen=True)
    class ShortestWins(EnvGroupBuilder):
        animal: str
        renderer: object
        members: int = 8

        async def make_envs(self):
            return [TellEnv(self.animal, self.renderer) for _ in range(self.members)]

        async def compute_group_rewards(self, trajectory_group, env_group):
            """Returns for each member the share of the others that are longer."""
            lengths = [len(one.transitions[0].ac.tokens) for one in trajectory_group]
            others = len(lengths) - 1
            return [(sum(n > mine for n in lengths) / others, {"length": mine}) for mine in lengths]

    return (ShortestWins,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## All groups

    `get_batch(i)` must return the same problems each time, so that a run that was stopped goes on
    with the same data.
    """)
    return


@app.cell
def _(
    RENDERER,
    RLDataset,
    SOUNDS,
    ShortestWins,
    expect,
    get_renderer,
    get_tokenizer,
    tutorial_model,
):
    class Animals(RLDataset):
        def __init__(self, animals, batch_size, renderer):
            self.animals, self.batch_size, self.renderer = animals, batch_size, renderer

        def get_batch(self, index):
            start = index * self.batch_size
            batch = self.animals[start : start + self.batch_size]
            return [ShortestWins(animal, self.renderer) for animal in batch]

        def __len__(self):
            return len(self.animals) // self.batch_size

    renderer = get_renderer(RENDERER, get_tokenizer(tutorial_model()))
    dataset = Animals(list(SOUNDS), batch_size=5, renderer=renderer)
    expect("steps of an epoch", len(dataset), 2)
    return dataset, renderer


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## What the loop does with them

    A **policy** is anything that samples tokens. `do_group_rollout` lets it play all members of a
    group. The **advantage** of an answer is its reward minus the mean of its group, so advantages
    of a group add up to 0: the loop raises the probability of what was better than its neighbours,
    and lowers that of the others.
    """)
    return


@app.cell
async def _(
    TinkerTokenCompleter,
    assemble_training_data,
    compute_advantages,
    connect,
    dataset,
    do_group_rollout,
    expect,
    renderer,
    tutorial_model,
):
    service = connect("local", device="cpu", dtype="float32").service
    sampler = await service.create_sampling_client(base_model=tutorial_model())
    policy = TinkerTokenCompleter(sampler, max_tokens=40, seed=0)
    groups = [await do_group_rollout(builder, policy) for builder in dataset.get_batch(0)]
    advantages = compute_advantages(groups)
    for _member, _trajectory in enumerate(groups[0].trajectories_G):
        _message, _ = renderer.parse_response(_trajectory.transitions[0].ac.tokens)
        _reward = groups[0].get_total_rewards()[_member]
        print(
            f"reward {_reward:.2f}  advantage {advantages[0][_member]:+.2f}  {_message['content']}"
        )
    expect(
        "sum of the advantages of a group", abs(round(float(sum(advantages[0])), 6)), 0.0, abs=1e-6
    )
    _data, _ = assemble_training_data(groups, advantages)
    expect("data for training", len(_data), 40, abs=8)
    return advantages, groups, policy


@app.cell
def _(SOUNDS, advantages, groups, np, picture):
    figure, axes = picture("tokens of the answer", "advantage")
    for _animal, _group, _advantages, _marker in zip(
        SOUNDS, groups, advantages, "osD^v", strict=False
    ):
        _lengths = [metrics["length"] for metrics in _group.metrics_G]
        # The points of one group lie over each other where answers are equally long.
        axes.scatter(_lengths, np.asarray(_advantages), marker=_marker, alpha=0.7, label=_animal)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_title("five groups of eight answers: shorter is better, within a group")
    axes.legend(title="group")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    The rewards of a group must be as many as its members. One less would give every member the
    reward of its neighbour, and nobody would see it in a curve.
    """)
    return


@app.cell
async def _(
    DataValidationError,
    ShortestWins,
    do_group_rollout,
    mistake,
    policy,
    renderer,
):
    class OnlyTheBest(ShortestWins):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(1.0, {})]

    with mistake(DataValidationError, "got 1 rewards, expected 8"):
        await do_group_rollout(OnlyTheBest("cow", renderer), policy)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - Nothing here depends on the backend: environments run on your machine, and only `policy`
      samples elsewhere. On the hosted API `connect("tinker")` makes it.
    - The loop plays all groups of a step at once; here they came one after the other, to be easy
      to read. On a GPU that matters: all members share one batch.
    - To train on it, put the dataset into an `RLDatasetBuilder`, whose `__call__` returns it, and
      that into the `Config` of tutorial 304.
    """)
    return


if __name__ == "__main__":
    app.run()
