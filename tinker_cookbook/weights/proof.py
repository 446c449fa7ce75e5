"""Compares the log-probabilities of an export with the engine's, on eight prompts, and on one with
an image if the model takes images.

An exporter reloads its output with the program that users will run (PEFT, transformers, vLLM,
llama.cpp), which computes the log-probabilities of the same tokens. The engine computes the
reference in float32.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import AutoConfig

from tinker_cookbook.engine.checkpoints.format import BASE_DIGEST
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.loading import model_class
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.vision.images import is_image
from tinker_cookbook.engine.vision.probe import Probe, probe_of, whole_probe
from tinker_cookbook.engine.vision.tower import has_vision
from tinker_cookbook.exceptions import WeightsAdapterError, WeightsError
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.terminal import get_console
from tinker_cookbook.weights._source import Checkpoint

PROOF = "proof.json"
LOADER, TEXT_MODEL = "loaded by", "AutoModelForCausalLM"
"""Fact with the class of transformers that loads the model, if it is another one."""
EXACT = 1e-4
"""Largest allowed difference, in nats, of an export in float32, unless rounding alone may cause
more (``compare_model``)."""
_ROUNDINGS = 10
_MOST = 1e-2
_WITH_IMAGE = "compared on a prompt with an image too"
_TEXT_ALONE = (
    "compared on text alone: the base model's folder has no image processor, or the engine refuses "
    "its images"
)
_DOCUMENTS = (".md", ".png", ".jpg", ".svg", ".pdf")
_MAX_TOKENS = 64
Prompt: TypeAlias = "list[int] | Probe"
"""Token ids [T], or also an image."""

# Different kinds of text, to exercise most layers and many rows of the head.
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Question: What is 17 + 25?\nAnswer: 17 + 25 = 42.\nQuestion: What is 9 * 8?\nAnswer:",
    'user: Give me a JSON object with a name.\nassistant: {"name": "Ada", "age":',
    "Die Katze schläft auf dem Sofa. Le chat dort sur le canapé. 猫在沙发上睡觉。",
    "Water boils at 100 °C at sea level; at higher altitudes it boils at a lower temperature,",
    "In short: cats purr to calm themselves.\nWhy: the sound is a vibration of the throat.\nTry:",
)


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of one prompt, in nats."""

    tokens: list[int]
    """[T] token ids of the prompt."""
    logprobs: np.ndarray
    """[T - 1] fp32: log-probability of each token after the first, given the tokens before it.
    Positions of an image are left out."""


@dataclass(frozen=True)
class Comparison:
    """One line of the table: an export, and its difference from the engine."""

    export: str
    """Description of the export, such as ``merged, float16``."""
    reader: str
    """Program that loaded it, such as ``transformers 5.5.0``."""
    positions: int
    """Number of compared log-probabilities."""
    mean: float
    """Mean absolute difference, in nats."""
    largest: float
    """Largest absolute difference, in nats."""
    bound: float
    measure: str = "largest"
    """Which of the two differences is bounded."""

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the bound; false for NaN."""
        return getattr(self, self.measure) <= self.bound


@dataclass
class Proof:
    """Comparisons of an export with the engine, and facts for its model card."""

    checkpoint: str
    """tinker:// path, or the folder of the adapter."""
    base_model: str = ""
    renderer_name: str = ""
    """Chat format of the run, if known."""
    comparisons: list[Comparison] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """Facts such as the largest change of a weight by rounding."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the export, by name; not of its card, which may be rewritten."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Proof:
        """Returns a proof without comparisons."""
        renderer_name = checkpoint.metadata.get("renderer_name", "")
        proof = cls(checkpoint.name, checkpoint.base_model, renderer_name)
        digest = checkpoint.metadata.get(BASE_DIGEST)
        if (loader := model_class(checkpoint.base_folder).__name__) != TEXT_MODEL:
            proof.facts[LOADER] = loader
        proof.facts["base model"] = (
            f"the weights of the training (digest {digest})"
            if digest
            else "not compared with that of the training, of which the checkpoint has no digest"
        )
        return proof

    def add(self, comparison: Comparison, error: type[WeightsError] = WeightsError) -> None:
        """Adds a comparison; raises ``error`` if the export disagrees with the engine."""
        self.comparisons.append(comparison)
        if not comparison.agrees:
            raise error(
                f"{comparison.export}: log-probabilities of {comparison.reader} differ from those "
                f"of the engine by {comparison.mean:.2g} nats (mean) and {comparison.largest:.2g} "
                f"(largest) on {comparison.positions} tokens; expected {comparison.measure} <= "
                f"{comparison.bound:.2g}. The export was not kept"
            )

    def table(self) -> str:
        """Returns the comparisons as a Markdown table."""
        lines = [
            "| export | loaded by | tokens | mean difference | largest | bound |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {one.export} | {one.reader} | {one.positions} | {one.mean:.1e} | "
            f"{one.largest:.1e} | {one.measure} <= {one.bound:.2g} |"
            for one in self.comparisons
        ]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes ``proof.json`` into the folder of the export, with a SHA-256 of each file."""
        self.files = {path.name: file_digest(path) for path in _proven(folder)}
        write_atomically(folder / PROOF, self.encoded())

    def encoded(self) -> bytes:
        """Returns the proof as JSON."""
        body = {"unit": "nats, absolute differences of log-probabilities", **asdict(self)}
        return json.dumps(body, indent=2).encode()


