"""Real SGLang under load, started without us: attached to and let go of, with every answer as it was."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
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


def _attach(process_id: int, file: Path) -> tuple[str, int]:
    """What the command printed, and when every process was woven, in nanoseconds since the epoch."""
    flags = ["--file", str(file), "--for", f"{SECONDS}s"]
    command = [sys.executable, "-m", "sgl_aspects", "attach", str(process_id), *flags]
    output, woven_ns = "", 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if line.startswith("tracing at level"):
                woven_ns = time.time_ns()
    assert process.returncode == 0, output
    return output, woven_ns


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


def _resident(process_ids: list[str]) -> int:
    """Megabytes."""
    texts = [Path(f"/proc/{process_id}/smaps_rollup").read_text() for process_id in process_ids]
    return sum(int(text.split("Rss:")[1].split()[0]) for text in texts) >> 10


def test_three_rounds_under_sixteen_streams(tmp_path: Path) -> None:
    make_mini(tmp_path / "mini")
    with serve(tmp_path / "mini", tmp_path / "log") as server:
        load = Load(server.port, "/generate", 16)
        time.sleep(SECONDS)
        moments, outputs, resident = [time.time_ns()], [], []
        for number in range(ROUNDS):
            outputs.append(_attach(server.process.pid, tmp_path / f"spans-{number}.jsonl"))
            moments.append(time.time_ns())
            time.sleep(SECONDS)
            moments.append(time.time_ns())
            resident.append(_resident(re.findall(r"process (\d+): \d+ originals", outputs[0][0])))
        _kill_at_work(server.process.pid, tmp_path / "killed.jsonl")
        outputs.append(_attach(server.process.pid, tmp_path / f"spans-{ROUNDS}.jsonl"))
        found = load.end()
    turns = [
        (median_gap(found, begin, end), longest_gap(found, begin, end))
        for begin, end in itertools.pairwise(moments)
    ]
    print([f"step {step * 1e3:.1f} ms, longest {gap * 1e3:.0f} ms" for step, gap in turns], resident, "MB")
    print(*(output for output, _ in outputs), sep="\n")
    _assert_same_answers(found)
    for number, (output, woven_ns) in enumerate(outputs):
        assert "NOT" not in output, output
        assert len(re.findall(r": [1-9]\d* originals are back", output)) == 3, output
        _assert_complete(_spans(tmp_path / f"spans-{number}.jsonl"), woven_ns)


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
