"""Sources of a run's spans: a file that an exporter wrote, or the rings of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.analysis.clocks import ClockBounds, align
from sgl_aspects.analysis.spans import Span, read_spans, span_of
from sgl_aspects.errors import ConfigError

# In seconds, longer than any ring's contents.
_EVERYTHING = 1e9


@dataclass(frozen=True)
class Run:
    """The spans of a run, by start time, and the number of missing ones."""

    source: str
    spans: list[Span]
    is_live: bool = False
    #: Records lost because a ring was full; None if the source does not count them.
    dropped: int | None = None
    #: Records that could not be read; None if the source does not count them.
    damaged: int | None = None
    #: The compared clocks of several hosts.
    clocks: tuple[ClockBounds, ...] = ()


def load_runs(sources: Sequence[str]) -> Run:
    """Read the spans of all of these files and folders; those of several hosts with adjusted clocks.

    Without sources, of the only traced run. Raises ``ConfigError`` if one has nothing to read.
    """
    runs = [load_run(source) for source in sources] or [load_run(None)]
    spans = [span for run in runs for span in run.spans]
    if len(runs) == 1 and len({span.host for span in spans}) < 2:
        return runs[0]
    aligned, clocks = align(spans)
    return Run(
        ", ".join(run.source for run in runs),
        aligned,
        is_live=any(run.is_live for run in runs),
        dropped=_sum(run.dropped for run in runs),
        damaged=_sum(run.damaged for run in runs),
        clocks=tuple(clocks),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def load_run(source: str | None) -> Run:
    """Read a run from an OTLP-JSON file, a run folder, live or dead, or the id of a process that records.

    None: the only traced run.

    Raises ``ConfigError`` if there is nothing to read.
    """
    if source is None:
        return _of_rings(None)
    path = Path(os.path.expanduser(source))
    if source.isdecimal() and not path.exists():
        return _of_rings(source)
    if path.is_dir():
        if not any(path.glob("*.ring")):
            files = sorted(path.glob("*.jsonl"))
            choices = f": name one of its files, such as {files[-1]}" if files else ""
            raise ConfigError(f"{source} holds no rings of a traced run{choices}")
        return _of_rings(source)
    try:
        return Run(path.name, read_spans(path))
    except OSError as error:
        raise ConfigError(
            f"{source}: {error.strerror}. Name an OTLP-JSON file or the folder of a run"
        ) from error


def _of_rings(folder: str | None) -> Run:
    from sgl_aspects.tracing.collect.dump import spans_of
    from sgl_aspects.tracing.collect.rings import rings

    found = list(rings(folder))
    try:
        spans = sorted(
            (span_of(span) for span in spans_of(found, _EVERYTHING)),
            key=lambda span: (span.start_ns, -span.end_ns),
        )
        return Run(
            str(found[0].path.parent),
            spans,
            is_live=any(ring.is_alive() for ring in found),
            dropped=sum(ring.dropped for ring in found),
            damaged=sum(ring.damaged for ring in found),
        )
    finally:
        for ring in found:
            ring.close()
