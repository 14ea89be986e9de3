"""Generated functions: compiled from source that tracebacks, debuggers and ``inspect`` can show."""

from __future__ import annotations

import functools
import itertools
import linecache
from types import CodeType
from typing import Any

_numbers = itertools.count(1)


def execute(source: str, what: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run ``source`` in ``namespace``, which is returned. ``what`` is its name in tracebacks.

    Take only functions that do not call each other: reference cycles are freed late.
    """
    exec(_compile(source, what), namespace)
    return namespace


@functools.cache
def _compile(source: str, what: str) -> CodeType:
    filename = f"<sgl_aspects {next(_numbers)}: {what}>"
    # An entry without a modification time is never checked against a file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return compile(source, filename, "exec", dont_inherit=True)
