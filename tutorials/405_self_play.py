"""405 Multi-agent self-play (6 s): the reward stands still while the play gets better."""

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
    # 405 Multi-agent self-play

    In **self-play** one policy has all seats of a game, and learns from both sides. It needs no
    opponent program, and the opponent is always as strong as the policy. But one winner means one
    loser: the mean reward is 0 in every step, whatever is learned. So you measure the policy
    against an opponent that does **not** learn.

    The game: rock, paper, scissors, but scissors do not cut. Paper then never loses, so a good
    player plays paper. The model begins with all three hands.
    """)
    return


@app.cell
def _():
    import json
    from dataclasses import dataclass
    from pathlib import Path

    import chz

    from tinker_cookbook import cli_utils
    from tinker_cookbook.exceptions import DataValidationError
    from tinker_cookbook.renderers import get_renderer, get_text_content
    from tinker_cookbook.rl.train import Config, main
    from tinker_cookbook.rl.types import (
        Env,
        EnvGroupBuilder,
        RLDataset,
        RLDatasetBuilder,
        StepResult,
    )
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import HANDS, RENDERER, tutorial_model

    BEATS = {("paper", "rock"), ("rock", "scissors")}

    def result(mine, theirs):
        """Returns 1 for a win, -1 for a loss, 0 for a draw; a hand that is none loses."""
        if mine not in HANDS or theirs not in HANDS:
            return (mine in HANDS) - (theirs in HANDS)
        return ((mine, theirs) in BEATS) - ((theirs, mine) in BEATS)

    return (
        Config,
        DataValidationError,
        Env,
        EnvGroupBuilder,
        HANDS,
        Path,
        RENDERER,
        RLDataset,
        RLDatasetBuilder,
        StepResult,
        chz,
        cli_utils,
        dataclass,
        expect,
        get_renderer,
        get_text_content,
        get_tokenizer,
        json,
        main,
        mistake,
        picture,
        result,
        tutorial_model,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Seats and games

    An `Env` is one **seat**. Members 0 and 1 of a group play each other, then 2 and 3, and so on.
    Hands are shown at the same time, so no seat waits for another, and the result is a reward of
    the group (tutorial 301). In the test, every seat plays against three players that always show
    the same hand.
    """)
    return


