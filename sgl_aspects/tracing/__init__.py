"""The built-in aspects that trace an engine, and what records and exports their spans.

from sgl_aspects.tracing import attach

with attach(level=3, endpoint="http://localhost:4318") as session:
    with Engine(model_path) as engine:
        engine.generate("The sky is")
print(session.summary)
"""

from sgl_aspects.tracing.session import TraceSession, attach
from sgl_aspects.tracing.summary import TraceSummary

__all__ = ["TraceSession", "TraceSummary", "attach"]
