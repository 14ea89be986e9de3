"""Generated functions: compiled from source that tracebacks, debuggers and ``inspect`` can show."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

_numbers = itertools.count(1)


def execute(source: str, what: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run ``source`` in ``namespace``, which is returned. ``what`` is its name in tracebacks."""
    filename = f"<sgl_aspects {next(_numbers)}: {what}>"
    # An entry without a modification time is never checked against a file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    return namespace
