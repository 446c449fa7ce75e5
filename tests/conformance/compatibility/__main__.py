"""``python -m tests.conformance.compatibility model_name=…``."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import chz

from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class Config:
    """Settings of the probe."""

    model_name: str = chz.field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        doc="Base model for the server: a Hub name or a local folder; the smaller the better",
    )
    output: str = chz.field(default="docs/compatibility.md", doc="The page to write")


def main(config: Config) -> None:
    """Writes the page; raises ``BackendError`` where something neither worked nor was refused."""
    os.environ["TINKER_TELEMETRY"] = "0"  # read by the SDK when it is imported
    from tests.conformance.compatibility.survey import survey
    from tests.conformance.compatibility.table import page
    from tests.conformance.compatibility.world import World, served

    logging.basicConfig(level=logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(config.model_name, Path(folder)) as server,
    ):
        world = World(server.url, server.key, config.model_name, Path(folder))
        sections = survey(world)
        world.close()
    broken = [
        f"{section.title}: {one.name}: {one.said}"
        for section in sections
        for one in section.rows
        if one.outcome == "broken"
    ]
    if broken:
        print("\n".join(broken))
        raise BackendError(
            f"{len(broken)} of what was asked neither worked nor was refused within some seconds "
            f"(they stand above); {config.output} was left as it is"
        )
    Path(config.output).write_text(page(sections), encoding="utf-8")
    print(f"wrote {config.output}")


if __name__ == "__main__":
    run_entrypoint(main)
