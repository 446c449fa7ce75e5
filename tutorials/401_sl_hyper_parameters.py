"""401 SL hyper-parameters (10 s): the learning rate is a curve with a wide bottom and a wall."""

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
    # 401 SL hyper-parameters

    Supervised training has few settings that matter: the **learning rate**, the number of steps,
    the batch size. The rate comes first. Its curve looks the same for every model: flat on the
    left, where nothing is learned, a wide bottom, and a wall on the right.

    The task is that of tutorial 102: end every answer with *Woof!*, learned from colours, tested
    on sounds and opposites.
    """)
    return


@app.cell
def _():
    import tinker

    from tinker_cookbook import cli_utils
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.hyperparam_utils import get_lr
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised import train as loop
    from tinker_cookbook.supervised.common import compute_token_nll
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.supervised.types import SupervisedDatasetBuilder
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import COLOURS, RENDERER, SOUNDS, tutorial_model

    model_name = tutorial_model()
    renderer = get_renderer(RENDERER, get_tokenizer(model_name))

    def example(question, answer):
        conversation = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{answer} Woof!"},
        ]
        return conversation_to_datum(
            conversation, renderer, None, TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )

    train = [
        example(f"What colour is {thing}?", f"{thing.capitalize()} is {colour}.")
        for thing, colour in COLOURS.items()
    ]
    held_out = [
        example(f"What does a {a} say?", f"A {a} says {sound}.") for a, sound in SOUNDS.items()
    ]
    return (
        ConfigurationError,
        SupervisedDatasetBuilder,
        cli_utils,
        compute_token_nll,
        connect,
        expect,
        get_lr,
        held_out,
        loop,
        mistake,
        model_name,
        picture,
        tinker,
        train,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The sweep

    Every rate gets a new adapter with the same seed, the same data and the same 12 steps, so that
    nothing else differs. Two ranks of the adapter show that the best rate hardly depends on it.
    """)
    return


@app.cell
async def _(
    compute_token_nll,
    connect,
    expect,
    get_lr,
    held_out,
    model_name,
    tinker,
    train,
):
    service = connect("local", device="cpu", dtype="float32").service
    rates = [3e-4, 3e-3, 1e-2, 3e-2, 1e-1]
    ranks = [4, 32]

    async def final_loss(rate, rank, steps=12):
        client = await service.create_lora_training_client(model_name, rank=rank, seed=0)
        for step in range(steps):
            # The rate falls linearly to 0, as in the loops of this package.
            adam = tinker.AdamParams(learning_rate=rate * (1 - step / steps), beta2=0.95)
            update = client.forward_backward(train, "cross_entropy")
            optim = client.optim_step(adam)
            await update
            await optim
        output = await client.forward(held_out, "cross_entropy")
        return compute_token_nll(
            [record["logprobs"] for record in output.loss_fn_outputs], held_out
        )

    losses = {rank: [await final_loss(rate, rank) for rate in rates] for rank in ranks}
    for _rank in ranks:
        print(f"rank {_rank:2}: " + "  ".join(f"{loss:.2f}" for loss in losses[_rank]))
    _best = rates[losses[32].index(min(losses[32]))]
    expect("loss at 3e-4", losses[32][0], 4.25, rel=0.01)
    expect("best loss", min(losses[32]), 0.17, abs=0.02)
    # Beyond the wall a run amplifies the rounding of a CPU.
    expect("loss at 1e-1", losses[32][-1], 6.2, abs=2)
    expect("best rate", _best, 1e-2)
    expect("recommended rate", get_lr(model_name), 7.3e-3, rel=0.01)
    return losses, ranks, rates


@app.cell
def _(get_lr, losses, model_name, picture, ranks, rates):
    figure, axes = picture("learning rate", "held-out loss after 12 steps (nats per token)")
    for _rank, _style in zip(ranks, ("o-", "s--"), strict=True):
        axes.plot(rates, losses[_rank], _style, label=f"rank {_rank}")
    axes.axvline(get_lr(model_name), color="black", linewidth=0.8, label="get_lr")
    axes.set_xscale("log")
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The others

    - **Steps**: at least 100 for a real task; more passes over few examples overfit (`test/nll`
      rises while `train_mean_nll` falls).
    - **Batch size**: 128 is a good start. The usual rule lets the rate grow with its square
      root; from 8 to 128 examples our models wanted 1 to 2 times the rate, not 4
      (`docs/research.md`, learning rate and batch size).
    - **Rank**: 32 is enough for most tasks. A larger rank holds more, if you have very many
      examples; it does not change the rate.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A lost minus sign is the most expensive typing error. A rate that no model survives is refused.
    """)
    return


@app.cell
def _(
    ConfigurationError,
    SupervisedDatasetBuilder,
    cli_utils,
    loop,
    mistake,
    model_name,
):
    with mistake(ConfigurationError, "learning_rate: got 1000"):
        loop.Config(
            log_path=cli_utils.default_log_path("tutorial_401"),
            model_name=model_name,
            dataset_builder=SupervisedDatasetBuilder(),
            learning_rate=1e3,
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `get_lr("Qwen/Qwen3-8B")` is 4.7e-4, and that of a model of this page's size 7e-3: large
      models want smaller rates. All rates for LoRA are about ten times those for training all
      weights.
    - `python -m tinker_cookbook.sweep recipes.sl_basic learning_rate=1e-4,3e-4,1e-3 log_dir=…`
      does this page for any recipe, with one loaded model, and draws the picture; on the hosted
      API the runs go at once.
    """)
    return


if __name__ == "__main__":
    app.run()
