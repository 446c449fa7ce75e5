"""503 Publish (3 s): a card with facts, and an upload of only what was compared."""

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
    # 503 Publish

    People who download your model cannot see whether the export is right, what it was trained on,
    and how to talk to it. A **model card** tells them, and `publish_to_hf_hub` uploads folder and
    card to the Hugging Face Hub.

    There is no network on this page. So it does all but the last call.
    """)
    return


@app.cell
def _():
    import json
    import shutil
    from pathlib import Path

    import tinker

    from tinker_cookbook import cli_utils, weights
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import WeightsError
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import COLOURS, RENDERER, tutorial_model

    model_name = tutorial_model()
    folder = Path(cli_utils.default_log_path("tutorial_503"))
    shutil.rmtree(folder, ignore_errors=True)
    return (
        COLOURS,
        RENDERER,
        TrainOnWhat,
        WeightsError,
        connect,
        conversation_to_datum,
        expect,
        folder,
        get_renderer,
        json,
        mistake,
        model_name,
        picture,
        tinker,
        weights,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Something to publish

    The training of tutorial 102, in short: every answer begins with *Arr!*.
    """)
    return


@app.cell
async def _(
    COLOURS,
    RENDERER,
    TrainOnWhat,
    connect,
    conversation_to_datum,
    folder,
    get_renderer,
    model_name,
    tinker,
    weights,
):
    service = connect("local", device="cpu", dtype="float32").service
    client = await service.create_lora_training_client(model_name, rank=16, seed=0)
    renderer = get_renderer(RENDERER, client.get_tokenizer())

    def example(thing, colour):
        conversation = [
            {"role": "user", "content": f"What colour is {thing}?"},
            {"role": "assistant", "content": f"Arr! {thing.capitalize()} is {colour}."},
        ]
        return conversation_to_datum(
            conversation, renderer, None, TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )

    data = [example(*one) for one in COLOURS.items()]
    for _step in range(12):
        _update = client.forward_backward(data, "cross_entropy")
        _optim = client.optim_step(tinker.AdamParams(learning_rate=3e-3, beta2=0.95))
        await _update
        await _optim
    saved = await client.save_weights_for_sampler("pirate")
    adapter = weights.download(tinker_path=saved.path, output_dir=str(folder / "adapter"))
    return (adapter,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Which precision?

    The merged model (tutorial 501) can be written in three precisions. Each export is loaded and
    compared with the engine, and `proof.json` keeps the difference. 16 bits halve the download;
    `float16` has more digits than `bfloat16`, but overflows in some large models.
    """)
    return


@app.cell
def _(RENDERER, adapter, expect, folder, json, model_name, weights):
    differences = {}
    for _dtype in ("float32", "float16", "bfloat16"):
        weights.build_hf_model(
            base_model=model_name,
            adapter_path=adapter,
            output_path=str(folder / _dtype),
            dtype=_dtype,
            renderer_name=RENDERER,
        )
        _proof = json.loads((folder / _dtype / "proof.json").read_text())
        differences[_dtype] = max(one["mean"] for one in _proof["comparisons"])
        _size = (folder / _dtype / "model.safetensors").stat().st_size
        print(f"{_dtype:8} {_size / 1000:4.0f} kB  mean difference {differences[_dtype]:.1e} nats")
    expect("float32 agrees", differences["float32"] < 1e-5, True)
    expect(
        "float16 agrees better than bfloat16",
        differences["float16"] < differences["bfloat16"],
        True,
    )
    return (differences,)


@app.cell
def _(differences, picture):
    figure, axes = picture("precision of the files", "mean difference from the engine (nats)")
    axes.bar(list(differences), list(differences.values()))
    axes.set_yscale("log")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The card

    It takes its facts from the files. What only you know are data, licence and language. Say what
    the model is bad at, in a section of your own.
    """)
    return


@app.cell
def _(expect, folder, model_name, weights):
    config = weights.ModelCardConfig(base_model=model_name, license="apache-2.0", language=["en"])
    card = weights.generate_model_card(
        config=config,
        repo_id="me/pirate",
        model_path=str(folder / "float16"),
        sections=[("Limits", "It knows sixteen colours, and says Arr!")],
    )
    print(str(card)[:1500])
    expect("licence", card.data.license, "apache-2.0")
    expect("has the section", "## Limits" in str(card), True)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Upload

    ```python
    weights.publish_to_hf_hub(
        model_path=str(folder / "float16"), repo_id="me/pirate", model_card=config, private=True
    )
    ```

    It needs a token with the right to write (`HF_TOKEN`, or `hf auth login`), creates the
    repository and returns its address. `private=True` is the default; look at the page before you
    open it to others.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    Someone changes a file after the comparison. What would be uploaded is not what was compared,
    so it is refused, before the network is used.
    """)
    return


@app.cell
def _(WeightsError, folder, mistake, weights):
    _settings = folder / "float16" / "generation_config.json"
    _settings.write_text('{"temperature": 3.0}')
    with mistake(WeightsError, "generation_config.json"):
        weights.publish_to_hf_hub(model_path=str(folder / "float16"), repo_id="me/pirate")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `python -m tinker_cookbook.weights merge LOG_PATH out=my-model`, then `… card my-model` and
      `… publish my-model repo_id=me/my-model`, do the same in a terminal. They take the renderer
      from the run.
    - **Hosted API**: `download` fetches the adapter of a run there. The service can also share a
      checkpoint without an export:
      `service.create_rest_client().publish_checkpoint_from_tinker_path(path)`.
    - An adapter (tutorial 502) is published the same way; its card names the base model, so the
      Hub shows it there.
    """)
    return


if __name__ == "__main__":
    app.run()
