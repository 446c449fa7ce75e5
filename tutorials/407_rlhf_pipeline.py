"""407 RLHF pipeline (11 s): demonstrations, a reward model from comparisons, RL on its scores."""

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
    # 407 RLHF pipeline

    Sometimes nobody can write down what makes an answer good, but people can compare two. **RLHF**
    learns it from them, in three runs:

    1. **SFT** on demonstrations: the model learns the form of an answer.
    2. A **reward model** from comparisons: it learns to say how good an answer is.
    3. **RL**: the model answers, the reward model scores, and the scores train the model.

    Our people like answers about animals that have the sound of the animal. In real life we could
    not check that by a program. Here we can, so that we see whether the reward model is right.
    """)
    return


@app.cell
def _():
    import json
    import math
    from pathlib import Path

    import tinker

    from tinker_cookbook import checkpoint_utils, cli_utils, rl
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.envs.problem_env import ProblemEnv
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    model_name = tutorial_model()
    renderer = get_renderer(RENDERER, get_tokenizer(model_name))
    folder = Path(cli_utils.default_log_path("tutorial_407"))
    folder.mkdir(parents=True, exist_ok=True)
    backend = {"backend": "local", "device": "cpu", "dtype": "float32"}
    animals = list(SOUNDS)
    known, held_out = animals[:7], animals[7:]

    def answers(animal):
        """Returns a good answer, and others."""
        facts = (f"It says {SOUNDS[animal]}.", "It is an animal.", "It likes to eat.", "I like it.")
        return [f"The {animal} is nice. {fact}" for fact in facts]

    def ask(animal):
        return f"Tell me about the {animal}."

    async def sft(name, pairs, test_pairs=(), **settings):
        """Trains on questions with answers; returns the checkpoint and the last held-out loss."""
        for file, rows in (("train", pairs), ("test", test_pairs or pairs[:2])):
            lines = [
                json.dumps(
                    {
                        "messages": [
                            {"role": "user", "content": question},
                            {"role": "assistant", "content": answer},
                        ]
                    }
                )
                for question, answer in rows
            ]
            (folder / f"{name}-{file}.jsonl").write_text("\n".join(lines) + "\n")
        common = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model_name, renderer_name=RENDERER, batch_size=14
        )
        config = train.Config(
            log_path=str(folder / name),
            model_name=model_name,
            renderer_name=RENDERER,
            dataset_builder=FromConversationFileBuilder(
                common_config=common,
                file_path=str(folder / f"{name}-train.jsonl"),
                test_file_path=str(folder / f"{name}-test.jsonl"),
            ),
            save_every=0,
            show_samples=0,
            behavior_if_log_dir_exists="delete",
            **backend,
            **settings,
        )
        await train.main(config)
        last = (Path(config.log_path) / "metrics.jsonl").read_text().splitlines()[-1]
        return checkpoint_utils.get_last_checkpoint(config.log_path), json.loads(last)["test/nll"]

    return (
        ConfigurationError,
        Path,
        ProblemEnv,
        RENDERER,
        SOUNDS,
        answers,
        ask,
        backend,
        connect,
        expect,
        folder,
        held_out,
        json,
        known,
        math,
        mistake,
        model_name,
        picture,
        renderer,
        rl,
        sft,
        tinker,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## 1. Demonstrations

    They show the form: two sentences. They do not show what people like, because they have all
    four facts alike.
    """)
    return


@app.cell
async def _(answers, ask, known, sft):
    demonstrations = [(ask(animal), answer) for animal in known for answer in answers(animal)]
    await sft("sft", demonstrations, learning_rate=3e-3, max_steps=8)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## 2. The reward model

    Of each pair, people chose one. The reward model reads an answer and says *Yes* if it is one
    that people choose. Its score is the probability of *Yes*. The test: pairs about animals that
    it did not see.
    """)
    return


@app.cell
async def _(answers, expect, held_out, known, sft):
    def judge(answer):
        return f"Answer: {answer}\nIs it good?"

    def comparisons(animals):
        for animal in animals:
            chosen, *others = answers(animal)
            for rejected in others:
                yield chosen, rejected

    def labelled(animals):
        pairs = list(comparisons(animals))
        return [(judge(a), "Yes") for a, _ in pairs] + [(judge(a), "No") for _, a in pairs]

    reward_model, _loss = await sft(
        "rm", labelled(known), labelled(held_out), learning_rate=5e-3, max_steps=20
    )
    expect("held-out loss (0.69 would be a guess)", _loss, 0.113, abs=0.02)
    return judge, reward_model


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## 3. Reinforcement learning

    It begins with the weights of step 1: the folder of a run stands for its newest checkpoint. The
    environment asks the reward model. `right` is what we want in truth; it is logged, and trains
    nothing.
    """)
    return


