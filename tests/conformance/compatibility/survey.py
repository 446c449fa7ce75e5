"""All probes over one server, and that none is missing."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import tinker
from tinker import types

from tests.conformance.compatibility.command_probes import COMMANDS, commands
from tests.conformance.compatibility.http_probes import HTTP, UNKNOWN
from tests.conformance.compatibility.probing import Call, Probe, Probes, Row, run
from tests.conformance.compatibility.rest_probes import ADMIN, REST
from tests.conformance.compatibility.sampling_probes import ARGUMENTS, MISTAKES, SAMPLING
from tests.conformance.compatibility.service_probes import AUTH, FUTURE, LOSS, SERVICE
from tests.conformance.compatibility.training_probes import LOSSES, TRAINING, probe_loss
from tests.conformance.compatibility.world import World
from tinker_cookbook.exceptions import BackendError

MISTAKEN = "Errors of the caller, and the message of the client"


@dataclass(frozen=True)
class Section:
    """A part of the table."""

    title: str
    rows: list[Row]
    counts: bool = True
    """Whether its rows are things that should work."""


PROBED: dict[type, Probes] = {
    tinker.ServiceClient: SERVICE,
    tinker.TrainingClient: TRAINING,
    tinker.SamplingClient: SAMPLING,
    tinker.RestClient: REST,
    tinker.AdminClient: ADMIN,
    tinker.APIFuture: FUTURE,
    tinker.LossHandle: LOSS,
    tinker.BackcompatTrainingClientFuture: Probes(TRAINING | FUTURE),
    tinker.BackcompatSamplingClientFuture: Probes(SAMPLING | FUTURE),
}
"""Classes whose public methods are called."""


def survey(world: World) -> list[Section]:
    """Probes all there is; raises ``BackendError`` where something has no probe."""
    missing = list(unprobed())
    if missing:
        raise BackendError(
            f"tinker {version('tinker')} has what is not known here: {', '.join(missing)}. Add a "
            "probe for each in tests/conformance/compatibility"
        )
    sections = [Section(of.__name__, list(_methods(of, world))) for of in PROBED]
    sections.append(
        Section("tinker.auth", [run(one, world, Call(one.name)) for one in AUTH.values()])
    )
    for title, probes in (
        ("Losses of forward_backward", _losses()),
        ("Arguments", ARGUMENTS.values()),
        ("Endpoints that no method of this SDK uses", HTTP.values()),
        ("The `tinker` command line", COMMANDS.values()),
    ):
        sections.append(Section(title, [run(one, world) for one in probes]))
    mistakes = Probes(MISTAKES | UNKNOWN).values()
    sections.append(Section(MISTAKEN, [run(one, world) for one in mistakes], False))
    return sections


def unprobed(classes: dict[type, Probes] | None = None) -> Iterable[str]:
    """Public methods, functions and commands of the installed SDK that have no probe."""
    classes = PROBED if classes is None else classes
    for of, probes in classes.items():
        for name in public(of):
            if _base(name, public(of)) not in probes:
                yield f"{of.__name__}.{name}"
    known = {of.__name__ for of in classes}
    for name in dir(tinker):
        if name.endswith(("Client", "Future", "Handle")) and name not in known:
            yield f"tinker.{name}"
    yield from (f"tinker.auth.{name}" for name in tinker.auth.__all__ if name not in AUTH)
    yield from (f"the command tinker {name}" for name in commands() if name not in COMMANDS)


def public(of: type) -> list[str]:
    """Names of a class that do not begin with an underscore."""
    return [name for name in dir(of) if not name.startswith("_")]


def _methods(of: type, world: World) -> Iterable[Row]:
    """One row a method; its ``_async`` spelling, where there is one, goes with it."""
    names, probes = public(of), PROBED[of]
    seen = world.with_futures() if of.__name__.startswith("Backcompat") else world
    extra = [name for name in probes if name.startswith("__") and hasattr(of, name)]
    for name in [*names, *extra]:
        base = _base(name, names)
        if base != name:
            continue
        row = run(probes[name], seen, Call(name, of), name=name)
        if f"{name}_async" in names:
            twin = run(probes[name], seen, Call(f"{name}_async", of), name=f"{name}_async")
            row = _with_twin(row, twin)
        yield row


def _with_twin(row: Row, twin: Row) -> Row:
    """Both in one row; what is said of the twin counts where only it is broken."""
    if twin.outcome == "broken" and row.outcome != "broken":
        return twin
    return replace(row, twin=twin.outcome)


def _base(name: str, names: list[str]) -> str:
    base = name.removesuffix("_async")
    return base if base in names else name


def _losses() -> Iterable[Probe]:
    for name in typing.get_args(types.LossFnType):
        needs, _ = LOSSES.get(name, ("", None))
        checks = "a step makes tokens with a positive advantage more probable"
        yield Probe(name, f"{checks}, with {needs}" if needs else checks, partial(_loss, name=name))


def _loss(world: World, name: str) -> None:
    probe_loss(world, name)