def check_unchanged(folder: Path, proof: Proof) -> None:
    """Raises ``WeightsError`` unless the folder has the files that were compared with the engine,
    and no others. Documents and pictures may be added or changed."""
    found = {path.name: path for path in _proven(folder)}
    problems = [f"{name} is missing" for name in proof.files if name not in found]
    for name, path in found.items():
        if name not in proof.files:
            problems.append(f"{name} was added")
        elif file_digest(path) != proof.files[name]:
            problems.append(f"{name} was changed")
    if problems:
        raise WeightsError(
            f"{folder}: is not the export that proof.json describes: {', '.join(problems[:4])}. "
            "Export the checkpoint again, or set unverified=True"
        )


def _proven(folder: Path) -> list[Path]:
    """Returns the files whose content decides what a program computes or writes."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith((".", "LICENSE", "NOTICE"))
        and not path.name.endswith((PROOF, ".Modelfile"))
        and path.suffix not in _DOCUMENTS
    )


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_proof(folder: Path) -> Proof | None:
    """Returns the proof of an export, or None if it has none.

    A folder of GGUF files has one ``NAME.proof.json`` per file; their comparisons are merged.
    """
    path = folder / PROOF
    paths = [path] if path.is_file() else sorted(folder.glob(f"*.{PROOF}"))
    joined: Proof | None = None
    for path in paths:
        body = json.loads(path.read_bytes())
        body.pop("unit", None)
        comparisons = [Comparison(**one) for one in body["comparisons"]]
        proof = Proof(**{**body, "comparisons": comparisons})
        if path.name != PROOF:
            stem = path.name.removesuffix(f".{PROOF}")
            proof.facts = {f"{stem}: {name}": text for name, text in proof.facts.items()}
        if joined is None:
            joined = proof
        else:
            joined.comparisons += proof.comparisons
            joined.facts |= proof.facts
            joined.files |= proof.files
    return joined


def print_proof(proof: Proof, written: str, started: float) -> None:
    """Prints the facts, the comparison with the engine, and the ``written`` files."""
    lines = [f"{name}: {text}" for name, text in proof.facts.items()]
    lines.append(
        proof.table() if proof.comparisons else "not compared with the engine (verify=False)"
    )
    lines.append(f"{written} ({time.monotonic() - started:.0f} s)")
    get_console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def image_prompts(checkpoint: Checkpoint, proof: Proof) -> list[Probe]:
    """Returns a prompt with an image in it for a model that takes images, else none. The proof gets
    the reason if there is none for a vision-language model."""
    folder = checkpoint.base_folder
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not has_vision(config):
        return []
    text = np.array(prompt_tokens(checkpoint)[0], dtype=np.int64)
    name, cpu = str(folder), torch.device("cpu")
    probe = probe_of(name, folder, config, text, cpu)
    if probe.image is None:
        found = whole_probe(name, folder, cpu)
        probe = found if isinstance(found, Probe) else probe
    proof.facts["image"] = _WITH_IMAGE if probe.image is not None else _TEXT_ALONE
    return [] if probe.image is None else [probe]


def prompt_tokens(checkpoint: Checkpoint) -> list[list[int]]:
    """Returns the token ids of the eight prompts, at most 64 tokens each."""
    tokenizer = get_tokenizer(str(checkpoint.base_folder))
    return [tokenizer.encode(text)[:_MAX_TOKENS] for text in PROMPTS]


def reference_logprobs(
    checkpoint: Checkpoint, prompts: Sequence[Prompt], device: str = "auto"
) -> list[PromptScores]:
    """Returns the engine's log-probabilities of the prompts, with the adapter, in float32.

    Loads the base model in float32 and frees it afterwards. Prompts with images, which are the
    last, are left out if the engine refuses the model's images (``scored``).

    Raises:
        WeightsAdapterError: The model lacks a module of the adapter, or its shape differs.
    """
    engine = Engine(device, "float32")
    try:
        name = str(checkpoint.base_folder)
        engine.resolve(name)
        return engine.submit(_score, engine, name, checkpoint, prompts).result()
    finally:
        engine.close()


def scored(
    prompts: Sequence[Prompt], reference: Sequence[PromptScores], proof: Proof
) -> Sequence[Prompt]:
    """Returns the prompts of which the engine has computed the ``reference``."""
    if len(reference) < len(prompts):
        proof.facts["image"] = _TEXT_ALONE
    return prompts[: len(reference)]


def _score(
    engine: Engine, name: str, checkpoint: Checkpoint, prompts: Sequence[Prompt]
) -> list[PromptScores]:
    base = engine.base_model(name)
    if base.image_refusal:
        prompts = [one for one in prompts if not isinstance(one, Probe)]
    if checkpoint.weights:
        weights, terms = checkpoint.weights, {}
        base = BaseModel(name, base.folder, base.device, base.dtype, weights=weights)
    else:
        terms = adapter_of(checkpoint, base).terms(base.dtype)
    scores = []
    for prompt in prompts:
        tokens = prompt.tokens if isinstance(prompt, Probe) else np.array(prompt)
        with torch.no_grad(), base.adapted(terms):
            hidden = base.hidden_of_row(tokens)
            logits = base.head.logits(hidden, terms.get(base.unembed_name))
        scores.append(scores_of(prompt, logits))
    return scores


def scores_of(prompt: Prompt, logits: torch.Tensor) -> PromptScores:
    """Returns the scores of a prompt from its logits [T, V]."""
    tokens = prompt.tokens.tolist() if isinstance(prompt, Probe) else prompt
    logprobs = logits.float().log_softmax(-1).cpu()
    following = torch.tensor(tokens[1:])
    (at,) = (~is_image(following)).nonzero(as_tuple=True)
    return PromptScores(tokens, logprobs[at, following[at]].numpy())


def adapter_of(checkpoint: Checkpoint, base: BaseModel) -> Adapter:
    """Returns the checkpoint's adapter as the engine applies it."""
    targets = {target.saved_as or target.name: target for target in base.targets}
    spec = AdapterSpec(checkpoint.rank)
    tensors = {}
    for name, update in checkpoint.updates.items():
        target = targets.get(name)
        shape = (update.b.shape[0], update.a.shape[1])
        expected_shape = target and (target.out_features, target.in_features)
        if target is None or shape != expected_shape or update.experts != target.experts:
            expected = (
                "a layer that an adapter can cover"
                if target is None
                else f"shape {(target.out_features, target.in_features)}"
            )
            raise WeightsAdapterError(
                f"{checkpoint.name}: has an update of {name} with shape {shape}, expected "
                f"{expected}; it is not an adapter of {checkpoint.base_model}"
            )
        # The engine has one scaling for all layers, so rescale B.
        b = update.b * (update.scaling / spec.scaling)
        tensors[target.name] = (update.a.to(base.device), b.to(base.device))
    return Adapter(spec, base.targets, tensors)


