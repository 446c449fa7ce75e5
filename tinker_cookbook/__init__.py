"""Post-training of language models with readable training loops.

Importing the package is cheap: torch, transformers, datasets and the tinker SDK load on first use.
"""

from tinker_cookbook._installed import check_installed
from tinker_cookbook._process import prepare_process

check_installed()
prepare_process()

__version__ = "0.1.0"

from tinker_cookbook.engine.model.resolve import (  # noqa: E402
    register_model_names,
    register_packaged_model,
)
from tinker_cookbook.exceptions import (  # noqa: E402  (the process is prepared first)
    AllTrajectoriesFailedError,
    BenchmarkNotFoundError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
    EvalError,
    EvalGradingError,
    EvalTimeoutError,
    RendererError,
    SandboxError,
    TinkerCookbookError,
    TrainingError,
    WeightsAdapterError,
    WeightsDownloadError,
    WeightsError,
    WeightsMergeError,
)
from tinker_cookbook.model_table import LINEUP  # noqa: E402
from tinker_cookbook.utils.imports import find_official_modules  # noqa: E402

find_official_modules()
register_model_names(LINEUP)
register_packaged_model("HuggingFaceTB/SmolLM2-135M-Instruct", "tinker_cookbook.demo.model")

__all__ = [
    "AllTrajectoriesFailedError",
    "BenchmarkNotFoundError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DataFormatError",
    "DataValidationError",
    "EvalError",
    "EvalGradingError",
    "EvalTimeoutError",
    "RendererError",
    "SandboxError",
    "TinkerCookbookError",
    "TrainingError",
    "WeightsAdapterError",
    "WeightsDownloadError",
    "WeightsError",
    "WeightsMergeError",
    "__version__",
]
