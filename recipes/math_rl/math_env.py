r"""Word problems and competition problems, answered in words and graded by their result.

Where the result stands in the answer, and how a model is asked to put it there:

======  ==============================================================  ==========================
env     the result                                                      well formed
======  ==============================================================  ==========================
MATH    what the last ``\boxed{…}`` holds                               there is a ``\boxed{…}``
GSM8K   the number after the last ``####``; without one the number in   there is a ``####`` with a
        the last ``\boxed{…}``; without one the last number             number
======  ==============================================================  ==========================

GSM8K is lenient in what counts, so that a model which can add but does not know the manner has
something to learn from; the format reward (``format_coef``) teaches the manner.
"""

from __future__ import annotations

from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.grading import (
    DEFAULT_TIMEOUT_SECONDS,
    extract_boxed,
    extract_gsm8k_answer,
    grade_math,
)
from tinker_cookbook.rl.problem_env import ProblemEnv

__all__ = [
    "GSM8K_FEWSHOT",
    "MATH_FEWSHOT",
    "Gsm8kEnv",
    "MathEnv",
    "extract_boxed",
    "extract_gsm8k_final_answer",
]

_BOXED = r"Write your final answer in \boxed{}."
_HASHES = "Write your final answer, a number without units, on a last line that begins with ####."

MATH_FEWSHOT: tuple[Message, ...] = (
    {
        "role": "user",
        "content": f"A square has a diagonal of length 6. What is its area? {_BOXED}",
    },
    {
        "role": "assistant",
        "content": "The diagonal of a square with side $s$ is $s\\sqrt{2}$, so $s\\sqrt{2} = 6$ "
        "and $s^2 = 36 / 2 = 18$. The area is \\boxed{18}.",
    },
)
GSM8K_FEWSHOT: tuple[Message, ...] = (
    {
        "role": "user",
        "content": "A tray holds 12 seedlings. Mara fills 5 trays and gives 8 seedlings away. How "
        f"many does she have left? {_HASHES}",
    },
    {
        "role": "assistant",
        "content": "Mara fills 5 trays with 12 seedlings each: 5 * 12 = 60.\nShe gives 8 away: "
        "60 - 8 = 52.\n#### 52",
    },
)


class MathEnv(ProblemEnv):
    r"""One problem whose answer goes into ``\boxed{}``, graded by mathematical equality."""

    def __init__(
        self,
        problem: str,
        answer: str,
        renderer: Renderer,
        convo_prefix: list[Message] | None = None,
        format_coef: float = 0.1,
        grading_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(renderer, convo_prefix, format_coef=format_coef)
        self.problem, self.answer = problem, answer
        self.grading_timeout_seconds = grading_timeout_seconds

    @classmethod
    def question_suffix(cls) -> str:
        """What is asked of the answer's form."""
        return _BOXED

    def get_question(self) -> str:
        """The problem, and where to put the answer."""
        return f"{self.problem} {self.question_suffix()}"

    async def check_answer(self, sample_str: str) -> bool:
        """Whether what is boxed equals the reference; in a process with a timeout."""
        given = extract_boxed(sample_str)
        return given is not None and await grade_math(
            given, self.answer, timeout_seconds=self.grading_timeout_seconds
        )

    def check_format(self, sample_str: str) -> bool:
        """Whether anything is boxed."""
        return bool(extract_boxed(sample_str))

    def get_reference_answer(self) -> str:
        """The answer that counts as right."""
        return self.answer


class Gsm8kEnv(MathEnv):
    """One word problem whose answer is a number after ``####``."""

    @classmethod
    def question_suffix(cls) -> str:
        """What is asked of the answer's form."""
        return _HASHES

    async def check_answer(self, sample_str: str) -> bool:
        """Whether the number found equals the reference."""
        given = extract_gsm8k_answer(sample_str)
        return given is not None and await grade_math(
            given, self.answer, timeout_seconds=self.grading_timeout_seconds
        )

    def check_format(self, sample_str: str) -> bool:
        """Whether there is a number behind ``####``."""
        return "####" in sample_str and extract_gsm8k_answer(sample_str) is not None


def extract_gsm8k_final_answer(text: str) -> str:
    """The number after the last ``####`` of a GSM8K solution.

    Raises:
        ValueError: There is none.
    """
    number = extract_gsm8k_answer(text) if "####" in text else None
    if number is None:
        raise ValueError(f"solution: got {text[-80:]!r}, expected one that ends in '#### NUMBER'")
    return number