@torch.no_grad()
def model_logprobs(model: Any, prompts: Sequence[Prompt]) -> list[np.ndarray]:
    """Returns each prompt's log-probabilities [T - 1] from a transformers or PEFT model."""
    model.eval()
    found = []
    for prompt in prompts:
        of_text = not isinstance(prompt, Probe)
        inputs = {"input_ids": torch.tensor([prompt])} if of_text else prompt.inputs
        found.append(scores_of(prompt, model(**inputs, use_cache=False).logits[0]).logprobs)
    return found


def compare_model(
    export: str,
    reader: str,
    reference: Sequence[PromptScores],
    model: Any,
    prompts: Sequence[Prompt],
    rounded: tuple[float, str] | None = None,
) -> Comparison:
    """Compares the ``model`` that the program ``reader`` loaded; ``rounded`` are bound and measure
    of an export that is not in float32.

    Some models amplify rounding: a random Qwen3.5 differs between float32 and float64 by up to
    7e-4. In float32, the bound of such a model is ten times the change of its log-probabilities
    when its embeddings change by the last bit, which is about that difference, and at most 0.01.
    """
    found = model_logprobs(model, prompts)
    bound, measure = rounded or (EXACT, "largest")
    compared = compare(export, reader, reference, found, bound=bound, measure=measure)
    if compared.agrees or rounded:
        return compared
    noise = torch.Generator().manual_seed(0)

    def change(module: Any, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        bits = torch.randint(-1, 2, embedded.shape, generator=noise).to(embedded)
        return embedded * (1 + torch.finfo(embedded.dtype).eps * bits)

    with model.get_input_embeddings().register_forward_hook(change):
        changed = model_logprobs(model, prompts)
    rounding = max(np.abs(a - b).max() for a, b in zip(found, changed, strict=True))
    # ``max`` and ``min`` keep the first value if the second is NaN.
    return replace(compared, bound=min(_MOST, max(EXACT, _ROUNDINGS * float(rounding))))


def compare(
    export: str,
    reader: str,
    reference: Sequence[PromptScores],
    found: Sequence[np.ndarray],
    *,
    bound: float,
    measure: str = "largest",
) -> Comparison:
    """Compares an export's log-probabilities ``found``, for each prompt [T - 1] in nats, with the
    engine's ``reference``; the other arguments are those of ``Comparison``."""
    expected = np.concatenate([scores.logprobs for scores in reference]).astype(np.float64)
    difference = np.abs(np.concatenate(list(found)).astype(np.float64) - expected)
    return Comparison(
        export,
        reader,
        len(difference),
        float(difference.mean()),
        float(difference.max()),
        bound,
        measure,
    )
