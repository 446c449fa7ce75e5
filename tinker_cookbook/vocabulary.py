"""Checks that two models have the same token ids, so that one can score samples of the other."""

from __future__ import annotations

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tokenizer_utils import get_tokenizer


def check_same_vocabulary(model_name: str, other_name: str, setting: str) -> None:
    """Raises if the model ``other_name`` (value of ``setting``) has different tokens.

    Every common id must be the same token in both tokenizers, and the other tokenizer must have
    every id of the first: a model with a larger vocabulary may score tokens of a smaller one.

    Raises:
        ConfigurationError: with the first different token, and advice.
    """
    # The usual case, without loading a tokenizer.
    if model_name == other_name:
        return
    own, other = (
        {index: token for token, index in get_tokenizer(name).get_vocab().items()}
        for name in (model_name, other_name)
    )
    wrong = [index for index, token in own.items() if other.get(index) != token]
    if wrong:
        first = min(wrong)
        raise ConfigurationError(
            f"{setting}: got {other_name}, but its vocabulary differs from {model_name}'s in "
            f"{len(wrong)} of {len(own)} tokens (id {first} is {other.get(first)!r} there, not "
            f"{own[first]!r}); expected a model with the same tokenizer, since it scores the "
            "tokens of the other: choose one of the same family"
        )
