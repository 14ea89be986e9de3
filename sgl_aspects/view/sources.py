"""Where a run's spans come from: a file that an exporter wrote, or the rings of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.errors import ConfigError
from sgl_aspects.view.clocks import ClockBounds, align
from sgl_aspects.view.spans import Span, read_spans, span_of

# Further back than anything that a ring holds, in seconds.
_EVERYTHING = 1e9


@dataclass(frozen=True)
class Run:
    """The spans of a run, by start time, and what is known to be missing among them."""

    source: str
    spans: list[Span]
    is_live: bool = False
    #: Records that a process had no room for; None where the source does not say.
    dropped: int | None = None
    #: Records that could not be read; None where the source does not say.
    damaged: int | None = None
    #: What is known of the clocks of several hosts.
    clocks: tuple[ClockBounds, ...] = ()


def load_runs(sources: Sequence[str]) -> Run:
    """The spans of all of these files and folders; those of several hosts by clocks that agree.

    Without sources the only traced run there is. Raises ``ConfigError`` where one has nothing to read.
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
    """A run from an OTLP-JSON file, or from a run folder, live or dead; from the only traced run where None.

    Raises ``ConfigError`` where there is nothing to read.
    """
    if source is None:
        return _of_rings(None)
    path = Path(os.path.expanduser(source))
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
    from sgl_aspects.tracing.collector.dump import spans_of
    from sgl_aspects.tracing.control import rings

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
