"""How to install a package that is missing, for every message: the same in a checkout and a wheel."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
from collections.abc import Sequence

_OWN = "sgl-aspects"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([^]]*)\])?([^;]*)(?:;(.*))?")
_EXTRA = re.compile('extra == "([^"]+)"')


def install_command(*names: str) -> str:
    """Return the command that installs these distributions, in the versions that sgl-aspects requires."""
    versions = {name: version for name, _, version, _ in _requirements()}
    return shlex.join(["pip", "install", *(name + versions.get(name, "") for name in names)])


def hint(*names: str) -> str:
    """Return the same with the extras of sgl-aspects that these distributions are in."""
    extras = {
        name: extra[1] for name, *_, condition in _requirements() if (extra := _EXTRA.search(condition))
    }
    named = ", ".join(dict.fromkeys(extras[name] for name in names if name in extras))
    return install_command(*names) + (f" (extras of {_OWN}: {named})" if named else "")


def missing(*extras: str) -> list[str]:
    """Return what is not installed of these extras and of those that they include."""
    found: dict[str, None] = {}
    for name, included, _, condition in _requirements():
        if any(f'extra == "{extra}"' in condition for extra in extras):
            found.update(dict.fromkeys(missing(*included) if name == _OWN else [name]))
    return [name for name in found if not _is_installed(name)]


@functools.cache
def _requirements() -> Sequence[tuple[str, list[str], str, str]]:
    """Return name, extras, versions and condition of each requirement; none if there is no metadata."""
    try:
        lines = importlib.metadata.requires(_OWN) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return []
    parts = [match.groups("") for match in map(_REQUIREMENT.match, lines) if match]
    return [(name, extras.split(","), versions.strip(), rest) for name, extras, versions, rest in parts]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
