"""406 Prompt distillation (5 s): behave as with a prompt, without the prompt."""

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
    # 406 Prompt distillation

    A long system prompt makes a model do what you want, and every request pays for its tokens.
    **Prompt distillation** moves it into the weights: the model with the prompt is the
    **teacher**, and its answers are the training data of the **student**, which sees only the
    questions. No person writes an answer, and no answer is graded.

    Our prompt is short: *Talk like a pirate.* Real ones have thousands of tokens.
    """)
    return


@app.cell
def _():
    import json
    from pathlib import Path

    from tinker_cookbook import checkpoint_utils, cli_utils
    from tinker_cookbook.backends.connect import connect
    from tinker_cookbook.completers import TinkerMessageCompleter
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import (
        COLOURS,
        OPPOSITES,
        PIRATE,
        RENDERER,
        SOUNDS,
        tutorial_model,
    )

    model_name = tutorial_model()
    renderer = get_renderer(RENDERER, get_tokenizer(model_name))
    service = connect("local", device="cpu", dtype="float32").service
    prompt = [{"role": "system", "content": PIRATE}]
    questions = {
        "colours (trained on)": [f"What colour is {thing}?" for thing in COLOURS],
        "opposites (trained on)": [f"What is the opposite of {word}?" for word in OPPOSITES],
        "sounds (held out)": [f"What does a {animal} say?" for animal in SOUNDS],
    }

    async def answers(sampler, kind, prefix=()):
        ask = TinkerMessageCompleter(sampler, renderer, max_tokens=30, temperature=0.0)
        return [
            (await ask([*prefix, {"role": "user", "content": question}]))["content"]
            for question in questions[kind]
        ]

    return (
        ChatDatasetBuilderCommonConfig,
        ConfigurationError,
        FromConversationFileBuilder,
        Path,
        RENDERER,
        answers,
        checkpoint_utils,
        cli_utils,
        expect,
        json,
        mistake,
        model_name,
        picture,
        prompt,
        questions,
        service,
        train,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The teacher answers

    With its prompt, the base model is the teacher. What we keep is the question and the answer,
    **without** the prompt.
    """)
    return


@app.cell
async def _(
    Path,
    answers,
    cli_utils,
    expect,
    json,
    model_name,
    prompt,
    questions,
    service,
):
    base = await service.create_sampling_client(base_model=model_name)
    teacher = {kind: await answers(base, kind, prompt) for kind in questions}
    before = {kind: await answers(base, kind) for kind in questions}
    print(f"teacher: {teacher['sounds (held out)'][0]}\nstudent: {before['sounds (held out)'][0]}")
    expect("teacher", teacher["sounds (held out)"][0], "Arr! A cow says moo.")

    folder = Path(cli_utils.default_log_path("tutorial_406_data"))
    folder.mkdir(parents=True, exist_ok=True)

    def line(question, answer):
        user, assistant = {"role": "user"}, {"role": "assistant"}
        messages = [user | {"content": question}, assistant | {"content": answer}]
        return json.dumps({"messages": messages})

    def write(kinds):
        lines = [
            line(*one) for kind in kinds for one in zip(questions[kind], teacher[kind], strict=True)
        ]
        (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")

    write(list(questions)[:2])
    return before, folder, teacher, write


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The student imitates

    This is the supervised run of tutorial 303.
    """)
    return


@app.cell
async def _(
    ChatDatasetBuilderCommonConfig,
    FromConversationFileBuilder,
    RENDERER,
    answers,
    before,
    checkpoint_utils,
    cli_utils,
    expect,
    folder,
    model_name,
    questions,
    service,
    teacher,
    train,
):
    log_path = cli_utils.default_log_path("tutorial_406")

    def config(**changes):
        return train.Config(
            log_path=log_path,
            model_name=model_name,
            renderer_name=RENDERER,
            dataset_builder=FromConversationFileBuilder(
                common_config=ChatDatasetBuilderCommonConfig(
                    model_name_for_tokenizer=model_name, renderer_name=RENDERER, batch_size=8
                ),
                file_path=str(folder / "answers.jsonl"),
            ),
            learning_rate=5e-3,
            num_epochs=5,
            backend="local",
            device="cpu",
            dtype="float32",
            **changes,
        )

    await train.main(config(behavior_if_log_dir_exists="delete"))
    last = checkpoint_utils.get_last_checkpoint(log_path)
    student = await service.create_sampling_client(model_path=last.sampler_path)
    after = {kind: await answers(student, kind) for kind in questions}
    print(f"student: {after['sounds (held out)'][0]}")

    def agreement(given, kind):
        pairs = zip(given[kind], teacher[kind], strict=True)
        return sum(mine == its for mine, its in pairs) / len(teacher[kind])

    expect("agreement on held-out questions, before", agreement(before, "sounds (held out)"), 0.0)
    expect(
        "agreement on held-out questions, after",
        agreement(after, "sounds (held out)"),
        0.9,
        abs=0.2,
    )
    return after, agreement, config


@app.cell
def _(after, agreement, before, picture, questions):
    figure, axes = picture("", "share of answers equal to the teacher's")
    for _offset, _given, _label in ((-0.2, before, "before"), (0.2, after, "after")):
        _places = [place + _offset for place in range(len(questions))]
        _bars = axes.bar(
            _places, [agreement(_given, kind) for kind in questions], 0.4, label=_label
        )
        axes.bar_label(_bars, fmt="{:.0%}")
    axes.set_xticks(range(len(questions)), list(questions))
    axes.set_ylim(0, 1.15)
    axes.legend(loc="center left")
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    You let the teacher answer more questions, write them into the same file, and continue the run.
    But a run that changes its data in the middle is neither the old one nor the new one, so this
    is refused.
    """)
    return


@app.cell
async def _(ConfigurationError, config, mistake, questions, train, write):
    write(list(questions))
    with mistake(ConfigurationError, "24 rows → 34 rows"):
        await train.main(config(behavior_if_log_dir_exists="resume"))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - `python -m recipes.prompt_distillation.create_data` and `….train` are this page as commands,
      for prompts and questions in files. The teacher may be a larger model (`teacher_model=`).
    - **GPU**: leave out `device` and `dtype`, and send all questions at once (tutorial 103).
      **Hosted API**: `backend="tinker"`, and `connect("tinker")` for the answers.
    - Answers of the teacher cover only what the teacher says. If the student must learn from its
      own mistakes, use `recipes.distillation.on_policy_distillation`, where the teacher grades
      each token of the student.
    """)
    return


if __name__ == "__main__":
    app.run()
