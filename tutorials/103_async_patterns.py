"""103 Async patterns (2 s): submit all requests, then wait; a service computes them together."""

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
    # 103 Async patterns

    Every method of a client returns a **future** at once, and the service starts to work. `await`
    gives the result. So the order in which you submit and wait decides how long a program takes: a
    service that gets one request at a time computes one at a time.

    This page asks 30 questions twice: each after the answer to the one before, and all at once.
    """)
    return


@app.cell
async def _():
    import asyncio
    import time

    import tinker

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    service = connect("local", device="cpu", dtype="float32").service
    sampler = await service.create_sampling_client(base_model=tutorial_model())
    renderer = get_renderer(RENDERER, sampler.get_tokenizer())
    params = tinker.SamplingParams(
        max_tokens=30, temperature=0.0, stop=renderer.get_stop_sequences()
    )
    prompts = [
        renderer.build_generation_prompt([{"role": "user", "content": f"{start} {animal}{end}"}])
        for animal in SOUNDS
        for start, end in (
            ("What does a", " say?"),
            ("Tell me about the", "."),
            ("What is the sound of a", "?"),
        )
    ]
    # The first request loads the model; we do not want to measure that.
    await sampler.sample(prompts[0], 1, params)
    expect("questions", len(prompts), 30)
    return (
        asyncio,
        expect,
        mistake,
        params,
        picture,
        prompts,
        renderer,
        sampler,
        time,
        tinker,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## One after the other

    The program waits for each answer before it asks the next question. We keep when each request
    began and ended.
    """)
    return


@app.cell
async def _(params, prompts, sampler, time):
    async def timed(prompt, start):
        begin = time.perf_counter() - start
        response = await sampler.sample(prompt, 1, params)
        return begin, time.perf_counter() - start, response.sequences[0].tokens

    _start = time.perf_counter()
    one_by_one = [await timed(prompt, _start) for prompt in prompts]
    seconds_one_by_one = time.perf_counter() - _start
    print(f"{seconds_one_by_one:.2f} s")
    return one_by_one, seconds_one_by_one, timed


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## All at once

    `asyncio.gather` starts all of them. The engine puts them into one batch: each pass through the
    model makes a token for every question. The answers are the same, in a fifth of the time or
    less.
    """)
    return


@app.cell
async def _(
    asyncio,
    expect,
    one_by_one,
    prompts,
    seconds_one_by_one,
    time,
    timed,
):
    _start = time.perf_counter()
    together = await asyncio.gather(*(timed(prompt, _start) for prompt in prompts))
    seconds_together = time.perf_counter() - _start
    print(f"{seconds_together:.2f} s")
    expect("same answers", [a[2] for a in together] == [a[2] for a in one_by_one], True)
    expect("more than twice as fast", seconds_one_by_one / seconds_together > 2, True)
    return (together,)


@app.cell
def _(one_by_one, picture, prompts, seconds_one_by_one, together):
    figure, axes = picture("seconds", "question", columns=2)
    for _axes, _requests, _title in zip(
        axes, (one_by_one, together), ("one after the other", "all at once"), strict=True
    ):
        _axes.barh(
            range(len(prompts)),
            [end - begin for begin, end, _ in _requests],
            left=[begin for begin, _, _ in _requests],
        )
        _axes.set(title=_title, xlim=(0, seconds_one_by_one))
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Several answers to one question

    `num_samples` asks for several answers in one request. The prompt is then read only once. With
    a seed, a request gives the same answers every time, whatever else the service computes.
    """)
    return


@app.cell
async def _(asyncio, expect, prompts, renderer, sampler, tinker):
    seeded = tinker.SamplingParams(
        max_tokens=30, temperature=1.0, stop=renderer.get_stop_sequences(), seed=1
    )
    _first, _again = await asyncio.gather(
        sampler.sample(prompts[1], 4, seeded), sampler.sample(prompts[1], 4, seeded)
    )
    for _sequence in _first.sequences:
        print(renderer.parse_response(_sequence.tokens)[0]["content"])
    expect(
        "same seed, same answers",
        [s.tokens for s in _first.sequences] == [s.tokens for s in _again.sequences],
        True,
    )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Order

    Operations of one training client run in the order in which they were submitted. So an update
    is submitted in one go, and the `forward` after it sees the new weights:

    ```python
    update = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(rate)
    looked = client.forward(held_out, "cross_entropy")
    await update, await step, await looked
    ```

    ## A mistake

    A future is not its result. Who forgets `await` sees this:
    """)
    return


@app.cell
def _(mistake, params, prompts, sampler):
    with mistake(AttributeError, "sequences"):
        sampler.sample(prompts[0], 1, params).sequences
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")`. A GPU that makes one token for one question is almost idle, so
      the difference between the two pictures is larger.
    - **Hosted API**: `connect("tinker")`. The service works in cycles of about ten seconds. An
      `optim_step` that is submitted after the result of its `forward_backward` waits for a later
      cycle: the step takes three cycles instead of one.
    - In a script without an event loop, `.result()` on a future does what `await` does.
    """)
    return


if __name__ == "__main__":
    app.run()
