"""A model with fixed weights that plays a part of an environment."""

from __future__ import annotations

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.connect import make_once
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.config import BackendSettings


@chz.chz
class FixedModel(BackendSettings, SamplerOptions):
    """A base model or a checkpoint of it; it shares the base model of the run in progress."""

    model_name: str = chz.field(doc="Hub name or local folder")
    model_path: str | None = weights_field("sampler_weights", "Its adapter; default: none")

    def client(self) -> SamplingClient:
        """Returns its sampling client; the first call in a process loads the model."""
        source = {"model_path": self.model_path} if self.model_path else {}
        source = source or {"base_model": self.model_name}
        return make_once(self, lambda service: service.create_sampling_client(**source)).result()
