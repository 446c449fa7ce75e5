"""Common settings of the commands of ``tinker_cookbook.weights``."""

from __future__ import annotations

import chz

from tinker_cookbook.renderers import check_renderer_name
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.weights._source import Checkpoint, open_checkpoint


@chz.chz
class CheckpointSettings:
    """Settings that name a checkpoint."""

    model_path: str = weights_field(
        "sampler_weights",
        "Checkpoint; or the folder of an adapter. Also without 'model_path='",
        required=True,
    )
    base_model: str | None = chz.field(
        default=None, doc="Hub name or folder of the base model; default: from the checkpoint"
    )
    backend: str = chz.field(
        default="auto", doc="Where the checkpoint is: auto, local, tinker, or the URL of a server"
    )
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")
    renderer_name: str | None = chz.field(
        default=None, doc="Chat format of the chat template and the stops; default: the run's"
    )

    def open(self, all_weights: bool = False) -> Checkpoint:
        """Reads the checkpoint; see ``open_checkpoint``."""
        if self.renderer_name is not None:
            check_renderer_name(self.renderer_name)
        checkpoint = open_checkpoint(
            self.model_path,
            base_model=self.base_model,
            backend=self.backend,
            base_url=self.base_url,
            all_weights=all_weights,
        )
        return checkpoint.with_renderer(self.renderer_name)


@chz.chz
class OutputSettings(CheckpointSettings):
    """Settings of a command that writes an export."""

    overwrite: bool = chz.field(
        default=False, doc="Replace an existing export once the new one is complete"
    )
    verify: bool = chz.field(
        default=True, doc="Load the export again and compare its log-probabilities"
    )
    device: str = chz.field(default="auto", doc="Device of the comparison: auto, cuda, mps or cpu")


@chz.chz
class ExportSettings(OutputSettings):
    """Settings of a command that writes a folder."""

    out: str = chz.field(doc="Folder to write")
    vllm_python: str | None = chz.field(
        default=None, doc="Python of an environment with vLLM, to compare in vLLM too"
    )