@app.cell
def _(
    Env,
    EnvGroupBuilder,
    HANDS,
    RENDERER,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    chz,
    dataclass,
    get_renderer,
    get_text_content,
    get_tokenizer,
    result,
    tutorial_model,
):
    class Seat(Env):
        def __init__(self, renderer):
            self.renderer, self.hand = renderer, ""

        async def initial_observation(self):
            question = [{"role": "user", "content": "Choose rock, paper or scissors."}]
            prompt = self.renderer.build_generation_prompt(question)
            return prompt, self.renderer.get_stop_sequences()

        async def step(self, action, *, extra=None):
            message, _ = self.renderer.parse_response(action)
            self.hand = get_text_content(message)
            return StepResult.final(0.0, self.renderer.get_stop_sequences())

    @dataclass(frozen=True)
    class SelfPlay(EnvGroupBuilder):
        renderer: object
        seats: int = 16

        async def make_envs(self):
            return [Seat(self.renderer) for _ in range(self.seats)]

        async def compute_group_rewards(self, trajectory_group, env_group):
            hands = [seat.hand for seat in env_group]
            # The other seat of a game has the number that differs in the last bit.
            rewards = [result(hand, hands[seat ^ 1]) for seat, hand in enumerate(hands)]
            return [
                (reward, {name: hand == name for name in HANDS})
                for reward, hand in zip(rewards, hands, strict=True)
            ]

    class FixedOpponents(SelfPlay):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [
                (sum(result(seat.hand, hand) for hand in HANDS) / len(HANDS), {})
                for seat in env_group
            ]

    class Games(RLDataset):
        def __init__(self, group, steps, groups=2):
            self.group, self.steps, self.groups = group, steps, groups

        def get_batch(self, index):
            return [self.group] * self.groups

        def __len__(self):
            return self.steps

    @chz.chz
    class GamesBuilder(RLDatasetBuilder):
        group: type = SelfPlay

        async def __call__(self):
            renderer = get_renderer(RENDERER, get_tokenizer(tutorial_model()))
            test = Games(FixedOpponents(renderer), steps=1)
            return Games(self.group(renderer), steps=12), test

    return GamesBuilder, SelfPlay


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Play

    The mean reward of self-play is exactly 0 in every step. Against the fixed players the reward
    rises from about 0 to 0.33, which is the best there is: a win against rock, a draw against
    paper and scissors.
    """)
    return


@app.cell
async def _(
    Config,
    GamesBuilder,
    Path,
    RENDERER,
    cli_utils,
    expect,
    json,
    main,
    tutorial_model,
):
    config = Config(
        log_path=cli_utils.default_log_path("tutorial_405"),
        model_name=tutorial_model(),
        renderer_name=RENDERER,
        dataset_builder=GamesBuilder(),
        learning_rate=3e-3,
        max_tokens=8,
        eval_every=2,
        save_every=0,
        backend="local",
        device="cpu",
        dtype="float32",
        behavior_if_log_dir_exists="delete",
    )
    await main(config)
    rows = [
        json.loads(x) for x in (Path(config.log_path) / "metrics.jsonl").read_text().splitlines()
    ]
    train = {row["step"]: row for row in rows if "reward/total" in row}
    test = {row["step"]: row[key] for row in rows if (key := "test/env/all/reward/total") in row}
    expect(
        "self-play reward, largest", max(abs(row["reward/total"]) for row in train.values()), 0.0
    )
    expect("paper in the first step", train[1]["env/all/paper"], 0.33, abs=0.25)
    expect("paper in the last step", train[12]["env/all/paper"], 0.9, abs=0.15)
    expect("against fixed players, before", test[0], 0.0, abs=0.15)
    expect("against fixed players, after", test[12], 0.3, abs=0.08)
    return config, test, train


@app.cell
def _(HANDS, picture, test, train):
    figure, (left, right) = picture("step", "", columns=2)
    for _hand, _style in zip(HANDS, ("o-", "s--", "D:"), strict=True):
        left.plot(
            list(train), [row[f"env/all/{_hand}"] for row in train.values()], _style, label=_hand
        )
    left.set_ylabel("share of the hands")
    left.legend()
    right.plot(
        list(train), [row["reward/total"] for row in train.values()], "o-", label="self-play"
    )
    right.plot(list(test), list(test.values()), "s--", label="against fixed players")
    right.set_ylabel("mean reward")
    right.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A score that divides by the number of decided games has no value if all games are draws. A
    reward that is no number would turn all weights into such; the run stops before it trains on
    it.
    """)
    return


@app.cell
async def _(
    DataValidationError,
    GamesBuilder,
    SelfPlay,
    chz,
    cli_utils,
    config,
    main,
    mistake,
):
    class ShareOfDecided(SelfPlay):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(float("nan"), {}) for _ in env_group]

    broken = chz.replace(
        config,
        dataset_builder=GamesBuilder(group=ShareOfDecided),
        log_path=cli_utils.default_log_path("tutorial_405_mistake"),
    )
    with mistake(DataValidationError, "nan"):
        await main(broken)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `python -m recipes.multiplayer_rl.text_arena.train` plays 73 text games this way, with turns,
      illegal moves, and a pool of earlier weights as opponents (`opponents=self,pool`). A pool
      keeps the policy from forgetting how to beat old strategies.
    - Seats of a game with turns wait for each other: such an `Env` sets `waits_for_members =
      True`.
    - **Hosted API**: `backend="tinker"`; all seats of all games ask for samples at once, so that
      the service can batch them.
    """)
    return


if __name__ == "__main__":
    app.run()
