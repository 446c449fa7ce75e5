"""Whether two models read the same token ids: what one samples, the other can score then."""

from __future__ import annotations

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tokenizer_utils import get_tokenizer


def check_same_vocabulary(model_name: str, other_name: str, setting: str) -> None:
    """Refuses ``other_name``, the value of ``setting``, where its tokens mean something else.

    Every id that both tokenizers know must stand for the same token, and the other one must know
    every id of the first: a model whose vocabulary is larger may score a smaller one's tokens.

    Raises:
        ConfigurationError: names the first token that differs, and what to do.
    """
    # Without loading a tokenizer, since this is the usual case.
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
            f"{setting}: got {other_name}, whose vocabulary differs from that of {model_name} in "
            f"{len(wrong)} of {len(own)} tokens (id {first} is {other.get(first)!r} there, not "
            f"{own[first]!r}); expected a model with the same tokenizer, since it scores the "
            "tokens of the other: choose one of the same family"
        )
