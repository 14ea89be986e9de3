"""The hot path of a decode step: in C where the package was built with a C compiler, else in Python.

    decode_path.c   the plain case of observers/steps.py and observers/forward.py
    plain_record.c  the check of a record before marshal reads it (record/codec.py)
    watched_call.c  the call of a woven function that only one of these observes
    layout.h        the layout of a ring file
    fields.py       its replacement where it was not compiled

Both record the same. ``setup.py`` builds it; ``SGL_ASPECTS_NATIVE=off`` does without.
benchmarks/results/steps.md has the measurements that justify it.
"""

from __future__ import annotations

import importlib
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_aspects import env

VARIABLE = "SGL_ASPECTS_NATIVE"
_AGAIN = (
    "install sgl-aspects again where there is a C compiler and Python's headers (Debian: gcc, python3-dev)"
)


def _load() -> tuple[Any, str]:
    """Return the compiled module, or None and the reason."""
    if not env.flag(VARIABLE, default=True):
        return None, f"{VARIABLE} is off"
    try:
        module = importlib.import_module(f"{__name__}._decode_path")
    except ModuleNotFoundError:
        return None, f"it was not built for this Python: {_AGAIN}"
    except ImportError as error:
        return None, f"{error}: {_AGAIN}"
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))  # in a checkout, where they may have changed
    if sources and zlib.crc32(b"".join(path.read_bytes() for path in sources)) != module.CHECKSUM:
        return None, f"it was built from other sources: {_AGAIN}"
    return module, ""


#: The compiled module; None: everything runs in Python, and ``why_not`` is the reason.
compiled, why_not = _load()

if compiled is None or TYPE_CHECKING:
    from sgl_aspects.tracing.record.native.fields import Blocks, DraftCounts, Slots
    from sgl_aspects.tracing.record.native.fields import Fields as DraftPath
    from sgl_aspects.tracing.record.native.fields import Fields as ForwardPath
    from sgl_aspects.tracing.record.native.fields import Fields as Mark
    from sgl_aspects.tracing.record.native.fields import Fields as Step
    from sgl_aspects.tracing.record.native.fields import Fields as StepPath
    from sgl_aspects.tracing.record.native.fields import Fields as Tracker
else:
    Blocks, Slots, Step, Tracker = compiled.Blocks, compiled.Slots, compiled.Step, compiled.Tracker
    StepPath, ForwardPath, Mark = compiled.StepPath, compiled.ForwardPath, compiled.Mark
    DraftCounts, DraftPath = compiled.DraftCounts, compiled.DraftPath

#: Calls the hooks of a woven function in C; None: Python calls them.
WatchedCall: Any = getattr(compiled, "WatchedCall", None)


def state() -> str:
    """Say in a line whether the compiled step path is in use, and if not why."""
    return "in use" if compiled is not None else f"not in use: {why_not}"


__all__ = [
    "Blocks",
    "DraftCounts",
    "DraftPath",
    "ForwardPath",
    "Mark",
    "Slots",
    "Step",
    "StepPath",
    "Tracker",
    "WatchedCall",
    "compiled",
    "state",
    "why_not",
]
