"""Judges: models that grade answers, and measures of their agreement with known labels."""

from tinker_cookbook.judges.agreement import Agreement, measure_agreement
from tinker_cookbook.judges.judge import (
    YES_NO,
    CarefulJudge,
    ChatApiCompleter,
    ChatLabelJudge,
    Judge,
    Judgement,
    JudgementCache,
    LabelJudge,
    TextJudge,
    read_number,
)
from tinker_cookbook.judges.labels import (
    LabelRenderer,
    label_logprobs,
    mean_logprobs,
    normalised,
)
from tinker_cookbook.judges.settings import JudgeSettings, LazyJudge

__all__ = [
    "YES_NO",
    "Agreement",
    "CarefulJudge",
    "ChatApiCompleter",
    "ChatLabelJudge",
    "Judge",
    "JudgeSettings",
    "Judgement",
    "JudgementCache",
    "LabelJudge",
    "LabelRenderer",
    "LazyJudge",
    "TextJudge",
    "label_logprobs",
    "mean_logprobs",
    "measure_agreement",
    "normalised",
    "read_number",
]
