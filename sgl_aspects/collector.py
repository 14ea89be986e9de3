"""``python -m sgl_aspects.collector RUN_FOLDER``: a run's collector, with the causes of slow requests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from sgl_aspects.tracing.collect import process
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.settings import TraceSettings


def _explainer(settings: TraceSettings) -> Callable[[list[CollectedSpan]], None] | None:
    if settings.causes_slower_than is None:
        return None
    from sgl_aspects.analysis.slowest import SlowRequests

    return SlowRequests(settings.causes_slower_than).explain


def main(arguments: Sequence[str]) -> int:
    """Collect until the run has ended; returns the exit status."""
    return process.main(arguments, _explainer)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError):  # the reader of the console exporter's output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    # An exporter may still hang in a call that cannot be interrupted; the time limit has passed.
    os._exit(code)
