"""A real engine that answers streams while a command attaches to it, and the results of both."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.attachable import attribute_names, spans_in
from tests.support.engine_server import EngineServer
from tests.support.stream_load import Load, Request, longest_gap, median_gap

SECONDS = float(os.environ.get("ATTACHED_SECONDS", "15"))
_UNWHOLE = {"sgl_aspects.attached", "sgl_aspects.detached"}


@dataclass
class Round:
    """One run of the command: its output, and the times, in nanoseconds since the epoch, when it began, every
    process was woven, and it ended.
    """

    output: str
    file: Path
    begun_ns: int
    woven_ns: int
    ended_ns: int

    def gaps(self, load: list[Request]) -> str:
        """The streams' results: the longest time without a chunk, and a decode step."""
        leaving_ns = self.woven_ns + int(SECONDS * 1e9)
        spans = {
            "attaching": (self.begun_ns, self.woven_ns),
            "attached": (self.woven_ns, leaving_ns),
            "detaching": (leaving_ns, self.ended_ns),
            "after": (self.ended_ns, self.ended_ns + int(SECONDS * 1e9)),
        }
        return "; ".join(f"{name} {_seen(load, *moments)}" for name, moments in spans.items())

    def assert_complete(self, processes: int) -> None:
        """Check that all hooks were woven in each process, the originals are back, and spans are whole."""
        assert "NOT" not in self.output, self.output
        assert len(re.findall(r": [1-9]\d* originals are back", self.output)) == processes, self.output
        _assert_complete(spans_in(self.file), self.woven_ns)


@dataclass
class Streams:
    """An engine that answers sixteen streams all the while."""

    server: EngineServer
    load: Load
    begun_ns: int
    rounds: list[Round] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, server: EngineServer, path: str) -> Streams:
        load = Load(server.port, path, 16)
        time.sleep(SECONDS)
        streams = cls(server, load, time.time_ns(), resident=[_resident(server.process.pid)])
        time.sleep(SECONDS)
        return streams

    def attach(self, file: Path) -> None:
        """Attaches for a while; the load continues as long afterwards."""
        self.rounds.append(_attach(self.server.process.pid, file))
        time.sleep(SECONDS)
        self.resident.append(_resident(self.server.process.pid))

    def end(self, processes: int) -> None:
        """Check that no request has failed, no answer differs, and every round's spans are whole."""
        found = self.load.end()
        print("before", _seen(found, self.begun_ns, self.rounds[0].begun_ns), self.resident, "MB")
        print(*(f"{each.output}{each.gaps(found)}" for each in self.rounds), sep="\n")
        _assert_same_answers(found)
        for each in self.rounds:
            each.assert_complete(processes)


def _seen(load: list[Request], begin_ns: int, end_ns: int) -> str:
    step, longest = median_gap(load, begin_ns, end_ns), longest_gap(load, begin_ns, end_ns)
    return f"{(end_ns - begin_ns) / 1e9:.1f} s, step {step * 1e3:.1f} ms, longest {longest * 1e3:.0f} ms"


def _attach(process_id: int, file: Path) -> Round:
    flags = ["--file", str(file), "--for", f"{SECONDS:g}s"]
    command = [sys.executable, "-m", "sgl_aspects", "attach", str(process_id), *flags]
    output, woven_ns, begun_ns = "", 0, time.time_ns()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if line.startswith("tracing at level"):
                woven_ns = time.time_ns()
    assert process.returncode == 0, output
    return Round(output, file, begun_ns, woven_ns, time.time_ns())


def _resident(session: int) -> int:
    """Megabytes of all processes of a session."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(place.name)) == session:
                text = (place / "smaps_rollup").read_text()
                total += int(text.split("Rss:")[1].split()[0])
    return total >> 10


def _assert_same_answers(found: list[Request]) -> None:
    assert [request for request in found if request.error or request.status != 200] == []
    answers: dict[str, set[str]] = {}
    for request in found:
        answers.setdefault(request.prompt, set()).add(request.text)
    assert {prompt: len(texts) for prompt, texts in answers.items() if len(texts) != 1} == {}


def _assert_complete(spans: list[dict[str, Any]], woven_ns: int) -> None:
    """Check that requests without a mark have every phase, steps their requests, and that none has failed."""
    assert [span["name"] for span in spans if span.get("status", {}).get("code") == 2] == []
    requests = [span for span in spans if span["name"].startswith("text_completion")]
    assert any("sgl_aspects.attached" in attribute_names(span) for span in requests), Counter(
        (span["name"], *sorted(attribute_names(span))) for span in requests
    )
    # With an overlapped loop a step may run for a request that has just ended: a few. Steps of requests whose
    # process has no hooks any more would be thousands.
    steps = [s for s in spans if s["name"] == "scheduler.step" and int(s["startTimeUnixNano"]) > woven_ns]
    alone = [step for step in steps if not step.get("links")]
    assert len(alone) < len(steps) / 20, (len(alone), len(steps))
    by_trace: dict[str, Counter[str]] = {}
    for span in spans:
        by_trace.setdefault(span["traceId"], Counter())[span["name"]] += 1
    whole = [span for span in requests if not attribute_names(span) & _UNWHOLE]
    assert whole
    for span in whole:
        names = by_trace[span["traceId"]]
        assert {"tokenize", "queue", "prefill", "decode", "detokenize"} <= set(names), names
