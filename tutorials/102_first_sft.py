"""102 First SFT (3 s): teach a habit by examples, and test it on other questions."""

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
    # 102 First SFT

    **Supervised fine-tuning** (SFT) shows a model what it should answer. Each step computes how
    improbable the model finds the answers (the **loss**), and moves the weights so that the loss
    falls.

    The model knows some animals, colours and opposites. We teach it to end every answer with *I
    like it.* The examples are about colours only. Questions about animals and opposites tell us
    whether it learned the habit, or sixteen sentences.
    """)
    return


@app.cell
async def _():
    import tinker

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised.common import compute_token_nll
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import (
        COLOURS,
        OPPOSITES,
        RENDERER,
        SOUNDS,
        tutorial_model,
    )

    service = connect("local", device="cpu", dtype="float32").service
    # A training client has an adapter (LoRA) of its own: small matrices beside the model's weights,
    # which stay as they are. The seed is that of the adapter's first values.
    client = await service.create_lora_training_client(tutorial_model(), rank=16, seed=0)
    tokenizer = client.get_tokenizer()
    renderer = get_renderer(RENDERER, tokenizer)
    return (
        COLOURS,
        OPPOSITES,
        SOUNDS,
        TrainOnWhat,
        client,
        compute_token_nll,
        conversation_to_datum,
        expect,
        mistake,
        picture,
        renderer,
        tinker,
        tokenizer,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Data

    A renderer turns a conversation into tokens. A **datum** has the tokens that the model reads,
    the token that should come next at each position, and a **weight** for each: 0 for the
    question, 1 for the answer. Only tokens with a weight are learned.
    """)
    return


@app.cell
def _(
    COLOURS,
    OPPOSITES,
    SOUNDS,
    TrainOnWhat,
    conversation_to_datum,
    expect,
    renderer,
    tokenizer,
):
    def example(question, answer):
        conversation = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        return conversation_to_datum(
            conversation, renderer, None, TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )

    train = [
        example(f"What colour is {thing}?", f"{thing.capitalize()} is {colour}. I like it.")
        for thing, colour in COLOURS.items()
    ]
    held_out = [
        *(
            example(f"What does a {a} say?", f"A {a} says {sound}. I like it.")
            for a, sound in SOUNDS.items()
        ),
        *(
            example(f"What is the opposite of {a}?", f"The opposite of {a} is {b}. I like it.")
            for a, b in OPPOSITES.items()
        ),
    ]
    _targets = train[0].loss_fn_inputs["target_tokens"].tolist()
    for _target, _weight in zip(_targets, train[0].loss_fn_inputs["weights"].tolist(), strict=True):
        print("learned" if _weight else "   -   ", repr(tokenizer.decode([_target])))
    expect("examples", (len(train), len(held_out)), (16, 18))
    return held_out, train


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Train

    `forward_backward` computes loss and gradient, `optim_step` moves the weights. Both are
    submitted before the first is awaited, so that the service never waits for us. The loss here is
    the mean over the learned tokens, in nats: 0 would be certainty.

    It falls from 1.1 to 0.06 on the examples, and to 0.08 on the other questions.
    """)
    return


@app.cell
async def _(client, compute_token_nll, expect, held_out, tinker, train):
    rate = tinker.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8)

    def loss_of(output, data):
        return compute_token_nll([record["logprobs"] for record in output.loss_fn_outputs], data)

    steps, losses, held_out_losses = 12, [], []
    for _step in range(steps):
        _update = client.forward_backward(train, "cross_entropy")
        _optim = client.optim_step(rate)
        # `forward` only looks: no gradient. It comes after the update that was submitted before it.
        _looked = client.forward(held_out, "cross_entropy")
        losses.append(loss_of(await _update, train))
        await _optim
        held_out_losses.append(loss_of(await _looked, held_out))
    expect("first loss", losses[0], 1.1, rel=0.02)
    expect("last loss", losses[-1], 0.06, abs=0.03)
    expect("last loss of other questions", held_out_losses[-1], 0.08, abs=0.04)
    return held_out_losses, losses, steps


@app.cell
def _(held_out_losses, losses, picture, steps):
    figure, axes = picture("step", "loss (nats per token)")
    axes.plot(range(1, steps + 1), losses, "o-", label="the 16 examples")
    axes.plot(range(1, steps + 1), held_out_losses, "s--", label="18 other questions")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Ask

    Sampling needs a snapshot of the weights. The model learned the habit, and not the sentences:
    the answers to all other questions end with it too, and they are still right.
    """)
    return


@app.cell
async def _(OPPOSITES, SOUNDS, client, expect, renderer, tinker):
    sampler = await client.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(
        max_tokens=20, temperature=0.0, stop=renderer.get_stop_sequences()
    )
    _questions = [f"What does a {animal} say?" for animal in SOUNDS]
    _questions += [f"What is the opposite of {word}?" for word in OPPOSITES]
    _prompts = [
        renderer.build_generation_prompt([{"role": "user", "content": question}])
        for question in _questions
    ]
    _requests = [sampler.sample(prompt, 1, params) for prompt in _prompts]
    answers = []
    for _question, _request in zip(_questions, _requests, strict=True):
        _message, _ = renderer.parse_response((await _request).sequences[0].tokens)
        answers.append(_message["content"])
        print(f"{_question:32} {answers[-1]}")
    expect("answers with the habit", sum(one.endswith("I like it.") for one in answers), 18, abs=1)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    The target of a position is the token that comes *next*, so inputs and targets are shifted by
    one. `conversation_to_datum` does it. Who builds datums by hand may forget to drop the last
    input:
    """)
    return


@app.cell
async def _(client, mistake, tinker, tokenizer):
    _tokens = tokenizer.encode("Grass is green.")
    unshifted = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(_tokens),
        loss_fn_inputs={"target_tokens": _tokens[1:], "weights": [1.0] * (len(_tokens) - 1)},
    )
    with mistake(Exception, "target_tokens"):
        await client.forward_backward([unshifted], "cross_entropy")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")`. For a model of a billion parameters use `rank=32` and a learning
      rate of about 3e-4; `hyperparam_utils.get_lr(model_name)` gives it. The rate here suits a
      model that is ten thousand times smaller.
    - **Hosted API**: `connect("tinker")`, with a model of the line-up and its renderer. The loop
      is the same. A call takes some seconds there, so submitting before waiting matters more.
    - `python -m recipes.sl_basic` is this loop with files, evaluations, checkpoints and a report.
    """)
    return


if __name__ == "__main__":
    app.run()
