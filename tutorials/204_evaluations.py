"""204 Evaluations (3 s): is the new model better, or was it luck: intervals and a paired test."""

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
    # 204 Evaluations

    An evaluation asks questions and grades the answers. The mean alone says little: 11 of 20 and
    14 of 20 may be the same model. This page writes an evaluator, and asks whether a trained model
    is **better**, with an interval.

    As in tutorial 104, an answer about an animal is good if it has the sound of the animal once.
    We show the model good answers about three animals, and evaluate it on the seven others.
    """)
    return


@app.cell
async def _():
    import tinker

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.eval.answer_accuracy import AnswerAccuracyEvaluator
    from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
    from tinker_cookbook.eval.statistics import compare_rewards, score_interval
    from tinker_cookbook.exceptions import DataValidationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    service = connect("local", device="cpu", dtype="float32").service
    client = await service.create_lora_training_client(tutorial_model(), rank=16, seed=0)
    renderer = get_renderer(RENDERER, client.get_tokenizer())

    def question(animal):
        return [{"role": "user", "content": f"Tell me about the {animal}."}]

    test = list(SOUNDS)[3:]
    return (
        AnswerAccuracyEvaluator,
        DataValidationError,
        SOUNDS,
        SamplingClientEvaluator,
        client,
        compare_rewards,
        conversation_to_datum,
        expect,
        mistake,
        picture,
        question,
        renderer,
        score_interval,
        test,
        tinker,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## An evaluator

    An evaluator is a function of a sampling client that returns metrics. Training loops call it
    every `eval_every` steps. Ours asks each question eight times, and keeps the rewards of each
    question: the interval and the test below need them.
    """)
    return


@app.cell
async def _(
    SOUNDS,
    SamplingClientEvaluator,
    client,
    expect,
    question,
    renderer,
    test,
    tinker,
):
    class TellsTheSound(SamplingClientEvaluator):
        async def __call__(self, sampling_client):
            stop = renderer.get_stop_sequences()
            requests = [
                sampling_client.sample(
                    renderer.build_generation_prompt(question(animal)),
                    8,
                    tinker.SamplingParams(max_tokens=40, seed=place, stop=stop),
                )
                for place, animal in enumerate(test)
            ]
            self.rewards = []
            for animal, request in zip(test, requests, strict=True):
                sequences = (await request).sequences
                texts = [renderer.parse_response(one.tokens)[0]["content"] for one in sequences]
                good = f"It says {SOUNDS[animal]}."
                self.rewards.append([float(t.count("says") == 1 and good in t) for t in texts])
            return {"test/good": sum(map(sum, self.rewards)) / (8 * len(test))}

    async def evaluate():
        evaluator = TellsTheSound()
        metrics = await evaluator(await client.save_weights_and_get_sampling_client())
        return metrics["test/good"], evaluator.rewards

    before, rewards_before = await evaluate()
    expect("good answers before training", before, 0.14, abs=0.05)
    return before, evaluate, rewards_before


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Train a little

    Eight steps on answers about a cow, a cat and a dog (tutorial 102).
    """)
    return


@app.cell
async def _(
    SOUNDS,
    client,
    conversation_to_datum,
    evaluate,
    expect,
    question,
    renderer,
    tinker,
):
    _data = [
        conversation_to_datum(
            [
                *question(animal),
                {"role": "assistant", "content": f"The {animal} is nice. It says {sound}."},
            ],
            renderer,
            None,
        )
        for animal, sound in list(SOUNDS.items())[:3]
    ]
    for _ in range(8):
        _update = client.forward_backward(_data, "cross_entropy")
        _optim = client.optim_step(tinker.AdamParams(learning_rate=2e-3))
        await _update, await _optim
    after, rewards_after = await evaluate()
    expect("good answers after training", after, 0.5, abs=0.1)
    return after, rewards_after


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Better, or luck?

    Eight answers to one question are alike, so 56 answers are not 56 independent trials. The
    intervals below count questions. And both models answered the same questions, so we compare
    question by question. With three of them nobody can tell, although the interval excludes 0: if
    the models were equally good, three differences would have the same sign in one of four cases.
    With fewer than six differences the test never finds a difference; seven are enough here.
    """)
    return


@app.cell
def _(compare_rewards, expect, rewards_after, rewards_before, test):
    for _count in (3, len(test)):
        result = compare_rewards(rewards_before[:_count], rewards_after[:_count])
        print(
            f"{_count} questions: {result.difference:+.0%} "
            f"({result.low:+.0%} to {result.high:+.0%}), {result.verdict}"
        )
        expect("verdict", result.verdict, "better" if _count > 3 else "not distinguishable")
    return


@app.cell
def _(after, before, picture, rewards_after, rewards_before, score_interval):
    figure, axes = picture("", "part of good answers")
    for _place, (_mean, _rewards) in enumerate(((before, rewards_before), (after, rewards_after))):
        _low, _high = score_interval(_rewards)
        axes.errorbar(_place, _mean, [[_mean - _low], [_high - _mean]], fmt="o", capsize=8)
    for _pair in zip(rewards_before, rewards_after, strict=True):
        axes.plot([0, 1], [sum(one) / 8 for one in _pair], color="0.6", linewidth=1, zorder=0)
    axes.set_xticks([0, 1], ["before", "after"])
    axes.set(xlim=(-0.5, 1.5), ylim=(0, 1), title="95% intervals; grey: the seven questions")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    `AnswerAccuracyEvaluator` is the ready-made evaluator for questions with answers. It refuses
    lists that do not fit: a shift by one would otherwise be a model that knows nothing.
    """)
    return


@app.cell
def _(
    AnswerAccuracyEvaluator,
    DataValidationError,
    SOUNDS,
    mistake,
    question,
    renderer,
    test,
):
    with mistake(DataValidationError, "got 6 answers to 7 questions"):
        AnswerAccuracyEvaluator(
            [question(animal) for animal in test],
            {"sound": [SOUNDS[animal] for animal in test[1:]]},
            renderer,
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")`. An evaluation is sampling, so submit all questions at once.
    - **Hosted API**: `connect("tinker")`. A checkpoint is evaluated by its path:
      `service.create_sampling_client(model_path="tinker://…")`.
    - `python -m tinker_cookbook.eval` runs benchmarks such as GSM8K and IFEval, with these
      intervals; `python -m tinker_cookbook.eval.compare a=A b=B` is the paired test of two
      runs. Tasks of Inspect AI: see `docs/inspect.md`.
    """)
    return


if __name__ == "__main__":
    app.run()
