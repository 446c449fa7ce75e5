"""502 PEFT adapter (3 s): a file of the changes only, which PEFT and vLLM add to the base model."""

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
    # 502 PEFT adapter

    You need not merge (tutorial 501). The adapter alone is small, and one copy of the base model
    serves any number of adapters. `build_lora_adapter` writes it in the format of **PEFT**, which
    transformers, vLLM and the Hugging Face Hub understand.

    An adapter has two matrices A and B for each layer that it changes: the layer computes with `W
    + scale * B @ A`. B begins at 0, so an adapter that has learned nothing changes nothing.
    """)
    return


@app.cell
def _():
    import json
    import shutil
    from pathlib import Path

    import tinker
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tinker_cookbook import cli_utils, weights
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import WeightsError
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import COLOURS, RENDERER, tutorial_model

    model_name = tutorial_model()
    folder = Path(cli_utils.default_log_path("tutorial_502"))
    shutil.rmtree(folder, ignore_errors=True)
    return (
        AutoModelForCausalLM,
        COLOURS,
        PeftModel,
        RENDERER,
        TrainOnWhat,
        WeightsError,
        connect,
        conversation_to_datum,
        expect,
        folder,
        get_renderer,
        json,
        load_file,
        mistake,
        model_name,
        picture,
        tinker,
        torch,
        weights,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Something to export

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
    get_renderer,
    model_name,
    tinker,
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
    return client, renderer, saved


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Export, and load with PEFT

    The files are compared with the engine before you get them (`proof.json`). Here PEFT adds the
    adapter to the base model, and the answer has the habit. Switched off, the same object is the
    base model again.
    """)
    return


@app.cell
def _(
    AutoModelForCausalLM,
    PeftModel,
    RENDERER,
    client,
    expect,
    folder,
    json,
    model_name,
    renderer,
    saved,
    torch,
    weights,
):
    raw = weights.download(tinker_path=saved.path, output_dir=str(folder / "raw"))
    adapter = folder / "adapter"
    weights.build_lora_adapter(
        base_model=model_name, adapter_path=raw, output_path=str(adapter), renderer_name=RENDERER
    )
    base = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter))
    tokenizer = client.get_tokenizer()

    def answer(model, question):
        prompt = renderer.build_generation_prompt([{"role": "user", "content": question}]).to_ints()
        output = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=20, do_sample=False
        )
        return tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)

    expect("with the adapter", answer(model, "What colour is snow?"), "Arr! Snow is white.")
    with model.disable_adapter():
        expect("without it", answer(model, "What colour is snow?"), "Snow is white.")
    _comparisons = json.loads((adapter / "proof.json").read_text())["comparisons"]
    for _one in _comparisons:
        print(f"{_one['reader']}: largest difference {_one['largest']:.1e} nats")
        expect("agrees with the engine", _one["largest"] < 1e-3, True)
    return adapter, base


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Where did the model change?

    The size of `B @ A` says how much training moved a layer. The picture has one bar for each kind
    of matrix, a mean over the three layers of the model.
    """)
    return


@app.cell
def _(adapter, base, expect, load_file):
    tensors = load_file(adapter / "adapter_model.safetensors")
    changes = {}
    for _name, _b in tensors.items():
        if "lora_B" in _name:
            _kind = _name.split(".")[-3]
            _a = tensors[_name.replace("lora_B", "lora_A")]
            changes.setdefault(_kind, []).append(float((_b @ _a).norm()))
    print(f"{sum(one.numel() for one in tensors.values()):,} numbers in the adapter")
    print(f"{sum(one.numel() for one in base.parameters()):,} numbers in the model")
    expect("kinds of matrices", len(changes), 8)
    return (changes,)


@app.cell
def _(changes, picture):
    figure, axes = picture("matrix", "norm of the change B @ A")
    axes.bar(list(changes), [sum(norms) / len(norms) for norms in changes.values()])
    axes.tick_params(axis="x", rotation=20)
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A `tinker://` path names weights that a backend keeps. It is no folder; `download` makes one of
    it.
    """)
    return


@app.cell
def _(WeightsError, folder, mistake, model_name, saved, weights):
    with mistake(WeightsError, "weights.download"):
        weights.build_lora_adapter(
            base_model=model_name, adapter_path=saved.path, output_path=str(folder / "wrong")
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `python -m tinker_cookbook.weights export LOG_PATH out=my-adapter` does both steps for the
      newest checkpoint of a run.
    - `vllm serve BASE --enable-lora --lora-modules pirate=my-adapter` serves it. Some readers
      support no adapter on the output layer (`lm_head`): train with `train_unembed=False` for
      them, or merge.
    - **Hosted API**: the same calls. The service keeps adapters only; the base model comes from
      the Hugging Face Hub.
    """)
    return


if __name__ == "__main__":
    app.run()
