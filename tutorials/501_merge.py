"""501 Merge to Hugging Face format (3 s): one folder that transformers, vLLM and others load."""

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
    # 501 Merge to Hugging Face format

    Training changes an adapter: small matrices beside the weights. To use the model elsewhere,
    **merge** it: add the adapter to the weights, and write a folder in the format of Hugging Face.
    Any program that loads such a folder loads it; none needs to know of the adapter.

    Whether the result is right is a question of numbers, not of "it loads". So the merge loads
    what it wrote and compares log-probabilities with the engine that trained it. We do it once
    more by hand.
    """)
    return


@app.cell
def _():
    import shutil
    from itertools import chain

    import tinker
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tinker_cookbook import cli_utils, weights
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import COLOURS, RENDERER, tutorial_model

    model_name = tutorial_model()
    folder = cli_utils.default_log_path("tutorial_501")
    shutil.rmtree(folder, ignore_errors=True)
    return (
        AutoModelForCausalLM,
        AutoTokenizer,
        COLOURS,
        ConfigurationError,
        RENDERER,
        TrainOnWhat,
        chain,
        connect,
        conversation_to_datum,
        expect,
        folder,
        get_renderer,
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
    ## Something to merge

    The training of tutorial 102, in short: every answer begins with *Arr!*.
    `save_weights_for_sampler` gives the weights a path.
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
    print(saved.path)
    return renderer, saved, service


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Merge

    `download` gets the adapter from wherever the backend keeps it. `build_hf_model` adds it to the
    base model. `dtype` is that of the written files; `bfloat16`, the default, has half the size of
    `float32`.
    """)
    return


@app.cell
def _(
    AutoModelForCausalLM,
    AutoTokenizer,
    RENDERER,
    expect,
    folder,
    model_name,
    saved,
    weights,
):
    adapter = weights.download(tinker_path=saved.path, output_dir=f"{folder}/adapter")
    merged = f"{folder}/merged"
    weights.build_hf_model(
        base_model=model_name,
        adapter_path=adapter,
        output_path=merged,
        dtype="float32",
        renderer_name=RENDERER,
    )
    model = AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    _question = [{"role": "user", "content": "What colour is snow?"}]
    _inputs = tokenizer.apply_chat_template(
        _question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    _output = model.generate(**_inputs, max_new_tokens=20, do_sample=False)
    _answer = tokenizer.decode(
        _output[0, _inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    expect("answer of transformers", _answer, "Arr! Snow is white.")
    return adapter, merged, model, tokenizer


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Compare

    The same tokens get the same log-probabilities: from the engine with its adapter, and from
    transformers with the merged model. For comparison, the base model: its three points far below
    the line are *Arr!*, which it does not expect.
    """)
    return


@app.cell
async def _(
    AutoModelForCausalLM,
    chain,
    expect,
    model,
    model_name,
    renderer,
    saved,
    service,
    tinker,
    tokenizer,
    torch,
):
    sampler = await service.create_sampling_client(model_path=saved.path)
    texts = [
        renderer.build_generation_prompt(
            [{"role": "user", "content": f"What colour is {thing}?"}]
        ).to_ints()
        + tokenizer.encode(f"Arr! {thing.capitalize()} is {colour}.<|im_end|>")
        for thing, colour in (("snow", "white"), ("coal", "black"), ("blood", "red"))
    ]
    engine = [
        (await sampler.compute_logprobs(tinker.ModelInput.from_ints(one)))[1:] for one in texts
    ]

    def scores(model):
        with torch.no_grad():
            for tokens in map(torch.tensor, texts):
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                yield logprobs.gather(1, tokens[1:, None])[:, 0].tolist()

    by_merged = list(scores(model))
    by_base = list(scores(AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)))
    _pairs = zip(chain(*engine), chain(*by_merged), strict=True)
    _largest = max(abs(mine - its) for mine, its in _pairs)
    expect("largest difference, merged", _largest, 0.0, abs=1e-3)
    return by_base, by_merged, engine


@app.cell
def _(by_base, by_merged, chain, engine, picture):
    figure, axes = picture("log-probability by the engine", "log-probability by transformers")
    for _scores, _marker, _label in (
        (by_base, "s", "base model"),
        (by_merged, "o", "merged model"),
    ):
        axes.scatter([*chain(*engine)], [*chain(*_scores)], marker=_marker, alpha=0.6, label=_label)
    axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    An adapter belongs to one base model. Here it is merged into the merged model, so that it would
    be added twice. The result would load, and answer a little worse. It is refused: the adapter
    knows a digest of the weights that it was trained on.
    """)
    return


@app.cell
def _(ConfigurationError, adapter, folder, merged, mistake, weights):
    with mistake(ConfigurationError, "has other weights"):
        weights.build_hf_model(
            base_model=merged, adapter_path=adapter, output_path=f"{folder}/twice"
        )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `python -m tinker_cookbook.weights merge LOG_PATH out=my-model` merges the newest checkpoint
      of a run. Then `vllm serve my-model`, or `AutoModelForCausalLM.from_pretrained("my-model")`.
    - **Hosted API**: the same; `download` fetches the adapter, and the base model comes from the
      Hugging Face Hub. The merge reads the files in blocks, so it needs little memory, no GPU, and
      disk space for one more copy.
    - With `bfloat16` the weights are rounded; the merge prints by how much that changes
      log-probabilities. `weights gguf` writes files for llama.cpp and Ollama.
    """)
    return


if __name__ == "__main__":
    app.run()
