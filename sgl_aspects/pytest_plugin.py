"""Aspects in pytest, wherever sgl-aspects is installed: the fixtures ``woven`` and ``captured_spans``.

    def test_what_is_hard_to_make_fail(woven):
        woven(failing)                       # removed when the test ends

    def test_how_often_it_ran(captured_spans):
        captured_spans.trace("pkg.mod:f")    # an own function; engines are traced anyway
        ...
        assert len(captured_spans("f")) == 3

Nothing is imported, woven or traced for tests that use neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sgl_aspects import Handle
    from sgl_aspects.analysis.spans import Span
    from sgl_aspects.tracing import TraceSession


@pytest.fixture
def woven() -> Iterator[Callable[..., Handle]]:
    """Return a function that weaves hooks like ``aspects.weave``, until the end of the test."""
    import sgl_aspects as aspects

    handles: list[Handle] = []

    def weave(*hooks: Any) -> Handle:
        handles.append(aspects.weave(*hooks))
        return handles[-1]

    yield weave
    for handle in reversed(handles):
        handle.remove()


class CapturedSpans:
    """Return the spans of this process and of those that it starts during the test.

    Calling it ends the tracing and returns them by start time, only those of one name if ``name`` is given.
    """

    def __init__(self, session: TraceSession, file: Path) -> None:
        self._session = session
        self._file = file
        self._handles: list[Handle] = []

    def trace(
        self, target: str, *, name: str | None = None, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Trace each call of a function in this process, like ``[[trace]]`` in `aspects.toml`."""
        import sgl_aspects as aspects
        from sgl_aspects import config
        from sgl_aspects.tracing.observers.function import FunctionObserver

        table: dict[str, Any] = {"target": target, "attributes": dict(attributes or {}), "required": True}
        (declared,) = config.parse(
            {"trace": [table | ({"name": name} if name else {})]}, "captured_spans"
        ).traces
        aspect = FunctionObserver(self._session.recorder, declared)
        advice = aspects.Advice(declared.target, aspects.HookType.OBSERVE, aspect, required=True)
        self._handles.append(aspects.weave(advice))

    def __call__(self, name: str | None = None) -> list[Span]:
        from sgl_aspects.analysis.spans import read_spans

        self.close()
        return [span for span in read_spans(self._file) if name is None or span.name == name]

    def close(self) -> None:
        """Remove the hooks and end the tracing; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
        problem = self._session.close().problem
        if problem:
            pytest.fail(f"captured_spans: {problem}")


@pytest.fixture
def captured_spans(tmp_path: Path) -> Iterator[CapturedSpans]:
    """Traces engines at level 3, and functions passed to ``captured_spans.trace``, until it is called."""
    from sgl_aspects.tracing import attach

    file = tmp_path / "captured.otlp.jsonl"
    captured = CapturedSpans(attach(level=3, exporters=["otlp-json-file"], file=str(file)), file)
    yield captured
    captured.close()
