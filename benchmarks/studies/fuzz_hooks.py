"""What schemathesis sends, with names that exist: in every other request, at random.

Loaded by `fuzz_server.py`. With invented names alone nearly all requests would end at "not found".
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import schemathesis

KNOWN: dict[str, list[Any]] = json.loads(os.environ["FUZZ_KNOWN"])


def _filled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        return {
            name: chance.choice(KNOWN[name])
            if name in KNOWN and chance.random() < 0.8
            else _filled(part, chance)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [_filled(part, chance) for part in value]
    return value


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Of bodies."""
    chance = random.Random(repr(body))
    return _filled(body, chance) if chance.random() < 0.5 else body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Of addresses."""
    if not path_parameters:
        return path_parameters
    if context.operation.path.endswith("/finish"):  # the rest needs the session that exists
        return path_parameters
    chance = random.Random(repr(path_parameters))
    return _filled(path_parameters, chance) if chance.random() < 0.7 else path_parameters
