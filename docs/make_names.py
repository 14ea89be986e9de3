"""Makes docs/names/README.md: every name that a backend gets to see, and whether it may change.

python docs/make_names.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opentelemetry.metrics import NoOpMeter

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.reported_metrics import CollectorMetrics
from sgl_aspects.tracing.export.metrics import EngineMetrics
from sgl_aspects.tracing.records import SpanType

PAGE = Path(__file__).parent / "names" / "README.md"
HEAD = """# Names

Every span, attribute and metric. `docs/make_names.py` makes this page; [Tracing](../tracing.md) says what
they mean.

- *conventions*: as OpenTelemetry's conventions have it. It changes when they do; its old name then stays
  beside it, unless `OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental` asks for the newest alone.
- *stable*: ours. Name, type, unit and meaning stay. One that has to go is written beside its successor for
  one minor version, and the changelog says so.
- *may change*: ours, and close to an engine's inside. The changelog says what changed.

OpenTelemetry calls all of its conventions for GenAI *in development*. `gen_ai.request.id` and
`gen_ai.latency.*` are not among them.
"""
#: In the conventions' namespace, but not theirs.
OURS = re.compile(r"sgl_aspects\.|gen_ai\.latency\.|gen_ai\.request\.id$")
STABLE, MAY_CHANGE, CONVENTIONS = "stable", "may change", "conventions"


class Recording(NoOpMeter):
    """Keeps what is created: kind, unit and description by name."""

    def __init__(self) -> None:
        super().__init__("names")
        self.found: dict[str, tuple[str, str, str]] = {}

    def create_histogram(self, name: str, unit: str = "", description: str = "", **more: Any) -> Any:
        self.found[name] = "histogram", unit, description
        return super().create_histogram(name, unit, description)

    def create_observable_counter(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        self.found[name] = "counter", unit, description

    def create_observable_gauge(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        self.found[name] = "gauge", unit, description


def attributes() -> Iterator[tuple[str, str]]:
    """Yield each attribute, and which spans or metrics have it by the section of the schema."""
    section = ""
    for line in inspect.getsource(schema).splitlines():
        if title := re.match(r"# -- (.*?) -+$", line):
            section = title[1]
        elif section.startswith("attributes of ") and (constant := re.match(r"([A-Z_]+) = ", line)):
            on, value = section.removeprefix("attributes of "), getattr(schema, constant[1])
            if constant[1] == "CAUSE_PREFIX":
                yield f"{value}*", on
            elif isinstance(value, tuple):
                yield from ((schema.REQUEST_PREFIX + name, on) for name in value)
            elif constant[1] != "REQUEST_PREFIX":
                yield value, on


def spans() -> dict[str, tuple[SpanType, bool]]:
    """Return the types by name, and whether each is of level 4, or of a profile, only."""
    found = {each.name: (each, False) for _, each in inspect.getmembers(schema) if isinstance(each, SpanType)}
    found |= {each.name: (each, False) for each in schema.PREPARATIONS.values()}
    return found | {each.name: (each, True) for each in (schema.KERNEL, *schema.DETAILS.values())}


def metrics() -> dict[str, tuple[str, str, str]]:
    meter = Recording()
    made = EngineMetrics(meter, targets=(1.0, 1.0))
    of_collector: Any = SimpleNamespace(engine=made, _readers=())
    nothing_read: Any = None
    CollectorMetrics.watch(of_collector, nothing_read, list, [])
    return meter.found


def page() -> str:
    """Return the whole page."""
    types = spans()
    rows = ["## Spans", "", "| span | promise |", "| --- | --- |"]
    rows += [f"| `{each.name}` | {MAY_CHANGE if is_4 else STABLE} |" for each, is_4 in types.values()]
    rows[rows.index(f"| `request` | {STABLE} |")] = "| `{operation} {model}`: a request | conventions |"
    rows += ["", "## Attributes", "", "| attribute | of | promise |", "| --- | --- | --- |"]
    for name, section in sorted(attributes()):
        of = {each.name: is_4 for each, is_4 in types.values() if name in each.attributes}
        of |= {"request": False} if section == "requests" else {}
        promise = MAY_CHANGE if (of and all(of.values())) or name.endswith("*") else STABLE
        where = (
            section if not of or of.keys() == {"request"} else ", ".join(f"`{each}`" for each in sorted(of))
        )
        rows.append(f"| `{name}` | {where} | {promised(name, promise)} |")
    rows += ["", "## Metrics", "", "| metric | kind, unit | | promise |", "| --- | --- | --- | --- |"]
    for name, (kind, unit, text) in sorted(metrics().items()):
        rows.append(f"| `{name}` | {kind}, {unit} | {text} | {promised(name, STABLE)} |")
    return HEAD + "\n" + "\n".join(rows) + "\n"


def promised(name: str, otherwise: str) -> str:
    return otherwise if OURS.match(name) else CONVENTIONS


if __name__ == "__main__":
    PAGE.write_text(page())
