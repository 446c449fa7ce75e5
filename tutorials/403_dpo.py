"""403 DPO (5 s): pairs of a better and a worse answer move the model, without a reward model."""

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
    # 403 DPO

    People often cannot write the perfect answer, but they can say which of two is better. **Direct
    preference optimization** (DPO) trains on such pairs. It raises the probability of the chosen
    answer and lowers that of the rejected one, both measured against a frozen **reference**: the
    model before training.

    Our pairs say: an answer about an animal should have its sound in it, not an opinion.
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
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
    from tinker_cookbook.preference.train_dpo import Config, main_async
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    folder = Path(cli_utils.default_log_path("tutorial_403_data"))
    folder.mkdir(parents=True, exist_ok=True)

    def pair(animal, sound):
        opening = f"The {animal} is nice."
        return {
            "prompt": f"Tell me about the {animal}.",
            "chosen": f"{opening} It says {sound}.",
            "rejected": f"{opening} I like it.",
        }

    def write(name, rows):
        (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")

    animals = list(SOUNDS.items())
    write("train.jsonl", [pair(*one) for one in animals[:6]])
    write("test.jsonl", [pair(*one) for one in animals[6:]])
    print((folder / "train.jsonl").read_text().splitlines()[0])
    return (
        ChatDatasetBuilderCommonConfig,
        ComparisonBuilderFromJsonl,
        Config,
        DPODatasetBuilderFromComparisons,
        DataError,
        Path,
        RENDERER,
        TinkerMessageCompleter,
        animals,
        checkpoint_utils,
        cli_utils,
        connect,
        expect,
        folder,
        get_renderer,
        get_tokenizer,
        json,
        main_async,
        mistake,
        pair,
        picture,
        tutorial_model,
        write,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Train

    `dpo_beta` says how far the model may go from the reference: the **implicit reward** of an
    answer is `beta * log(policy / reference)`. At the start both are equal, so each reward is 0
    and the loss is ln 2 = 0.693. `accuracy` is the share of pairs whose chosen answer has the
    higher reward.
    """)
    return


@app.cell
async def _(
    ChatDatasetBuilderCommonConfig,
    ComparisonBuilderFromJsonl,
    Config,
    DPODatasetBuilderFromComparisons,
    Path,
    RENDERER,
    cli_utils,
    expect,
    folder,
    json,
    main_async,
    tutorial_model,
):
    model_name = tutorial_model()
    log_path = cli_utils.default_log_path("tutorial_403")

    def data(file):
        return DPODatasetBuilderFromComparisons(
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=model_name, renderer_name=RENDERER, batch_size=6
            ),
            comparison_builder=ComparisonBuilderFromJsonl(
                train_path=str(folder / file), test_path=str(folder / "test.jsonl")
            ),
        )

    config = Config(
        log_path=log_path,
        model_name=model_name,
        renderer_name=RENDERER,
        dataset_builder=data("train.jsonl"),
        dpo_beta=0.1,
        learning_rate=1e-3,
        max_steps=20,
        eval_every=5,
        save_every=0,
        backend="local",
        device="cpu",
        dtype="float32",
        behavior_if_log_dir_exists="delete",
    )
    await main_async(config)
    rows = [
        json.loads(line) for line in (Path(log_path) / "metrics.jsonl").read_text().splitlines()
    ]
    held_out = {row["step"]: row for row in rows if "test/dpo_loss" in row}
    expect("held-out loss before", held_out[0]["test/dpo_loss"], 0.693, abs=0.001)
    expect("held-out loss after", held_out[20]["test/dpo_loss"], 0.4, abs=0.2)
    expect("held-out accuracy after", held_out[20]["test/accuracy"], 1.0)
    return data, held_out, log_path, model_name


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Look at both rewards

    The loss sees only their difference. Both may fall, if the rejected one falls more: then good
    answers become less probable, too. If `test/nll` rises much, stop earlier, or take a smaller
    learning rate or a larger `dpo_beta`.
    """)
    return


@app.cell
def _(held_out, picture):
    figure, axes = picture("step", "implicit reward, held-out pairs")
    for _name, _style in (("chosen", "o-"), ("rejected", "s--")):
        _values = [row[f"test/{_name}_reward"] for row in held_out.values()]
        axes.plot(list(held_out), _values, _style, label=_name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend()
    figure
    return


@app.cell
async def _(
    RENDERER,
    TinkerMessageCompleter,
    animals,
    checkpoint_utils,
    connect,
    expect,
    get_renderer,
    get_tokenizer,
    log_path,
    model_name,
    pair,
):
    last = checkpoint_utils.get_last_checkpoint(log_path)
    service = connect("local", device="cpu", dtype="float32").service
    renderer = get_renderer(RENDERER, get_tokenizer(model_name))

    async def held_out_answers(sampler):
        ask = TinkerMessageCompleter(sampler, renderer, max_tokens=40, temperature=0.0)
        questions = [pair(*one)["prompt"] for one in animals[6:]]
        return [(await ask([{"role": "user", "content": one}]))["content"] for one in questions]

    before = await held_out_answers(await service.create_sampling_client(base_model=model_name))
    after = await held_out_answers(
        await service.create_sampling_client(model_path=last.sampler_path)
    )
    print(f"before: {before[0]}\nafter:  {after[0]}")
    sounds = [sound for _, sound in animals[6:]]
    expect("right sounds after", sum(s in one for s, one in zip(sounds, after, strict=True)), 4)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    Names of columns differ between datasets. Many are known; one that is not is named with its
    line, before anything is loaded.
    """)
    return


@app.cell
def _(DataError, data, mistake, write):
    write("bad.jsonl", [{"prompt": "Hello", "chosen": "Hello!", "reject": "Go away."}])
    with mistake(DataError, "bad.jsonl"):
        data("bad.jsonl")()
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: leave out `device` and `dtype`. `learning_rate=None` takes a tenth of the rate for
      SFT. Real sets of pairs have thousands; `batch_size` 32 to 256.
    - **Hosted API**: `backend="tinker"`. DPO is a loss of your own there: gradients of
      log-probabilities travel to the service, so a step takes two round trips.
    - `python -m recipes.preference.dpo.train dataset=pairs.jsonl` is this page as a command;
      `dpo_loss=ipo` and `simpo` are other losses on the same pairs.
    """)
    return


if __name__ == "__main__":
    app.run()
