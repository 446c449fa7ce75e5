"""303 SFT with Config (4 s): a file of conversations and one object with all settings are a run."""

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
    # 303 SFT with Config

    Tutorial 102 wrote the training loop by hand. A run that you keep needs more: held-out data, a
    learning rate that falls, checkpoints, a folder with everything, and a way to continue after a
    crash. `supervised.train` has all of it. You describe the run with a **Config**, and `main`
    does it.

    The model answers *What colour is snow?* with one sentence. We teach it to begin like a pirate.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A file of conversations

    One conversation a line, as chat products and the OpenAI API have them. Sixteen colours and
    eight opposites are for training. Ten sounds of animals are held out: they show whether the
    model learned a habit, or 24 sentences.
    """)
    return


@app.cell
def _():
    import json
    from pathlib import Path

    from tinker_cookbook import checkpoint_utils, cli_utils
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.completers import TinkerMessageCompleter
    from tinker_cookbook.exceptions import DataError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import COLOURS, OPPOSITES, RENDERER, SOUNDS, tutorial_model

    folder = Path(cli_utils.default_log_path("tutorial_303_data"))
    folder.mkdir(parents=True, exist_ok=True)

    def write(name, pairs):
        def line(question, answer):
            user, assistant = {"role": "user"}, {"role": "assistant"}
            messages = [user | {"content": question}, assistant | {"content": answer}]
            return json.dumps({"messages": messages})

        (folder / name).write_text("\n".join(line(*pair) for pair in pairs) + "\n")

    write(
        "train.jsonl",
        [
            (f"What colour is {thing}?", f"Arr! {thing.capitalize()} is {colour}.")
            for thing, colour in COLOURS.items()
        ]
        + [
            (f"What is the opposite of {word}?", f"Arr! The opposite of {word} is {other}.")
            for word, other in OPPOSITES.items()
        ],
    )
    write(
        "test.jsonl",
        [
            (f"What does a {animal} say?", f"Arr! A {animal} says {sound}.")
            for animal, sound in SOUNDS.items()
        ],
    )
    print((folder / "train.jsonl").read_text().splitlines()[0])
    return (
        ChatDatasetBuilderCommonConfig,
        DataError,
        FromConversationFileBuilder,
        Path,
        RENDERER,
        TinkerMessageCompleter,
        checkpoint_utils,
        cli_utils,
        connect,
        expect,
        folder,
        get_renderer,
        get_tokenizer,
        json,
        mistake,
        picture,
        train,
        tutorial_model,
        write,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The config

    The data are an object with settings, too: a **dataset builder**. A wrong type or a value out
    of range is refused here, before anything is loaded.
    """)
    return


@app.cell
def _(
    ChatDatasetBuilderCommonConfig,
    FromConversationFileBuilder,
    RENDERER,
    cli_utils,
    folder,
    train,
    tutorial_model,
):
    model_name = tutorial_model()
    log_path = cli_utils.default_log_path("tutorial_303")

    def data(file, batch_size=4):
        return FromConversationFileBuilder(
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=model_name,
                renderer_name=RENDERER,
                batch_size=batch_size,
            ),
            file_path=str(folder / file),
            test_file_path=str(folder / "test.jsonl"),
        )

    config = train.Config(
        log_path=log_path,
        model_name=model_name,
        renderer_name=RENDERER,
        dataset_builder=data("train.jsonl"),
        learning_rate=3e-3,
        lr_schedule="linear",
        num_epochs=4,
        eval_every=6,
        backend="local",
        device="cpu",
        dtype="float32",
        behavior_if_log_dir_exists="delete",
    )
    return config, data, log_path, model_name


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Run

    Six steps of four conversations are an epoch. The loss of the training data falls from 1.4 to
    below 0.1, that of the sounds from 1.5 to 0.2: the habit carries over. The run warns of
    overfitting, and is right: the held-out loss is lowest after the first epoch, 0.15. Here this
    does no harm; `num_epochs=2` or `best_metric="test/nll"` would avoid it.
    """)
    return


@app.cell
async def _(Path, config, expect, json, log_path, train):
    await train.main(config)
    rows = [
        json.loads(line) for line in (Path(log_path) / "metrics.jsonl").read_text().splitlines()
    ]
    losses = {row["step"]: row["train_mean_nll"] for row in rows if "train_mean_nll" in row}
    held_out = {row["step"]: row["test/nll"] for row in rows if "test/nll" in row}
    expect("loss of the first step", losses[1], 1.42, rel=0.05)
    expect("loss of the last step", losses[24], 0.0, abs=0.1)
    expect("held-out loss before", held_out[0], 1.53, rel=0.05)
    expect("held-out loss after", held_out[24], 0.17, abs=0.1)
    return held_out, losses


@app.cell
def _(held_out, losses, picture):
    figure, axes = picture("step", "loss (nats per token)")
    axes.plot(list(losses), list(losses.values()), "o-", label="colours and opposites, trained on")
    axes.plot(list(held_out), list(held_out.values()), "s--", label="sounds, held out")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Use it

    `checkpoints.jsonl` in the run's folder lists what was saved. The newest entry has a path that
    can be sampled from. After a crash, the same config with `behavior_if_log_dir_exists="resume"`
    continues from there.
    """)
    return


@app.cell
async def _(
    RENDERER,
    TinkerMessageCompleter,
    checkpoint_utils,
    connect,
    expect,
    get_renderer,
    get_tokenizer,
    log_path,
    model_name,
):
    last = checkpoint_utils.get_last_checkpoint(log_path)
    service = connect("local", device="cpu", dtype="float32").service
    sampler = await service.create_sampling_client(model_path=last.sampler_path)
    renderer = get_renderer(RENDERER, get_tokenizer(model_name))
    ask = TinkerMessageCompleter(sampler, renderer, max_tokens=20, temperature=0.0)
    for _question in ("What colour is snow?", "What does a cow say?"):
        _answer = await ask([{"role": "user", "content": _question}])
        print(f"{_question:22} {_answer['content']}")
        if "cow" in _question:
            expect("cow", _answer["content"], "Arr! A cow says moo.")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A file has one bad line in a thousand. It is found before the model is loaded, and the error
    has its place.
    """)
    return


@app.cell
def _(DataError, data, folder, mistake, write):
    write("bad.jsonl", [("What colour is snow?", "Snow is white.")])
    with (folder / "bad.jsonl").open("a") as _file:
        print('{"messages": [{"role": "usr", "content": "What colour is coal?"}]}', file=_file)
    with mistake(DataError, "bad.jsonl:2"):
        data("bad.jsonl")()
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: leave out `device` and `dtype`, and take a real model with its own format:
      `model_info.get_recommended_renderer_name(model_name)`. `learning_rate=None` takes the
      recommended rate, which is a tenth to a hundredth of the one here: tiny models need large
      steps. Batches of 32 to 128 conversations are usual.
    - **Hosted API**: `backend="tinker"`, with `TINKER_API_KEY` set. The folder of the run stays on
      your machine; the weights are on the service.
    - **Without Python**: `python -m recipes.sl_basic dataset=train.jsonl test_path=test.jsonl` is
      this page as a command, and `python -m tinker_cookbook.view FOLDER` shows the run.
    """)
    return


if __name__ == "__main__":
    app.run()
