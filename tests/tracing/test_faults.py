"""A traced server under sixteen streams: a process of it is killed or stopped, a resource is used up.

Answers that ended have their spans, each under one id; what is lost is counted. `make test-faults` runs this
with the other tests of faults and attacks.
"""

from __future__ import annotations

import http.client
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sgl_aspects.run.collector import collector_state
from sgl_aspects.run.folder import runs
from tests.support.http_server import Server, serving
from tests.support.otlp_receiver import Span
from tests.support.processes import output_of, python, wait_until, wait_until_gone
from tests.support.sessions import read_file
from tests.support.tiny_models import llama_fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS = 16
LONG = ("--shutdown-timeout", "240", "--max-total-tokens", "20000")


model = llama_fixture(max_position_embeddings=4096)


@contextmanager
def traced(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    run = (sys.executable, "-m", "sgl_aspects", "run", *options, "--level", "2", "--summary")
    file = ("--file", str(folder / "traces.jsonl"), "--")
    settings = {"OTEL_BSP_SCHEDULE_DELAY": "500"}
    with serving(model, folder / "log", *LONG, prefix=(*run, *file), environment=settings) as server:
        yield server


def stream(server: Server, number: int, tokens: int = 300) -> str:
    """The answer's last event; "" if the connection broke."""
    body = {
        "model": "tiny",
        "prompt": f"{number} fox",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    caller = {"traceparent": f"00-{number + 1:032x}-00f067aa0ba902b7-01"}
    try:
        status, text = server.request("POST", "/v1/completions", body, caller)
    except (OSError, http.client.HTTPException):
        return ""
    return str(text).strip().rpartition("data: ")[2] if status == 200 else ""


def spans(folder: Path) -> dict[str, Span]:
    """The spans of the file by id. A span that is in it twice is the same twice.

    But for its resource: the first collector may not have known the served model yet.
    """
    found: dict[str, Span] = {}
    for span in read_file(folder / "traces.jsonl"):
        before = found.setdefault(span.span_id, span)
        assert replace(span, resource=before.resource) == before
    return found


def collector_of(server: Server) -> int:
    for folder in runs():
        state = collector_state(folder)
        if state is not None and state.is_alive and list(Path(folder).glob(f"{server.process.pid}-*.ring")):
            return state.process_id
    raise AssertionError("the server has no collector")


@pytest.mark.parametrize("moment", ["at first", "in between", "at the end"])
@pytest.mark.parametrize("victim", ["collector", "scheduler", "server"])
def test_a_kill_under_sixteen_streams(model: Path, tmp_path: Path, victim: str, moment: str) -> None:
    with traced(model, tmp_path) as server, ThreadPoolExecutor(STREAMS) as pool:
        collector = collector_of(server)
        victims = {"collector": collector, "scheduler": server.scheduler_pid, "server": server.process.pid}
        answers = [pool.submit(stream, server, number) for number in range(STREAMS)]
        if moment != "at first":
            done = 1 if moment == "in between" else STREAMS
            wait_until(lambda: sum(answer.done() for answer in answers) >= done, 120)
        time.sleep(random.random() / 10)
        os.kill(victims[victim], signal.SIGKILL)
        whole = {number for number, answer in enumerate(answers) if answer.result(120) == "[DONE]"}
        if victim == "collector":
            assert len(whole) == STREAMS
            assert server.stop() == 0
        server.process.wait(60)
        # The run's processes are gone: its collector, or the next one, delivers the rest and ends.
        wait_until(
            lambda: (
                not any(
                    str(server.process.pid) in path.name
                    for folder in runs()
                    for path in Path(folder).glob("*.ring")
                )
            )
        )
    roots = {int(span.trace_id, 16) - 1: span for span in spans(tmp_path).values() if span.kind == 2}
    assert whole <= set(roots)
    for number in whole - ({*range(STREAMS)} if victim == "server" else set()):
        assert not roots[number].is_error
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_sigterm_to_every_process_and_the_collector_as_from_systemd(model: Path, tmp_path: Path) -> None:
    """Answers under way may take longer than a collector waits after a second signal."""
    with traced(model, tmp_path) as server, ThreadPoolExecutor(STREAMS) as pool:
        collector = collector_of(server)
        answers = [pool.submit(stream, server, number, 3000) for number in range(4)]
        running = "sgl_aspects_scheduler_running_requests"
        wait_until(lambda: server.metrics()[running] == len(answers))
        for process_id in (collector, server.scheduler_pid, server.process.pid):
            os.kill(process_id, signal.SIGTERM)
        assert [answer.result(240) for answer in answers] == ["[DONE]"] * len(answers)
        assert server.process.wait(60) == 0
        wait_until_gone(collector)
    assert [span.name for span in spans(tmp_path).values() if span.is_error] == []
    assert len([span for span in spans(tmp_path).values() if span.kind == 2]) == len(answers)


def test_a_collector_that_is_stopped_delays_no_answer_and_loses_nothing(model: Path, tmp_path: Path) -> None:
    with traced(model, tmp_path) as server, ThreadPoolExecutor(STREAMS) as pool:
        collector = collector_of(server)
        os.kill(collector, signal.SIGSTOP)
        try:
            assert set(pool.map(stream, [server] * STREAMS, range(STREAMS))) == {"[DONE]"}
        finally:
            os.kill(collector, signal.SIGCONT)
        assert server.stop() == 0
        wait_until_gone(collector)
    found = [span for span in spans(tmp_path).values() if span.kind == 2]
    assert len(found) == STREAMS
    assert "records lost" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_AS"])
def test_a_collector_without_descriptors_or_memory_costs_no_answer(
    model: Path, tmp_path: Path, limit: str
) -> None:
    with traced(model, tmp_path) as server, ThreadPoolExecutor(STREAMS) as pool:
        collector = collector_of(server)
        used = psutil.Process(collector)
        value = used.num_fds() if limit == "RLIMIT_NOFILE" else used.memory_info().vms + (1 << 20)
        resource.prlimit(collector, getattr(resource, limit), (value, value))
        assert set(pool.map(stream, [server] * STREAMS, range(STREAMS))) == {"[DONE]"}
        assert server.stop() == 0
        server.process.wait(60)


def test_address_and_undefined_behaviour_sanitizers_find_nothing_in_the_extension(tmp_path: Path) -> None:
    library = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if library.returncode or not os.path.isabs(library.stdout.strip()):
        pytest.skip("there is no compiler with address sanitizer here")
    root = Path(__file__).resolve().parents[2]
    copied = ["sgl_aspects", "runtime", "platforms", "tests", "examples", "benchmarks"]
    copied += ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
    subprocess.run(["cp", "-a", *(str(root / name) for name in copied), str(tmp_path)], check=True)
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
    build = ("setup.py", "build_ext", "--inplace", "--force")
    output_of(python(*build, cwd=tmp_path, CFLAGS=flags, LDFLAGS=flags))
    environment = {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # of the interpreter's own, at its end
        "PYTHONPATH": str(tmp_path),
        "PYTHONMALLOC": "malloc",
    }
    tests = ["tests/tracing/test_native.py", "tests/tracing/test_watched_call.py"]
    result = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=tmp_path, **environment)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "runtime error:" not in result.stdout + result.stderr
    assert "AddressSanitizer" not in result.stdout + result.stderr
