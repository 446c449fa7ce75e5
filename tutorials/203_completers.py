"""203 Completers and judges (2 s): a policy behind one small interface, and a model that grades."""

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
    # 203 Completers and LLM-as-judge

    A sampling client has many options. Environments, evaluations and judges need less: *give me
    the next message*. That is a **completer**. Because it is so small, anything can stand behind
    it: a checkpoint, another model, a rule, a person.

    - `MessageCompleter`: messages in, a message out.
    - `TokenCompleter`: tokens in, tokens with their log-probabilities out. Training needs those.
    """)
    return


@app.cell
async def _():
    import asyncio

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.completers import (
        MessageCompleter,
        TinkerMessageCompleter,
        TinkerTokenCompleter,
    )
    from tinker_cookbook.exceptions import EvalGradingError
    from tinker_cookbook.judges.judge import LabelJudge, TextJudge, read_number
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import (
        COLOURS,
        PIRATE,
        RENDERER,
        judge_prompt,
        tutorial_model,
    )

    service = connect("local", device="cpu", dtype="float32").service
    sampler = await service.create_sampling_client(base_model=tutorial_model())
    renderer = get_renderer(RENDERER, sampler.get_tokenizer())

    def user(text):
        return [{"role": "user", "content": text}]

    return (
        COLOURS,
        EvalGradingError,
        LabelJudge,
        MessageCompleter,
        PIRATE,
        TextJudge,
        TinkerMessageCompleter,
        TinkerTokenCompleter,
        asyncio,
        expect,
        judge_prompt,
        mistake,
        picture,
        read_number,
        renderer,
        sampler,
        user,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The same question, two levels

    The completer of messages renders, samples and parses. The one of tokens leaves that to you,
    and tells how probable each token was.
    """)
    return


@app.cell
async def _(
    TinkerMessageCompleter,
    TinkerTokenCompleter,
    expect,
    renderer,
    sampler,
    user,
):
    model = TinkerMessageCompleter(sampler, renderer, max_tokens=20, temperature=0.0)
    message = await model(user("What colour is snow?"))
    expect("message", message["content"], "Snow is white.")

    policy = TinkerTokenCompleter(sampler, max_tokens=20, temperature=0.0)
    sampled = await policy(
        renderer.build_generation_prompt(user("What colour is snow?")),
        renderer.get_stop_sequences(),
    )
    print(sampled.tokens, [round(logprob, 3) for logprob in sampled.logprobs])
    expect("log-probability of the answer", sum(sampled.logprobs), -0.073, abs=0.02)
    return (model,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Completers of your own

    A completer may wrap another one: `Pirate` gives the same model a system prompt. Or it is a
    rule: `Cheat` says one word. Wherever a loop or an evaluation takes a completer, it can take
    these.
    """)
    return


@app.cell
async def _(COLOURS, MessageCompleter, PIRATE, asyncio, model, user):
    class Pirate(MessageCompleter):
        async def __call__(self, messages):
            return await model([{"role": "system", "content": PIRATE}, *messages])

    class Cheat(MessageCompleter):
        async def __call__(self, messages):
            return {"role": "assistant", "content": "Arr!"}

    async def answers_of(completer):
        questions = (user(f"What colour is {thing}?") for thing in COLOURS)
        messages = await asyncio.gather(*(completer(question) for question in questions))
        return [message["content"] for message in messages]

    completers = {"the model": model, "as a pirate": Pirate(), "a cheat": Cheat()}
    answers = {name: await answers_of(completer) for name, completer in completers.items()}
    for _name, _answers in answers.items():
        print(f"{_name:12} {_answers[1]}")
    return (answers,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A model as a judge

    Some things cannot be compared with an answer that somebody wrote down: is it polite, is it
    helpful, does it talk like a pirate? A model can judge them. The cheapest judge is asked for
    *Yes* or *No*, and samples nothing: the score is the probability of *Yes*. Here the judge is
    the same small model.

    It tells the two styles apart. It also gives the cheat a full score: it was asked for the style
    alone. A policy that is trained on a judge finds such a gap within an hour.
    """)
    return


@app.cell
async def _(
    LabelJudge,
    answers,
    asyncio,
    expect,
    judge_prompt,
    renderer,
    sampler,
    user,
):
    judge = LabelJudge(sampler, renderer)
    scores = {}
    for _name, _answers in answers.items():
        _judged = await asyncio.gather(
            *(judge(user(judge_prompt(answer)), lambda text: 0.0) for answer in _answers)
        )
        scores[_name] = [one.score for one in _judged]
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    expect("mean score of the model", means["the model"], 0.0, abs=0.01)
    expect("mean score as a pirate", means["as a pirate"], 1.0, abs=0.01)
    expect("mean score of the cheat", means["a cheat"], 1.0, abs=0.01)
    return (scores,)


@app.cell
def _(COLOURS, picture, scores):
    figure, axes = picture("", "judge: probability of Yes")
    for (_name, _scores), _marker in zip(scores.items(), ("o", "s", "kx"), strict=True):
        axes.plot(range(16), _scores, _marker, label=_name, markersize=9)
    axes.set_xticks(range(16), list(COLOURS), rotation=60, ha="right")
    axes.set_ylim(-0.05, 1.05)
    axes.legend(loc="center right")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A judge may also write a text with a score in it. If there is none, an average with 0 or with a
    guess would look like a result. So the judge raises an error, and loops drop such an answer and
    count it.
    """)
    return


@app.cell
async def _(
    EvalGradingError,
    TextJudge,
    judge_prompt,
    mistake,
    model,
    read_number,
    user,
):
    text_judge = TextJudge(model)
    with mistake(EvalGradingError, "No"):
        await text_judge(
            user(judge_prompt("Snow is white.")),
            read_number(r"score: (\d+)", 0, 10),
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")`. Use a judge of some billion parameters; the policy may be
      smaller.
    - **Hosted API**: `connect("tinker")`. The judge is another `create_sampling_client` of the
      same service. `JudgeSettings(url=…)` takes any server with OpenAI's API instead.
    - Before you train on a judge, measure how often it agrees with people: `judges.agreement`.
    - A judge as a reward: `python -m recipes.rubric`, and `recipes.preference` for pairs.
    """)
    return


if __name__ == "__main__":
    app.run()
