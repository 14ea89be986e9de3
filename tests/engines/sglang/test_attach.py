"""Real SGLang under load, started without us: attached to and let go of, with every answer as it was."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.attachable import run_folder
from tests.support.processes import wait_until
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve
from tests.support.stream_load import Load, Request, longest_gap, median_gap

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

ROUNDS, SECONDS = 3, 15


def _spans(file: Path) -> list[dict[str, Any]]:
    return [
        span
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _flags(span: dict[str, Any]) -> set[str]:
    return {one["key"] for one in span.get("attributes", ())}


@dataclass
class Round:
    """One run of the command: what it printed, and when, in nanoseconds since the epoch, it began, every
    process was woven, and it ended.
    """

    output: str
    begun_ns: int
    woven_ns: int
    ended_ns: int

    def gaps(self, load: list[Request]) -> str:
        """What the streams saw: the longest time without a chunk, and a decode step."""
        leaving_ns = self.woven_ns + SECONDS * 10**9
        spans = {
            "attaching": (self.begun_ns, self.woven_ns),
            "attached": (self.woven_ns, leaving_ns),
            "detaching": (leaving_ns, self.ended_ns),
            "after": (self.ended_ns, self.ended_ns + SECONDS * 10**9),
        }
        return "; ".join(f"{name} {_seen(load, *moments)}" for name, moments in spans.items())


def _seen(load: list[Request], begin_ns: int, end_ns: int) -> str:
    step, longest = median_gap(load, begin_ns, end_ns), longest_gap(load, begin_ns, end_ns)
    return f"{(end_ns - begin_ns) / 1e9:.1f} s, step {step * 1e3:.1f} ms, longest {longest * 1e3:.0f} ms"


def _attach(process_id: int, file: Path) -> Round:
    flags = ["--file", str(file), "--for", f"{SECONDS}s"]
    command = [sys.executable, "-m", "sgl_aspects", "attach", str(process_id), *flags]
    output, woven_ns, begun_ns = "", 0, time.time_ns()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if line.startswith("tracing at level"):
                woven_ns = time.time_ns()
    assert process.returncode == 0, output
    return Round(output, begun_ns, woven_ns, time.time_ns())


def _kill_at_work(process_id: int, file: Path) -> None:
    """`kill -9` of the command while it attaches: its guard lets go of the engine, and removes the run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sgl_aspects", "attach", str(process_id), "--file", str(file)],
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: run_folder(process) is not None)
    run = run_folder(process)
    assert run is not None
    wait_until(lambda: any(run.glob("attach/*.taken")), 300)
    process.kill()
    process.wait()
    wait_until(lambda: not run.exists(), 300)


def _resident(session: int) -> int:
    """Megabytes of all processes of a session."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(place.name)) == session:
                text = (place / "smaps_rollup").read_text()
                total += int(text.split("Rss:")[1].split()[0])
    return total >> 10


def test_three_rounds_under_sixteen_streams(tmp_path: Path) -> None:
    make_mini(tmp_path / "mini")
    with serve(tmp_path / "mini", tmp_path / "log") as server:
        load = Load(server.port, "/generate", 16)
        time.sleep(SECONDS)
        begun_ns = time.time_ns()
        time.sleep(SECONDS)
        rounds, resident = [], [_resident(server.process.pid)]
        for number in range(ROUNDS):
            rounds.append(_attach(server.process.pid, tmp_path / f"spans-{number}.jsonl"))
            time.sleep(SECONDS)
            resident.append(_resident(server.process.pid))
        _kill_at_work(server.process.pid, tmp_path / "killed.jsonl")
        rounds.append(_attach(server.process.pid, tmp_path / f"spans-{ROUNDS}.jsonl"))
        found = load.end()
    print("before:", _seen(found, begun_ns, rounds[0].begun_ns), resident, "MB")
    print(*(f"{each.output}{each.gaps(found)}" for each in rounds), sep="\n")
    _assert_same_answers(found)
    for number, each in enumerate(rounds):
        assert "NOT" not in each.output, each.output
        assert len(re.findall(r": [1-9]\d* originals are back", each.output)) == 3, each.output
        _assert_complete(_spans(tmp_path / f"spans-{number}.jsonl"), each.woven_ns)


def _assert_same_answers(found: list[Request]) -> None:
    assert [request for request in found if request.error or request.status != 200] == []
    answers: dict[str, set[str]] = {}
    for request in found:
        answers.setdefault(request.prompt, set()).add(request.text)
    assert {prompt: len(texts) for prompt, texts in answers.items() if len(texts) != 1} == {}


def _assert_complete(spans: list[dict[str, Any]], woven_ns: int) -> None:
    """Requests that began once all was woven, and ended, have every phase; none, of any kind, has failed."""
    assert [span["name"] for span in spans if span.get("status", {}).get("code") == 2] == []
    requests = [span for span in spans if span["name"].startswith("text_completion")]
    assert any("sgl_aspects.attached" in _flags(span) for span in requests), Counter(
        (span["name"], *sorted(_flags(span))) for span in requests
    )
    by_trace: dict[str, Counter[str]] = {}
    for span in spans:
        by_trace.setdefault(span["traceId"], Counter())[span["name"]] += 1
    whole = [span for span in requests if not _flags(span) & {"sgl_aspects.attached", "sgl_aspects.detached"}]
    after = [span for span in whole if int(span["startTimeUnixNano"]) > woven_ns]
    assert after
    for span in after:
        names = by_trace[span["traceId"]]
        assert {"tokenize", "queue", "prefill", "decode", "detokenize"} <= set(names), names
