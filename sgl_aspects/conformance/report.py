"""A run of the kit as a page: platform, place and time, and each result. docs/conformance/ holds them."""

from __future__ import annotations

import datetime
import platform as host
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from sgl_aspects import __version__
from sgl_aspects.conformance.check import Result
from sgl_aspects.platforms import SRTPlatform


@dataclass(frozen=True)
class ReportHead:
    """The table at the top of a report, a row for each field."""

    platform: str
    #: The platform's class, as ``pkg.mod:Cls``.
    implementation: str
    engine: str
    device: str
    date: str
    versions: str
    result: str

    @classmethod
    def of(cls, name: str, platform: SRTPlatform, engine: str, results: Sequence[Result]) -> ReportHead:
        import torch

        return cls(
            platform=name,
            implementation=class_name(platform),
            engine=engine,
            device=f"{known(platform.device_count)} × {known(platform.get_device_name)}",
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            versions=f"sgl-aspects {__version__}, torch {torch.__version__}, Python {host.python_version()}",
            result=counted(results),
        )

    @classmethod
    def read(cls, path: Path) -> ReportHead:
        """:raises ValueError: the page is not a report, or lacks a row."""
        rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", path.read_text(encoding="utf-8"), re.MULTILINE))
        missing = [field.name for field in fields(cls) if field.name not in rows]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}: write it with sgl-aspects conformance --report"
            )
        return cls(**{field.name: rows[field.name] for field in fields(cls)})

    def markdown(self, lines: Sequence[str]) -> str:
        """Format the report; ``lines`` are those of its results."""
        rows = [f"| {field.name} | {getattr(self, field.name)} |" for field in fields(self)]
        title = f"# Conformance of {self.platform}, {self.engine} engine"
        return "\n".join([title, "", "| | |", "| --- | --- |", *rows, "", "```text", *lines, "```", ""])


def class_name(platform: SRTPlatform) -> str:
    """Return its class as ``pkg.mod:Cls``."""
    return f"{type(platform).__module__}:{type(platform).__qualname__}"


def known(query: Callable[[], object]) -> str:
    """Return what a platform answers; "unknown" where it has no answer."""
    try:
        return str(query())
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # the checks of identity name the method and the error
        return "unknown"


def counted(results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
