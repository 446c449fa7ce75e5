"""104 First RL (7 s): sample answers, grade them, make the better ones more probable."""

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
    # 104 First RL

    Supervised fine-tuning needs answers to imitate. **Reinforcement learning** (RL) needs only a
    **reward**: a number that says how good an answer of the model is. The model answers each
    question several times. Answers that are better than the others of their group become more
    probable, and the rest less. That is GRPO, in fifty lines.

    Asked to tell about an animal, the model says a few sentences. One in five answers has the
    sound of the animal exactly once. We want it always: such an answer is worth 1, any other 0.
    """)
    return


@app.cell
async def _():
    import tinker

    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.renderers import ensure_text, get_renderer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import RENDERER, SOUNDS, tutorial_model

    service = connect("local", device="cpu", dtype="float32").service
    client = await service.create_lora_training_client(tutorial_model(), rank=16, seed=0)
    renderer = get_renderer(RENDERER, client.get_tokenizer())

    def prompt_of(animal):
        return renderer.build_generation_prompt(
            [{"role": "user", "content": f"Tell me about the {animal}."}]
        )

    def reward_of(tokens, animal):
        text = ensure_text(renderer.parse_response(tokens)[0]["content"])
        about, sound = f"The {animal} is nice.", f"It says {SOUNDS[animal]}."
        return float(text.startswith(about) and text.count("says") == 1 and sound in text)

    return (
        SOUNDS,
        client,
        expect,
        mistake,
        picture,
        prompt_of,
        renderer,
        reward_of,
        tinker,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Sample

    Eight answers to each of ten questions, with the newest weights. The temperature is 1: the loss
    below compares with probabilities at this temperature. A seed makes the run repeatable.
    """)
    return


@app.cell
def _(SOUNDS, client, prompt_of, renderer, tinker):
    async def sample_groups(step):
        sampler = await client.save_weights_and_get_sampling_client()
        requests = {
            animal: sampler.sample(
                prompt_of(animal),
                8,
                tinker.SamplingParams(
                    max_tokens=40,
                    temperature=1.0,
                    stop=renderer.get_stop_sequences(),
                    seed=1000 * step + place,
                ),
            )
            for place, animal in enumerate(SOUNDS)
        }
        return {animal: (await request).sequences for animal, request in requests.items()}

    return (sample_groups,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Compare

    The **advantage** of an answer is its reward minus the mean of its group. So a hard question
    and an easy one count the same, and a group in which all answers are right, or all wrong,
    teaches nothing.

    The datum of an answer has for each position the next token, the probability with which it was
    sampled, and the advantage. Positions of the question have advantage 0.
    """)
    return


@app.cell
def _(prompt_of, reward_of, tinker):
    def datum_of(prompt, sequence, advantage):
        tokens = prompt.to_ints() + list(sequence.tokens)
        question = prompt.length - 1  # positions whose next token belongs to the question
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [0.0] * question + list(sequence.logprobs),
                "advantages": [0.0] * question + [advantage] * len(sequence.tokens),
            },
        )

    def learn_from(groups):
        data, rewards = [], []
        for animal, sequences in groups.items():
            group = [reward_of(sequence.tokens, animal) for sequence in sequences]
            mean = sum(group) / len(group)
            rewards += group
            data += [
                datum_of(prompt_of(animal), sequence, reward - mean)
                for sequence, reward in zip(sequences, group, strict=True)
                if reward != mean
            ]
        return data, sum(rewards) / len(rewards)

    return (learn_from,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Train

    One in five answers is good in the first step, and four of five at the end.
    """)
    return


@app.cell
async def _(client, expect, learn_from, renderer, sample_groups, tinker):
    rate = tinker.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    rewards = []
    for _step in range(18):
        groups = await sample_groups(_step)
        _data, _reward = learn_from(groups)
        rewards.append(_reward)
        if _data:
            _update = client.forward_backward(_data, "importance_sampling")
            _optim = client.optim_step(rate)
            await _update, await _optim
        if _step in (0, 17):
            print(f"step {_step}: {_reward:.0%} good, {len(_data)} answers to learn from")
            for _sequence in groups["cow"][:3]:
                print("   ", renderer.parse_response(_sequence.tokens)[0]["content"])
    expect("good answers in the first step", rewards[0], 0.175, abs=0.02)
    expect("good answers in the last three steps", sum(rewards[-3:]) / 3, 0.8, abs=0.15)
    return (rewards,)


@app.cell
def _(picture, rewards):
    figure, axes = picture("step", "part of good answers")
    axes.plot(range(len(rewards)), rewards, "o-")
    axes.set(ylim=(0, 1.02), xticks=range(0, len(rewards), 3))
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The reward is what you get

    Remove `text.count("says") == 1` from `reward_of` and run the page again. The reward rises
    faster, and the answers become *It says moo. It says moo. It says moo.*: the reward did not
    forbid it.

    ## A mistake

    The loss needs the probability with which each token was sampled (`logprobs`): training may be
    some steps ahead of sampling, and the loss corrects for the difference. Without it nothing is
    computed.
    """)
    return


@app.cell
async def _(client, mistake, prompt_of, tinker):
    _tokens = prompt_of("cow").to_ints()
    _incomplete = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(_tokens[:-1]),
        loss_fn_inputs={"target_tokens": _tokens[1:], "advantages": [1.0] * (len(_tokens) - 1)},
    )
    with mistake(Exception, "logprobs"):
        await client.forward_backward([_incomplete], "importance_sampling")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - **GPU**: `connect("local")`, a model that can solve the task sometimes, `max_tokens` for its
      reasoning, and a learning rate of about 1e-4. A reward that is never 1 teaches nothing.
    - **Hosted API**: `connect("tinker")`. Submit the samples of all groups before the first result
      is awaited, as here, and a step takes some cycles of the service rather than one for each
      group.
    - `python -m recipes.rl_basic` is this loop with environments, evaluations, checkpoints, a
      report of every answer, and the reason when a run does not learn.
    """)
    return


if __name__ == "__main__":
    app.run()
