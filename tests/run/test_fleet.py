"""Levels for a fleet: collectors read rules in a file or at an address, and their runs follow them."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import Control, run_control
from sgl_aspects.run.fleet import VARIABLE, FleetControl, parse
from sgl_aspects.tracing import TraceSession, attach
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from tests.support.otlp_receiver import serving
from tests.support.processes import wait_until


class Rules:
    """An address with rules; ``redirect``: where it sends everybody instead."""

    def __init__(self) -> None:
        self.text, self.redirect = b"{}", ""
        self.reads = 0


@contextmanager
def address() -> Iterator[tuple[str, Rules]]:
    rules = Rules()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            rules.reads += 1
            self.send_response(302 if rules.redirect else 200)
            if rules.redirect:
                self.send_header("location", rules.redirect)
            self.end_headers()
            self.wfile.write(rules.text)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/rules", rules


def rules(*each: Mapping[str, object]) -> bytes:
    return json.dumps({"rules": each}).encode()


@contextmanager
def session(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceSession]:
    """A traced process at level 1 whose collector reads rules at ``source``."""
    monkeypatch.setenv(VARIABLE, source)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mini-7")
    with attach(level=1, file=str(folder / "spans.jsonl")) as found:
        yield found


def test_a_run_follows_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rules.json"
    file.write_bytes(rules({"level": 2}))
    with session(tmp_path, str(file), monkeypatch) as run:
        wait_until(lambda: run.recorder.level == 2)
        later = Control(2, 2)
        wait_until(lambda: run_control(run.run_folder or "") == later)  # for processes that start later
        file.write_bytes(rules({"level": 0}))
        wait_until(lambda: run.recorder.level == 0)
        file.write_bytes(rules({"sample": 0.5, "level": 3}))
        wait_until(lambda: run.recorder.level == 3)


def test_the_first_rule_that_fits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = socket.gethostname()
    with address() as (url, served):
        served.text = rules(
            {"service": "other-*", "level": 4},
            {"service": "mini-*", "host": "nowhere", "level": 4},
            {"role": "decode", "level": 4},
            {"service": "mini-?", "host": host[:1] + "*", "level": 2},
            {"level": 3},
        )
        with session(tmp_path, url, monkeypatch) as run:
            wait_until(lambda: run.recorder.level == 2)


def test_wrong_rules_leave_the_last_right_ones_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with address() as (url, served):
        served.text = rules({"level": 2})
        with session(tmp_path, url, monkeypatch) as run:
            wait_until(lambda: run.recorder.level == 2)
            served.text = rules({"level": 9})
            before = served.reads
            wait_until(lambda: served.reads > before + 2)
            assert run.recorder.level == 2
    printed = capfd.readouterr().err
    assert printed.count("rule 1: level 9: choose 0 (off) to 4") == 1


def test_nobody_elses_file_is_followed(tmp_path: Path) -> None:
    """Nor one that others may write, nor what is no file, nor another address than the one that was named."""
    file = tmp_path / "rules.json"
    file.write_bytes(rules({"level": 4}))
    file.chmod(0o666)
    os.mkfifo(tmp_path / "fifo")
    with address() as (url, served), address() as (other, others):
        served.redirect, others.text = other, rules({"level": 4})
        for number, (source, problem) in enumerate(
            [(str(file), "others"), (str(tmp_path / "fifo"), "not a file"), (url, "302")]
        ):
            folder = tmp_path / str(number)
            folder.mkdir()
            recorder = RingRecorder(str(folder), 1)
            assert recorder.open()
            said: queue.SimpleQueue[str] = queue.SimpleQueue()
            control = FleetControl(str(folder), source, dict, said.put)
            assert problem in said.get(timeout=60)
            control.close()
            assert recorder.level == 1
            recorder.close()
        assert not others.reads


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"level 2", "not rules"),
        (b"[]", "not rules"),
        (b'{"rules": 3}', "not rules"),
        (b"[" * 100_000, "not rules"),
        (b'{"rules": [3]}', "rule 1: not an object"),
        (rules({}, {"levle": 2}), "rule 2: unknown levle; choose from service, host, role, level, sample"),
        (rules({"level": True}), "rule 1: level True"),
        (rules({"sample": 2}), "rule 1: sample 2: write a number from 0 to 1"),
        (rules({"service": 7}), "rule 1: service 7"),
        (rules({"service": "[" * 100_000}), "rule 1: service '[[[["),  # minutes to compile
        (rules(*[{"service": f"x{each}"} for each in range(2000)]), "2000 rules: write at most 1000"),
    ],
)
def test_each_mistake_is_named(text: bytes, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert error in str(raised.value)


@contextmanager
def following(folder: Path, source: str) -> Iterator[tuple[RingRecorder, queue.SimpleQueue[str]]]:
    """A recorder at level 1 in ``folder`` whose run follows ``source``, and what is reported."""
    recorder = RingRecorder(str(folder), 1)
    assert recorder.open()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    control = FleetControl(str(folder), source, dict, said.put)
    yield recorder, said
    control.close()
    recorder.close()


def test_a_damaged_ring_does_not_end_the_control_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "0-short.ring").write_bytes(b"short")
    file = tmp_path / "rules.json"
    file.write_bytes(rules({"level": 2}))
    with following(tmp_path, str(file)) as (recorder, _):
        wait_until(lambda: recorder.level == 2)
        file.write_bytes(rules({"level": 3}))
        wait_until(lambda: recorder.level == 3)


def test_what_is_in_force_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring has 32 bits for the share: it reads back as 0.10000000009. Levels of their own are left."""
    monkeypatch.setattr("sgl_aspects.run.fleet._SECONDS", 0.05)
    others, written = RingRecorder(str(tmp_path), 3), tmp_path / "control"
    assert others.open()
    with address() as (url, served):
        served.text = rules({"sample": 0.1})
        with following(tmp_path, url) as (recorder, _):
            wait_until(written.exists)
            before, reads = written.stat().st_mtime_ns, served.reads
            wait_until(lambda: served.reads > reads + 3)
            assert written.stat().st_mtime_ns == before
            assert (recorder.level, others.level) == (1, 3)
    others.close()


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_never_comes_to_an_end_is_told(
    start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a byte now and then, so that no single read takes too long."""
    monkeypatch.setattr("sgl_aspects.run.fleet._PATIENCE_SECONDS", 0.5)
    over = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(start)
            while not over.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=drip, args=(listening,))
        server.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/rules"
        with following(tmp_path, url) as (_, said):
            assert f"{url}: no whole answer within 0.5 s" in said.get(timeout=30)
        over.set()
        server.join()


def test_what_an_address_keeps_secret_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with session(tmp_path, f"http://me:hunter2@127.0.0.1:{port}/rules?token=sesame", monkeypatch):
        printed = ""

        def is_told() -> bool:
            nonlocal printed
            printed += capfd.readouterr().err
            return "what is recorded stays as it is" in printed

        wait_until(is_told)
    assert "hunter2" not in printed
    assert "sesame" not in printed
