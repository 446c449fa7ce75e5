"""Finds out which generation of the verifiers library is installed; raises errors if none is."""

from __future__ import annotations

from importlib import metadata

from tinker_cookbook.exceptions import ConfigurationError, install_command

LEGACY_EXTRA, V1_EXTRA = "verifiers-legacy", "verifiers"


def installed_version() -> tuple[int, ...] | None:
    """Returns the first numbers of the installed version, or None."""
    try:
        text = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in text.split(".")[:3] if part.isdecimal())


def has_v1() -> bool:
    """Returns whether the installed verifiers has the v1 interface.

    Raises:
        ConfigurationError: It is not installed, or a version between the two generations is.
    """
    version = installed_version()
    if version is None:
        raise ConfigurationError(
            "verifiers environments need the package verifiers, which is not installed; for "
            f"environments of version 0.4 (tasksets) run: {install_command(V1_EXTRA)}"
            f", for older ones (load_environment): {install_command(LEGACY_EXTRA)}"
        )
    if version < (0, 1, 10):
        return False
    if version >= (0, 4):
        return True
    raise ConfigurationError(
        f"verifiers: got version {'.'.join(map(str, version))}, expected 0.4 or later "
        f"('tinker_cookbook[{V1_EXTRA}]') or 0.1.9 ('tinker_cookbook[{LEGACY_EXTRA}]'); the "
        "versions between them have other interfaces"
    )
