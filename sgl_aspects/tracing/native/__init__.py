"""The hot path of a decode step in C where there is a compiler, else in Python: the same records either way.

    decode_path.c   the plain case of observers/steps.py and observers/forward.py
    watched_call.c  the call of a woven function that only one of these observes
    build.py        compiles it, once for a version of it and of Python, into the user's cache
    fields.py       its replacement where it cannot be compiled

``SGL_ASPECTS_NATIVE``: ``auto`` (the default), ``cached`` (only what has been compiled already), ``off``.
docs/performance-steps.md has the measurements that justify it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_aspects.tracing.native.build import load

#: The compiled module; None: everything runs in Python.
compiled: Any = load()

if compiled is None or TYPE_CHECKING:
    from sgl_aspects.tracing.native.fields import Blocks, ForwardPath, Mark, Slots, Step, StepPath, Tracker
else:
    Blocks, Slots, Step, Tracker = compiled.Blocks, compiled.Slots, compiled.Step, compiled.Tracker
    StepPath, ForwardPath, Mark = compiled.StepPath, compiled.ForwardPath, compiled.Mark

#: Calls the hooks of a woven function in C; None: Python calls them.
WatchedCall: Any = getattr(compiled, "WatchedCall", None)

__all__ = ["Blocks", "ForwardPath", "Mark", "Slots", "Step", "StepPath", "Tracker", "WatchedCall", "compiled"]
