"""Merges an adapter into its base model; the command line of the original Tinker Cookbook.

python -m tinker_cookbook.scripts.merge_tinker_adapter_to_hf_model \
    --hf-model NAME --tinker-adapter-path FOLDER --output-path FOLDER

``python -m tinker_cookbook.weights merge`` does the same, and also accepts a tinker:// path.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tinker_cookbook.utils.command_line.entrypoint import run_program
from tinker_cookbook.weights import build_hf_model


def main(argv: Sequence[str] | None = None) -> None:
    """Merges what the command line names; ``argv``: default ``sys.argv``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--hf-model", required=True, help="Hub name or folder of the base model")
    parser.add_argument("--tinker-adapter-path", required=True, help="folder of the adapter")
    parser.add_argument("--output-path", required=True, help="new folder")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--quantize", help="not supported")
    parser.add_argument("--serving-format", help="not supported")
    given = parser.parse_args(argv)
    build_hf_model(
        base_model=given.hf_model,
        adapter_path=given.tinker_adapter_path,
        output_path=given.output_path,
        dtype=given.dtype,
        quantize=given.quantize,
        serving_format=given.serving_format,
    )
    print(given.output_path)


if __name__ == "__main__":
    run_program(main)