@app.cell
async def _(
    Path,
    ProblemEnv,
    RENDERER,
    SOUNDS,
    ask,
    backend,
    connect,
    expect,
    folder,
    held_out,
    json,
    judge,
    known,
    math,
    model_name,
    renderer,
    reward_model,
    rl,
    tinker,
):
    service = connect("local", device="cpu", dtype="float32").service
    scorer = await service.create_sampling_client(model_path=reward_model.sampler_path)
    words = [renderer.tokenizer.encode(word)[0] for word in ("Yes", "No")]

    class Liked(ProblemEnv):
        def get_question(self):
            return ask(self.animal)

        def __init__(self, animal, renderer):
            super().__init__(renderer)
            self.animal = animal

        async def check_answer(self, sample_str):
            question = [{"role": "user", "content": judge(sample_str)}]
            prompt = renderer.build_generation_prompt(question).to_ints()
            requests = [
                scorer.compute_logprobs(tinker.ModelInput.from_ints([*prompt, word]))
                for word in words
            ]
            yes, no = [(await request)[-1] for request in requests]
            return 1 / (1 + math.exp(no - yes))

        async def step(self, action, *, extra=None):
            result = await super().step(action, extra=extra)
            result.metrics["right"] = float(SOUNDS[self.animal] in result.logs["answer"])
            return result

    settings = {
        "env": Liked,
        "problems": known,
        "test_problems": held_out,
        "model_name": model_name,
        "renderer_name": RENDERER,
        "batch_size": 7,
        "group_size": 8,
        "max_tokens": 40,
        "learning_rate": 3e-3,
        "max_steps": 8,
        "eval_every": 8,
        "save_every": 0,
        "behavior_if_log_dir_exists": "delete",
        **backend,
    }
    run = await rl.run_async(
        load_checkpoint_path=str(folder / "sft"), log_path=str(folder / "rl"), **settings
    )
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/total" in row]
    for _row in (rows[0], rows[-1]):
        print(
            f"held-out animals, step {_row['step']}: "
            f"score {_row['test/env/all/reward/total']:.2f}, right {_row['test/env/all/right']:.2f}"
        )
    # RL amplifies the rounding of a CPU: the bounds only separate the first step from the last.
    expect("score in the first step", steps[0]["reward/total"], 0.34, abs=0.1)
    expect("score in the last step", steps[-1]["reward/total"], 0.88, abs=0.1)
    expect("right in the first step", steps[0]["env/all/right"], 0.18, abs=0.1)
    expect("right in the last step", steps[-1]["env/all/right"], 0.57, abs=0.2)
    return Liked, settings, steps


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    The score rises to 0.9, but only half of the answers are right. RL raises the score, not what
    people like, and it has found a hole: the reward model saw no answer with the sound of
    **another** animal, so it likes every sound.
    """)
    return


@app.cell
async def _(Liked, expect, renderer):
    _score = await Liked("cow", renderer).check_answer("The cow is nice. It says hoot.")
    expect("score of a cow that says hoot", _score, 0.82, abs=0.05)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Every reward model has such holes. So let people look at samples during RL, compare those, and
    train the reward model again; stop early; or hold the policy near step 1 with
    `kl_penalty_coef`.
    """)
    return


@app.cell
def _(picture, steps):
    figure, axes = picture("step of RL", "mean over the answers")
    _steps = [row["step"] for row in steps]
    axes.plot(
        _steps, [row["reward/total"] for row in steps], "o-", label="score of the reward model"
    )
    axes.plot(_steps, [row["env/all/right"] for row in steps], "s--", label="what people like")
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A run needs its predecessor. If it is not there, because the folder has another name or step 1
    has failed, RL must not begin with the base model in silence.
    """)
    return


@app.cell
async def _(ConfigurationError, folder, mistake, rl, settings):
    with mistake(ConfigurationError, "load_checkpoint_path"):
        await rl.run_async(
            load_checkpoint_path=str(folder / "stf"), log_path=str(folder / "wrong"), **settings
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `python -m recipes.preference.rlhf.rlhf_pipeline` is the pipeline for files of comparisons.
      Its reward model reads both answers and says which is better, and it ends with a win rate
      against step 1.
    - **GPU**: policy and reward model may have different base models; both must fit. **Hosted
      API**: `backend="tinker"`, and `connect("tinker")` for the scores.
    - With comparisons only, and no wish to sample, DPO (tutorial 403) is one run instead of three.
    """)
    return


if __name__ == "__main__":
    app.run()
