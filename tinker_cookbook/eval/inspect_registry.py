"""Entry points for Inspect AI: the model ``tinker-sampling`` and the task ``benchmark``."""

from tinker_cookbook.eval.inspect_tasks import benchmark as benchmark
from tinker_cookbook.eval.inspect_utils import (
    InspectAPIFromTinkerSampling as InspectAPIFromTinkerSampling,
)
