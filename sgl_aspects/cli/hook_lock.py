"""``sgl-aspects hooks lock`` and ``lint``: whether hooks fit other versions of what they hook."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from sgl_aspects.cli.arguments import write_text
from sgl_aspects.cli.hooks import sorted_hooks
from sgl_aspects.engines import fingerprints
from sgl_aspects.engines.fingerprints import Change, LockedHook
from sgl_aspects.engines.source import Source
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.process_reports import ProcessReport, decoded
from sgl_aspects.terminal import counted, printable

_VERSION = 1


def lock(path: str, processes: Iterable[ProcessReport]) -> int:
    """Write the fingerprints of the targets of every hook that is not of this package."""
    own, _, _ = sorted_hooks(hook for process in processes for hook in process.report.hooks)
    hooks = {(hook.target, hook.hook, hook.hook_type.value) for hook in own}
    locked = [fingerprints.lock(*hook, _installed(hook[0])) for hook in sorted(hooks)]
    if not locked:
        raise ConfigError(
            "there are no hooks to lock: install the plugin that has them, or name them with --from"
        )
    text = json.dumps({"version": _VERSION, "hooks": [asdict(hook) for hook in locked]}, indent=1) + "\n"
    write_text(Path(path), text)
    places = sum(len(hook.places) for hook in locked)
    print(f"{path}: {counted(len(locked), 'hook')} at {counted(places, 'place')}")
    for hook in locked:
        if not hook.places:
            print(f"not found in the installed version: {hook.target}  <- {hook.hook}")
    return 0


def lint(path: str, versions: Sequence[str], *, as_json: bool) -> int:
    """Print what changed in each version. Exit status 1 if a hook needs its author."""
    if not versions:
        raise ConfigError("hooks lint compares with other versions: name wheels or folders with --against")
    hooks = _read(path)
    results = {source.version: _compared(hooks, source) for source in map(Source, versions)}
    if as_json:
        print(
            json.dumps(
                {version: [_as_dict(one) for one in found] for version, found in results.items()}, indent=1
            )
        )
    for version, found in () if as_json else results.items():
        counts = Counter(one.change for one in found)
        print(
            f"{version}: "
            + ", ".join(f"{counts[change]} {change.value}" for change in Change if counts[change])
        )
        for one in found:
            if one.change is not Change.UNCHANGED:
                mark = "!" if one.is_failure else " "
                print(printable(f"{mark} {one.change.value:25} {one.place}  <- {one.hook.hook}"))
                if one.detail:
                    print(printable(f"    {one.detail}"))
    return 1 if any(one.is_failure for found in results.values() for one in found) else 0


def _compared(hooks: list[LockedHook], source: Source) -> list[fingerprints.Finding]:
    """Compare the hooks whose targets are in this package; an error if there are none."""
    packages = {name.partition(".")[0] for name in source.modules}
    ours = [hook for hook in hooks if re.split("[.:]", hook.target)[0] in packages]
    if not ours:
        raise ConfigError(
            f"{source.path}: no hook of the lock file has a target in {', '.join(sorted(packages))}"
        )
    return list(fingerprints.lint(ours, source))


@cache
def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith(".py"):
        raise ConfigError(
            f"the source of {package!r} is neither installed here nor on PYTHONPATH: it cannot be locked"
        )
    path = Path(origin)
    return path.parent.parent if path.name == "__init__.py" else path.parent


@cache
def _source(folder: Path) -> Source:
    return Source(folder)


def _installed(target: str) -> Source:
    return _source(_folder(re.split("[.:]", target)[0]))


def _read(path: str) -> list[LockedHook]:
    try:
        content = json.loads(Path(path).read_text())
        if content["version"] != _VERSION:
            raise ConfigError(f"{path} was written by another version of sgl-aspects: lock the hooks again")
        return [decoded(LockedHook, hook) for hook in content["hooks"]]
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not there: make it with sgl-aspects hooks lock, or name it with --lock"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} was not written by sgl-aspects hooks lock") from error


def _as_dict(finding: fingerprints.Finding) -> dict[str, object]:
    return {
        "place": finding.place,
        "hook": finding.hook.hook,
        "change": finding.change.value,
        "detail": finding.detail,
        "fails": finding.is_failure,
    }
