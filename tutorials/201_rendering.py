"""201 Rendering (2 s): a renderer writes chats in the format of a model, and reads answers."""

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
    # 201 Rendering

    A model reads tokens. A chat has messages. Each family of models was trained with its own way
    to write messages as tokens, its **chat format**. A **renderer** knows one format. It does
    three things:

    1. it writes a prompt, after which the model answers (`build_generation_prompt`);
    2. it reads a sampled answer (`parse_response`);
    3. it writes a training example, with a weight for each token (`build_supervised_example`).
    """)
    return


@app.cell
async def _():
    import tinker

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, tutorial_model

    service = connect("local", device="cpu", dtype="float32").service
    sampler = await service.create_sampling_client(base_model=tutorial_model())
    tokenizer = sampler.get_tokenizer()
    renderer = get_renderer(RENDERER, tokenizer)
    chat = [
        {"role": "system", "content": "Talk like a pirate."},
        {"role": "user", "content": "What does a cow say?"},
        {"role": "assistant", "content": "Arr! A cow says moo."},
        {"role": "user", "content": "What colour is milk?"},
        {"role": "assistant", "content": "Arr! Milk is white."},
    ]
    return (
        ConfigurationError,
        TrainOnWhat,
        chat,
        expect,
        get_renderer,
        mistake,
        picture,
        renderer,
        sampler,
        tinker,
        tokenizer,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Write a prompt

    The format of our model is ChatML, like that of Qwen and SmolLM2. The prompt ends with the
    header of the answer. The model stops with `<|im_end|>`, a token that no text contains.
    """)
    return


@app.cell
def _(chat, expect, renderer, tokenizer):
    prompt = renderer.build_generation_prompt(chat[:2])
    print(tokenizer.decode(prompt.to_ints()))
    stop = renderer.get_stop_sequences()
    expect("stop token", [tokenizer.decode([token]) for token in stop], ["<|im_end|>"])
    expect("tokens of the prompt", prompt.length, 24)
    return prompt, stop


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Read an answer

    `parse_response` returns the message, and how the answer ended. An answer without the stop
    token was cut off, and a reward or an evaluation should know that.
    """)
    return


@app.cell
async def _(expect, prompt, renderer, sampler, stop, tinker):
    _params = tinker.SamplingParams(max_tokens=20, temperature=0.0, stop=stop)
    _tokens = (await sampler.sample(prompt, 1, _params)).sequences[0].tokens
    message, ending = renderer.parse_response(_tokens)
    expect("answer", message["content"], "Arr! A cow says moo.")
    expect("ending", ending.value, "stop_sequence")
    _, _cut_off = renderer.parse_response(_tokens[:4])
    expect("ending of four tokens of it", _cut_off.value, "malformed")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Write a training example

    `TrainOnWhat` selects the messages whose tokens get weight 1. The model learns nothing about
    the others, it only reads them. The default is the last answer. For a chat with several answers
    you usually want all of them.
    """)
    return


@app.cell
def _(TrainOnWhat, chat, expect, renderer):
    choices = [
        TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        TrainOnWhat.ALL_MESSAGES,
        TrainOnWhat.ALL_TOKENS,
    ]
    rows = []
    for _choice in choices:
        _example, _weights = renderer.build_supervised_example(chat, _choice)
        rows.append(_weights.tolist())
        print(f"{_choice.value:24} {int(sum(rows[-1])):3} of {_example.length} tokens")
    expect("tokens of the last answer", int(sum(rows[0])), 11)
    return choices, rows


@app.cell
def _(chat, choices, picture, renderer, rows, tokenizer):
    figure, axes = picture("token", "")
    figure.set_size_inches(10, 4)
    axes.imshow(rows, aspect="auto", cmap="cividis", interpolation="none")
    axes.set_yticks(range(len(choices)), [choice.value for choice in choices])
    _tokens = renderer.build_supervised_example(chat)[0].to_ints()
    axes.set_xticks(
        range(len(_tokens)),
        [tokenizer.decode([token]).replace("\n", "⏎") for token in _tokens],
        rotation=90,
        fontsize=7,
    )
    axes.grid(visible=False)
    axes.set_title("bright: learned, dark: only read")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The wrong format

    Another format gives tokens that the model can read, but has never seen. Nothing fails: the
    model is only worse, and nobody knows why. Here is how probable the right answer is in its own
    format, and in that of `role_colon`, which is for models without a chat format.
    """)
    return


@app.cell
async def _(chat, expect, get_renderer, renderer, sampler, tinker, tokenizer):
    async def probability(renderer):
        prompt = renderer.build_generation_prompt(chat[3:4])
        answer = tokenizer.encode("Milk is white.")
        whole = tinker.ModelInput.from_ints(prompt.to_ints() + answer)
        logprobs = await sampler.compute_logprobs(whole)
        return sum(logprobs[-len(answer) :])

    expect("chatml, log-probability", await probability(renderer), -0.07, abs=0.02)
    expect(
        "role_colon, log-probability",
        await probability(get_renderer("role_colon", tokenizer)),
        -27,
        abs=1,
    )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A format whose special tokens the tokenizer lacks is refused. The error names one that fits.
    `model_info.get_recommended_renderer_names(model_name)` lists those of a model.
    """)
    return


@app.cell
def _(ConfigurationError, get_renderer, mistake, tokenizer):
    with mistake(ConfigurationError, "expected renderer_name=chatml"):
        get_renderer("llama3", tokenizer)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - Rendering happens in your program, so nothing changes: the tokens are the same everywhere.
    - **Hosted API**: a model of the line-up has a renderer of its family, such as `qwen3` or
      `llama3`. Recipes select it if you leave `renderer_name` out.
    - `python -m tinker_cookbook.renderers.show model_name=…` shows a chat in the format of any
      model, with the weight of each token, and compares it with the model's own template.
    - Renderers of vision models take images as parts of the content: see `docs/vision.md`.
    """)
    return


if __name__ == "__main__":
    app.run()
