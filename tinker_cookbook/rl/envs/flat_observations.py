"""Types of flat observations and of provenance, which need the SDK (``rl.data_processing``)."""

from __future__ import annotations

from typing import TypeAlias

import tinker

FlatObElem: TypeAlias = int | tinker.ModelInputChunk
"""A token, or a chunk that is no text."""

FlatOb: TypeAlias = list[FlatObElem]
"""An observation, token by token."""

ProvenanceSpan: TypeAlias = tinker.PromptProvenanceSpan | tinker.SampledProvenanceSpan
"""Where neighbouring tokens come from: the prompt of a sampled sequence, or the sequence."""
