"""404 Sequence extension (2 s): prompts that extend the last one save most tokens of an episode."""

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
    # 404 Sequence extension

    An episode of many turns sends many prompts, each with the whole conversation. If a prompt
    **begins with the previous prompt and its answer, token by token**, it extends it: the loop
    joins the turns into one sequence and trains every token once. If anything in the history has
    changed, a new sequence begins, and the old tokens are trained on again. So T turns cost O(T)
    or O(T²) tokens.

    Chat formats for reasoning models often change history: they delete the thinking of earlier
    answers. We count what this costs. There is no model on this page, only tokens.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## An episode of T turns

    A `MessageEnv` speaks messages; `EnvFromMessageEnv` renders and parses them. `next_messages` is
    always the whole conversation.
    """)
    return


@app.cell
def _():
    from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
    from tinker_cookbook.exceptions import ConfigurationError
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
    from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
    from tinker_cookbook.rl.rollouts import do_group_rollout
    from tinker_cookbook.tokenizer_utils import get_tokenizer
    from tinker_cookbook.tutorials import expect, mistake, picture
    from tinker_cookbook.tutorials.model import tutorial_model

    class NextQuestion(MessageEnv):
        def __init__(self, turns):
            self.left = turns
            self.messages: list = [{"role": "user", "content": "What colour is grass?"}]

        async def initial_observation(self):
            return self.messages

        async def step(self, message):
            self.left -= 1
            question = {"role": "user", "content": "And why?"}
            self.messages = [*self.messages, message, question]
            return MessageStepResult(
                reward=0.0, episode_done=self.left == 0, next_messages=self.messages
            )

    return (
        ConfigurationError,
        EnvFromMessageEnv,
        NextQuestion,
        ProblemGroupBuilder,
        TokenCompleter,
        TokensWithLogprobs,
        do_group_rollout,
        expect,
        get_renderer,
        get_tokenizer,
        mistake,
        picture,
        trajectory_to_data,
        tutorial_model,
    )


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A policy that always thinks the same

    It stands for a model: 100 words of thinking, then three words. A policy is any object that
    returns tokens with their log-probabilities.
    """)
    return


@app.cell
def _(
    EnvFromMessageEnv,
    NextQuestion,
    ProblemGroupBuilder,
    TokenCompleter,
    TokensWithLogprobs,
    do_group_rollout,
    get_renderer,
    get_tokenizer,
    trajectory_to_data,
    tutorial_model,
):
    tokenizer = get_tokenizer(tutorial_model())
    thought = "<think>\n" + "I like it. " * 33 + "\n</think>\n\nGrass is green.<|im_end|>"
    tokens = tokenizer.encode(thought)

    class AlwaysTheSame(TokenCompleter):
        async def __call__(self, model_input, stop):
            return TokensWithLogprobs(tokens, [-1.0] * len(tokens))

    async def trained_tokens(renderer_name, turns):
        renderer = get_renderer(renderer_name, tokenizer)
        group = ProblemGroupBuilder(lambda: EnvFromMessageEnv(renderer, NextQuestion(turns)), 1)
        trajectory = (await do_group_rollout(group, AlwaysTheSame())).trajectories_G[0]
        data = trajectory_to_data(trajectory, 1.0)
        return len(data), sum(datum.model_input.length for datum in data)

    return tokenizer, trained_tokens


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Count

    `qwen3` deletes earlier thinking, as its model was trained. After a question mark, a renderer
    takes options: one keeps the thinking, and one deletes it only after every eighth answer
    (**periodic compaction**).
    """)
    return


@app.cell
async def _(expect, trained_tokens):
    formats = {
        "qwen3": "thinking is deleted each turn",
        "qwen3?compact_thinking_every=8": "deleted after every 8 answers",
        "qwen3?strip_thinking_from_history=false": "kept",
    }
    turns = [1, 2, 4, 8, 16, 24, 32]
    counted = {name: [await trained_tokens(name, n) for n in turns] for name in formats}
    for _name in formats:
        _sequences, _tokens = counted[_name][-1]
        print(f"32 turns: {_sequences:3} sequences, {_tokens:6,} tokens  {_name}")
    expect("sequences, deleted each turn", counted["qwen3"][-1][0], 32)
    expect("sequences, compaction", counted["qwen3?compact_thinking_every=8"][-1][0], 4)
    expect("sequences, kept", counted["qwen3?strip_thinking_from_history=false"][-1][0], 1)
    return counted, formats, turns


@app.cell
def _(counted, formats, picture, turns):
    figure, axes = picture("turns of the episode", "tokens to train on")
    for _name, _style in zip(formats, ("o-", "s--", "D:"), strict=True):
        axes.plot(turns, [n for _, n in counted[_name]], _style, label=formats[_name])
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Keeping the thinking is cheapest to train, but its prompts grow, and a context is finite.
    Compaction is between: prompts stay short, and few sequences begin. What the model saw in
    training, it must also see later, so choose one renderer for both.

    A clock in the system prompt, a list of tools in another order, or a summary of the history
    breaks the extension too. `env/all/turns_per_episode` and `optim/frac_one_datum` of a run show
    it: the share of episodes that are one sequence.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## A mistake

    A format without thinking has nothing to delete, so the option is refused.
    """)
    return


@app.cell
def _(ConfigurationError, get_renderer, mistake, tokenizer):
    with mistake(ConfigurationError, "compact_thinking_every"):
        get_renderer("chatml?compact_thinking_every=8", tokenizer)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## On a GPU and on the hosted API

    - Counts are the same everywhere; what they cost differs. `local` also computes a prefix that
      several sequences share only once, so there the price of O(T²) is lower. The hosted API bills
      each token.
    - Sampling has the same rule: a prompt that extends the last one needs only its new tokens
      (`tokens/prefill_cached`).
    - The option goes into the name: `renderer_name="qwen3?strip_thinking_from_history=false"` in a
      config, and in every later command on the model.
    """)
    return


if __name__ == "__main__":
    app.run()
