"""Prints the tables, all or some; --write puts them into benchmarks/results/tables.md or another page."""

from __future__ import annotations

import argparse
import platform
from operator import itemgetter
from pathlib import Path
from statistics import median

from benchmarks import calls, spans, weaving
from benchmarks.turns import interval, publish

PAGE = Path(__file__).resolve().parent / "results" / "tables.md"
BASE = "SGLang's registry"

BUDGETS = (
    ("one AROUND", "ours, AROUND", 1, 1.0),
    ("four AROUND", "ours, AROUND", 4, 0.6),
    ("four native", "ours, native", 4, 0.4),
    ("one observer (90 ns where the registry takes 113)", "ours, observer", 1, 0.8),
)
"""A figure, its subject, the number of hooks, and its limit relative to SGLang's registry."""


def budget_table(rounds: calls.Rounds) -> str:
    """One row a budget: the lowest and the highest ratio over the kinds of calls, each with its interval."""
    lines = ["| what | of SGLang's registry | budget |", "| --- | --- | --- |"]
    for what, subject, depth, budget in BUDGETS:
        found = [interval(calls.ratios(rounds, subject, BASE, call, depth)) for call in calls.CALLS]
        least, most = (
            f"{middle:.2f} ({low:.2f} to {high:.2f})"
            for low, middle, high in (pick(found, key=itemgetter(1)) for pick in (min, max))
        )
        lines.append(f"| {what} | {least}, to {most} | {budget} |")
    return "\n".join(lines)


def call_table(rounds: calls.Rounds) -> str:
    """One row a call and depth, one column a subject: nanoseconds and the ratio to SGLang's registry."""
    subjects = [name for name, hook in calls.SUBJECTS.items() if hook is not None]
    lines = ["| call | hooks | " + " | ".join(subjects) + " |", "| --- " * (len(subjects) + 2) + "|"]
    for call in calls.CALLS:
        for depth in calls.DEPTHS:
            cells = []
            for subject in subjects:
                ratio = median(calls.ratios(rounds, subject, BASE, call, depth))
                cells.append(f"{median(rounds[subject, call, depth]):.0f} ({ratio:.2f})")
            lines.append(f"| {call} | {depth} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _calls() -> str:
    rounds = calls.measure()
    return f"""## Nanoseconds a call

All subjects hooked in one process, rounds interleaved, medians. A no-op hook each; in brackets the ratio to
SGLang's own hook registry in the same round.

{call_table(rounds)}

{budget_table(rounds)}
"""


def _weaving() -> str:
    rows = [f"| {row.what} | {row.milliseconds:.2f} | {row.budget} |\n" for row in weaving.measure()]
    head = "## Weaving, rebinding, importing\n\n| what | ms | budget |\n| --- | --- | --- |\n"
    return head + "".join(rows)


def _spans() -> str:
    return f"""## A span, by tracer

Each tracer in a process of its own, rounds interleaved, medians of processor time; in brackets the ratio to
the OpenTelemetry SDK with OTLP. The exporters send to a receiver on loopback; "exported" is what arrived.

{spans.table()}
"""


SECTIONS = {"calls": _calls, "weaving": _weaving, "spans": _spans}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all")
    parser.add_argument("--write", type=Path, nargs="?", const=PAGE, metavar="PAGE", help=f"into {PAGE.name}")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.sections} - {*SECTIONS})
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    python = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    page = f"""# Performance

Made by `{" ".join(["python -m benchmarks", *arguments.sections])}`: {python}. A Python built without
profile-guided optimisation, as pyenv's are, takes some 15 % more for a span.
"""
    for name in arguments.sections or SECTIONS:
        page += "\n" + SECTIONS[name]()
    publish(page, arguments.write)


if __name__ == "__main__":
    main()
