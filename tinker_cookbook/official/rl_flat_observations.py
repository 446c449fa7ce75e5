"""Types of flat observations and of provenance, which need the SDK (``rl.data_processing``)."""

from __future__ import annotations

from typing import TypeAlias

import tinker

FlatObElem: TypeAlias = int | tinker.ModelInputChunk
"""A token, or a non-text chunk."""

FlatOb: TypeAlias = list[FlatObElem]
"""An observation as a list of tokens and chunks."""

ProvenanceSpan: TypeAlias = tinker.PromptProvenanceSpan | tinker.SampledProvenanceSpan
"""Origin of consecutive tokens: the prompt of a sampled sequence, or the sequence."""
