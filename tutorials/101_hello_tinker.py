"""101 Hello Tinker (3 s): sample from a model, and ask how probable a text is."""

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
    # 101 Hello Tinker

    A program here talks to a **service**, which holds the model and computes. You get a service
    from `connect`. It may be this machine (`local`), the hosted Tinker API (`tinker`) or a server
    of yours. All of them have the same methods.

    This page does the two things that everything else is built from: it **samples** an answer, and
    it asks for the **log-probability** of a text.
    """)
    return


@app.cell
def _():
    import tinker

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import DataValidationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, tutorial_model

    # A folder in this package: 0.2 million parameters that can talk about a few things.
    model_name = tutorial_model()
    # float32 on the CPU: the numbers are those of the text, up to rounding.
    service = connect("local", device="cpu", dtype="float32").service
    return (
        DataValidationError,
        RENDERER,
        expect,
        get_renderer,
        mistake,
        model_name,
        picture,
        service,
        tinker,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Sample

    A **sampling client** is one version of a model that you can sample from. It takes tokens, not
    text. A **renderer** knows the chat format of the model and makes tokens of messages.

    At temperature 0 the model always gives its most probable answer: *Grass is green.*
    """)
    return


@app.cell
async def _(RENDERER, expect, get_renderer, model_name, service, tinker):
    sampler = await service.create_sampling_client(base_model=model_name)
    tokenizer = sampler.get_tokenizer()
    renderer = get_renderer(RENDERER, tokenizer)

    def ask(question):
        return renderer.build_generation_prompt([{"role": "user", "content": question}])

    greedy = tinker.SamplingParams(
        max_tokens=20, temperature=0.0, stop=renderer.get_stop_sequences()
    )
    response = await sampler.sample(ask("What colour is grass?"), 1, greedy)
    answer = response.sequences[0]
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        print(f"{token:4} {tokenizer.decode([token])!r:14} log-probability {logprob:.3f}")
    message, _ = renderer.parse_response(answer.tokens)
    expect("answer", message["content"], "Grass is green.")
    expect("stop reason", answer.stop_reason, "stop")
    return ask, greedy, renderer, sampler, tokenizer


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Score

    `compute_logprobs` samples nothing. It returns the log-probability of each token of a text that
    you give. The sum over the answer says how probable the whole answer is.

    The model has seen many sums, half of them with a wrong answer. So it gives the right answer to
    *What is 3 + 4?* a quarter of the probability, and its neighbours the rest. Tutorial 104
    teaches it to add.
    """)
    return


@app.cell
async def _(ask, expect, renderer, sampler, tinker, tokenizer):
    import math

    prompt = ask("What is 3 + 4?").to_ints()
    numbers = list(range(19))
    answers = [tokenizer.encode(str(n)) + renderer.get_stop_sequences() for n in numbers]
    # All requests go out before the first result is awaited, so that one batch computes them.
    requests = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt + tokens)) for tokens in answers
    ]
    scores = [
        sum((await request)[-len(tokens) :])
        for request, tokens in zip(requests, answers, strict=True)
    ]
    probabilities = [math.exp(score) for score in scores]
    expect("probability of 7", probabilities[7], 0.246, abs=0.01)
    expect("probability of 0 to 18 together", sum(probabilities), 0.997, abs=0.01)
    return numbers, probabilities


@app.cell
def _(numbers, picture, probabilities):
    figure, axes = picture("answer to 3 + 4", "probability")
    bars = axes.bar(numbers, probabilities)
    bars[7].set(color="#D55E00", label="the right one")
    axes.set_xticks(numbers)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    Prompt and answer must fit into the context of the model, which has 1024 tokens. A request that
    does not fit is refused before anything is computed.
    """)
    return


@app.cell
async def _(DataValidationError, ask, greedy, mistake, sampler):
    with mistake(DataValidationError, "the model's context is 1024"):
        await sampler.sample(ask("What colour is grass? " * 300), 1, greedy)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")` takes the GPU by itself, and computes in bfloat16. The numbers
      then differ in the third digit.
    - **Hosted API**: set `TINKER_API_KEY`, and write `connect("tinker")`. `base_model` is a name of
      the line-up, such as `Qwen/Qwen3-8B`, and the renderer that of its family. The
      code stays as it is. Answers and numbers are those of the other model, and its context is
      longer than 1024 tokens, so the mistake needs a longer question.
    - **Any model of the Hugging Face Hub**, or a folder of one: give its name as `base_model`, such
      as `HuggingFaceTB/SmolLM2-135M-Instruct` with the renderer `smollm2`.
    """)
    return


if __name__ == "__main__":
    app.run()
