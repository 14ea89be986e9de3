"""The built-in aspects that trace an engine, and the code that records and exports their spans.

from sgl_aspects.tracing import attach

with attach(level=3, endpoint="http://localhost:4318") as session:
    with Engine(model_path) as engine:
        engine.generate("The sky is")
print(session.summary)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_aspects.tracing.collect.summary import TraceSummary
    from sgl_aspects.tracing.session import TraceSession, attach

__all__ = ["TraceSession", "TraceSummary", "attach"]


def __getattr__(name: str) -> Any:
    # Imported by every process of every engine to check whether tracing is on: load the rest on demand only.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sgl_aspects.tracing import session
    from sgl_aspects.tracing.collect import summary

    found = getattr(summary if name == "TraceSummary" else session, name)
    globals()[name] = found
    return found
