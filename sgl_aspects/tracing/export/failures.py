"""What a collector says of its exporters: on the engine's standard error, in few lines, and no secret."""

from __future__ import annotations

import contextlib
import logging
import re
import sys

from sgl_aspects.tracing.export.variables import secrets, without_secrets

_LONGEST_LINE = 300
# Of one exporter; the text of a failure may be another each time.
_MOST_KINDS = 5


def tell(text: str) -> None:
    """One line; where it cannot be written, as on a full disk, the spans are still to be delivered."""
    with contextlib.suppress(OSError):
        print(f"sgl-aspects collector: {text}", file=sys.stderr, flush=True)


class FirstFailure(logging.Handler):
    """Says each kind of failure once, in one line; OpenTelemetry would log each attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: dict[str, set[str]] = {}
        self._secrets = secrets()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        text = without_secrets(" ".join(text.split()), self._secrets)[:_LONGEST_LINE]
        kind, said = re.sub(r"[\d.]+", "#", text), self._said.setdefault(record.name, set())
        if kind not in said and len(said) < _MOST_KINDS:
            said.add(kind)
            tell(f"{text} (said once)")


def quiet_exporters() -> None:
    """Puts :class:`FirstFailure` in the place of the exporters' own logging."""
    handler = FirstFailure()
    for name in ("opentelemetry", "sgl_aspects", "urllib3"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
