"""Entry points for Inspect AI: the model ``tinker-sampling`` and the task ``benchmark``."""

from tinker_cookbook.eval.inspect_bridge.model import (
    InspectAPIFromTinkerSampling as InspectAPIFromTinkerSampling,
)
from tinker_cookbook.eval.inspect_bridge.tasks import benchmark as benchmark
