"""202 Loss functions (4 s): what each loss does with an answer whose probability has changed."""

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
    # 202 Loss functions

    Data for reinforcement learning is always a little old: while you train on an answer, the
    weights move away from those that sampled it. With p the probability of a token now, and q its
    probability when it was sampled, the **ratio** p / q says how far. The losses differ in what
    they do with it:

    | loss | of a token with advantage A, to be minimised | when the ratio is far from 1 |
    |---|---|---|
    | `importance_sampling` | -ratio · A | pushes as much as the ratio says |
    | `ppo` | -min(ratio · A, clipped ratio · A) | stops pushing, if it would go further away |
    | `cispo` | -(clipped ratio) · A · log p | goes on pushing, but never more than the clip |
    | `cross_entropy` | -weight · log p | has no q: it imitates |

    This page writes them down in a line each, and checks that the engine computes the same.
    """)
    return


@app.cell
async def _():
    import tinker
    import torch

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.exceptions import TinkerCookbookError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    service = connect("local", device="cpu", dtype="float32").service
    client = await service.create_lora_training_client(tutorial_model(), rank=16, seed=0)
    renderer = get_renderer(RENDERER, client.get_tokenizer())

    def importance_sampling(p, q, advantage):
        return -(p - q).exp() * advantage

    def ppo(p, q, advantage):
        ratio = (p - q).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

    def cispo(p, q, advantage):
        # The ratio is a constant here: the gradient goes through log p alone.
        return -(p - q).exp().detach().clamp(0, 4) * advantage * p

    losses = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo}
    return (
        SOUNDS,
        TinkerCookbookError,
        client,
        expect,
        losses,
        mistake,
        picture,
        renderer,
        tinker,
        torch,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Old data

    Eight answers about each animal, as in tutorial 104. An answer with the right sound has
    advantage 1, any other -1. Four updates on the same answers make the data old.
    """)
    return


@app.cell
async def _(SOUNDS, client, expect, renderer, tinker, torch):
    sampler = await client.save_weights_and_get_sampling_client()
    requests = []
    for _seed, _animal in enumerate(SOUNDS):
        _prompt = renderer.build_generation_prompt(
            [{"role": "user", "content": f"Tell me about the {_animal}."}]
        )
        _params = tinker.SamplingParams(
            max_tokens=40, temperature=1.0, stop=renderer.get_stop_sequences(), seed=_seed
        )
        _request = sampler.sample(_prompt, 8, _params)
        requests.append((_prompt.to_ints(), f"It says {SOUNDS[_animal]}.", _request))
    data = []
    for _prompt, _good, _request in requests:
        for _sequence in (await _request).sequences:
            _tokens, _masked = _prompt + list(_sequence.tokens), len(_prompt) - 1
            _text = renderer.parse_response(_sequence.tokens)[0]["content"]
            _advantage = 1.0 if _good in _text else -1.0
            data.append(
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(_tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": _tokens[1:],
                        "logprobs": [0.0] * _masked + list(_sequence.logprobs),
                        "advantages": [0.0] * _masked + [_advantage] * len(_sequence.tokens),
                    },
                )
            )
    for _ in range(4):
        _update = client.forward_backward(data, "importance_sampling")
        _optim = client.optim_step(tinker.AdamParams(learning_rate=3e-3))
        await _update, await _optim

    def fields(datum):
        return [
            torch.tensor(datum.loss_fn_inputs[name].tolist()) for name in ("logprobs", "advantages")
        ]

    _now = await client.forward(data, "importance_sampling")
    ratios = []
    for _datum, _scored in zip(data, _now.loss_fn_outputs, strict=True):
        _q, _advantage = fields(_datum)
        _p = torch.tensor(_scored["logprobs"].tolist())
        ratios += (_p - _q).exp()[_advantage != 0].tolist()
    _far = sum(not 0.8 <= ratio <= 1.2 for ratio in ratios) / len(ratios)
    expect("tokens with a ratio outside 0.8 to 1.2", _far, 0.34, abs=0.05)
    return data, fields, ratios


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The engine computes the same

    `forward` gives the sum of a loss over all tokens. `forward_backward_custom` takes a function
    of yours, which gets the log-probabilities as tensors of torch; its gradient goes to the
    weights.
    """)
    return


@app.cell
async def _(client, data, expect, fields, losses, torch):
    def own(loss):
        def total(data, logprobs):
            parts = [loss(p, *fields(datum)) for p, datum in zip(logprobs, data, strict=True)]
            return torch.stack([part.sum() for part in parts]).sum(), {}

        return total

    for _name, _loss in losses.items():
        _built_in = (await client.forward(data, _name)).metrics["loss:sum"]
        _own = (await client.forward_backward_custom(data, own(_loss))).metrics["loss:sum"]
        expect(f"{_name}, built in and own", _built_in, _own, rel=1e-3)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The push

    The gradient says how strongly a loss pushes the log-probability of a token up or down. The
    grey bars are the ratios of our old data.
    """)
    return


@app.cell
def _(losses, picture, ratios, torch):
    figure, axes = picture("ratio p / q", "push on log p", columns=2)
    for _axes, _advantage in zip(axes, (1.0, -1.0), strict=True):
        for (_name, _loss), _style in zip(losses.items(), ("-", "--", ":"), strict=True):
            _p = torch.linspace(0.05, 6, 300).log().requires_grad_()
            _loss(_p, torch.zeros(300), _advantage).sum().backward()
            _axes.plot(_p.exp().detach(), -_p.grad, _style, linewidth=2, label=_name)
        _weights = [4 / len(ratios)] * len(ratios)
        _axes.hist(ratios, 60, (0, 6), weights=_weights, color="0.8", zorder=0)
        _axes.set_title("a good answer (A = 1)" if _advantage > 0 else "a bad answer (A = -1)")
    axes[0].legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    Settings of a loss go into `loss_fn_config`. A name that the loss does not have is refused;
    else you would train with the default and believe that you did not.
    """)
    return


@app.cell
async def _(TinkerCookbookError, client, data, mistake):
    with mistake(TinkerCookbookError, "clip_high_threshold"):
        await client.forward(data, "ppo", {"clip_high": 1.1})
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")`. Your own loss costs a second forward pass.
    - **Hosted API**: `connect("tinker")`. The built-in losses run there. `forward_backward_custom`
      sends the log-probabilities to you and the gradient back, so a step takes two calls.
    - Start with `importance_sampling` and fresh data. Take `ppo` or `cispo` for several updates on
      the same samples, or for samples of older weights.
    """)
    return


if __name__ == "__main__":
    app.run()
