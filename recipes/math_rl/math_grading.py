"""The functions of ``tinker_cookbook.eval.math_grading``, under the official module path."""

from tinker_cookbook.eval.math_grading import (
    extract_boxed,
    grade_answer,
    grade_answer_math_verify,
    normalize_answer,
    run_with_timeout_signal,
    split_tuple,
)

__all__ = [
    "extract_boxed",
    "grade_answer",
    "grade_answer_math_verify",
    "normalize_answer",
    "run_with_timeout_signal",
    "split_tuple",
]
