"""``sgl-aspects top``: live numbers from rings, the screen at several widths, the program in a terminal."""

from __future__ import annotations

import asyncio
import html
import io
import json
import multiprocessing
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import ioctl
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sgl_aspects.run.control import OFFSET
from sgl_aspects.tracing import context
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import RequestBegin, RequestSeen
from sgl_aspects.tracing.schema import DECODE, DECODE_LATENTS, DENOISE, ENCODE, QUEUE, REQUEST, STEP
from sgl_aspects.view.live import LiveRun, Second
from sgl_aspects.view.top_screen import View, screen, spark
from tests.support import workers
from tests.support.processes import command, error_of, output_of

spawn = multiprocessing.get_context("spawn")


@dataclass
class Served:
    folder: Path
    connection: Connection
    process: multiprocessing.process.BaseProcess

    def end(self) -> None:
        self.connection.send("end")
        self.process.join(60)


def start(folder: Path) -> Served:
    connection, its_end = spawn.Pipe()
    process = spawn.Process(target=workers.serve_like_an_engine, args=(str(folder), its_end))
    process.start()
    assert connection.poll(60)
    connection.recv()
    return Served(folder, connection, process)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "run"
    folder.mkdir()
    served = start(folder)
    yield served
    served.process.kill()
    served.process.join(60)


@pytest.fixture
def live(served: Served) -> Iterator[LiveRun]:
    live = LiveRun(served.folder)
    live.poll()
    yield live
    live.close()


def shown(live: LiveRun, width: int, height: int = 40, view: View | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=False)
    console.print(screen(live, live.controls(), width, height, view or View()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_numbers_of_a_run(live: LiveRun) -> None:
    assert live.finished_requests == 2
    assert [request.id for request in live.open.values()] == ["open"]
    finished = {request.id: request for second in live.seconds.values() for request in second.finished}
    assert finished["quick"].seconds(0) == pytest.approx(2.0)
    assert live.time_per_output_token(finished["quick"]) == pytest.approx(0.05)
    assert live.phases["quick"].until(0) == pytest.approx({"queue": 1.0, "prefill": 0.5, "decode": 0.5})
    assert live.phases["open"].current == "decode"
    (gauges,) = live.gauges.values()
    assert (gauges.waiting, gauges.running, gauges.kv_usage) == (2, 1, 0.5)
    assert sum(len(times) for second in live.seconds.values() for times in second.steps.values()) == 20


@pytest.mark.parametrize("announced", [True, False])
def test_an_answer_in_one_piece_has_the_schedulers_first_token(announced: bool, tmp_path: Path) -> None:
    recorder, start = RingRecorder(str(tmp_path), level=3), time.monotonic_ns() - 3_000_000_000
    request, key, decode = recorder.new_id(), recorder.new_id(), recorder.new_id()
    recorder.write(RequestBegin(request, "one", start, *context.new(), "chat tiny", {}))
    recorder.write(RequestSeen(key, "one", start))
    first = start + 1_250_000_000
    if announced:
        recorder.announce(DECODE, decode, key, key, first)
    values: list[Any] = ["one", ["stop"], None, 100, 8, 0, None, None]
    recorder.spans(REQUEST)(request, request, 0, start, first + 700_000_000, values)
    recorder.spans(DECODE)(decode, key, key, first, first + 700_000_000, [8, "stop"])  # read last
    live = LiveRun(tmp_path)
    live.poll()
    text = shown(live, 140)
    live.close()
    recorder.close()
    assert re.search(r"^time to first token +1\.25 s", text, re.MULTILINE)
    assert re.search(r"^time per output token +100 ms", text, re.MULTILINE)
    assert re.search(r"1\.25 s +8 +one", text)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_screen(live: LiveRun, width: int) -> None:
    text = shown(live, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in text.replace("\x1b[0m", "")
    assert "slow·[31m one"[: 10 if width < 120 else 99] in text
    assert "queue prefill decode" in text or width < 80
    rows = [line for line in lines if re.search(r"quick|slow|open ", line)]
    assert [re.search(r"\b(open|slow|quick)", row.split("█")[-1]).group() for row in rows] == [  # type: ignore[union-attr]
        "open",
        "slow",
        "quick",
    ]
    assert re.search(r"^duration +3\.50 s +4\.70 s +4\.97 s +5\.00 s", text, re.MULTILINE)
    assert re.search(r"decode +[\d.]+ +3 +20\.0 ms", text)
    if width >= 80:
        assert f"process {next(iter(live.controls()))} level 3 (+ forward)" in text


def test_parts_of_steps_are_shares_of_the_seconds_that_recorded_them(live: LiveRun) -> None:
    """A level that is turned up in the middle does not count the steps before."""
    now = int(time.time())
    live.seconds.clear()
    for ago in range(4):
        live.seconds[now - ago] = Second(
            steps={"decode": [0.1] * 8}, parts={"forward": 0.6} if ago < 2 else {"schedule": 0.08}
        )
    text = shown(live, 140)
    assert "forward 75%" in text
    assert "schedule 10%" in text


def test_a_short_terminal_shows_fewer_requests(live: LiveRun) -> None:
    assert len(shown(live, 80, 24).splitlines()) <= 26
    assert "quick" in shown(live, 80, 10)


def test_processes_come_and_go(served: Served, live: LiveRun) -> None:
    second = start(served.folder)
    live.poll()
    assert len(live.rings) == 2
    assert live.finished_requests == 4
    second.process.kill()
    second.process.join(60)
    live.poll()
    assert len(live.rings) == 1
    assert not live.has_ended()
    for ring in served.folder.glob("*.ring"):
        ring.unlink()
    live.poll()  # the files are gone, the process is not
    assert not live.has_ended()
    served.end()
    live.poll()
    assert live.has_ended()
    assert "tiny" in shown(live, 80)


def test_what_is_being_made_or_damaged_is_passed_over(served: Served, live: LiveRun) -> None:
    (served.folder / "1-half.ring").write_bytes(b"SGLARING")
    (served.folder / "2-empty.ring").touch()
    live.poll()
    assert len(live.rings) == 1


def test_a_spark_is_as_high_as_its_value() -> None:
    assert spark([0, 0]) == ""
    assert spark([0, 3.5, 7]) == "▁▅█"
    assert spark([0.5], 1.0) == "▅"


def test_once_without_a_terminal(served: Served) -> None:
    printed = output_of(command("top", "--run", str(served.folder), "--once"))
    assert "Slowest requests" in printed
    assert "level 3" in printed


def test_a_run_that_has_ended(served: Served, tmp_path: Path) -> None:
    served.end()
    assert f"sgl-aspects report {served.folder}" in error_of(command("top", "--run", str(served.folder)))
    assert command("top", "--run", str(tmp_path / "absent")).returncode == 2


def test_keys_change_what_is_recorded(served: Served, live: LiveRun) -> None:
    from textual.widgets import Static

    from sgl_aspects.cli.top_app import TopApp

    async def press() -> None:
        async with TopApp(live, 0.05).run_test(size=(100, 40)) as pilot:
            for key, level in (("1", 1), ("0", 0), ("3", 3)):
                await pilot.press(key)
                (control,) = live.controls().values()
                assert control.level == level
            await pilot.press("k")
            (ring,) = live.folder.glob("*.ring")
            assert ring.read_bytes()[OFFSET : OFFSET + 2] == b"\3\1"
            (request,) = live.folder.glob("*.request")
            assert json.loads(request.read_text())["steps"] == 1
            await pilot.press("s")
            (control,) = live.controls().values()
            assert control.sample == pytest.approx(0.1, abs=1e-6)
            await pilot.press("p")
            await pilot.resize_terminal(60, 20)
            await pilot.pause()
            assert pilot.app.query_one("#screen", Static).size.width <= 60
            await pilot.press("q")

    asyncio.run(press())


def test_requests_are_sorted_and_one_is_chosen_by_keys(live: LiveRun) -> None:
    from textual.pilot import Pilot

    from sgl_aspects.cli.top_app import TopApp

    async def shown_by(pilot: Pilot[None]) -> str:
        await pilot.pause()
        return html.unescape(pilot.app.export_screenshot(simplify=True)).replace("\xa0", " ")

    async def press() -> None:
        async with TopApp(live, 60.0).run_test(size=(120, 45)) as pilot:
            assert "Slowest requests" in await shown_by(pilot)
            await pilot.press("down")  # the slowest is open, in decode
            assert f"why open {live.folder}"[:60] in await shown_by(pilot)
            await pilot.press("down", "down", "down")
            found = await shown_by(pilot)
            assert "why quick" in found
            assert re.search(r"queue\W.*1\.00 s", found, re.DOTALL)
            await pilot.app.workers.wait_for_complete()  # which read its causes
            assert "the scheduler ran no step" in await shown_by(pilot)
            await pilot.press("escape", "o")
            found = await shown_by(pilot)
            assert "Requests, late first token first" in found
            assert "why" not in found
            await pilot.press("question_mark")
            assert "level of tracing" in await shown_by(pilot)

    asyncio.run(press())


def test_in_a_terminal_it_ends_with_the_run(served: Served) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    arguments = [sys.executable, "-m", "sgl_aspects", "top", "--run", str(served.folder)]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as program:
        seen = read_until(ours, "Slowest requests")
        assert "\x1b[?1049h" in seen  # a screen of its own
        served.end()
        seen = read_until(ours, "requests finished.")
        assert "\x1b[?1049l" in seen
        assert "The run has ended. 2 requests" in seen
        assert program.wait(60) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    os.close(ours)


def read_until(descriptor: int, text: str) -> str:
    seen, deadline = "", time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([descriptor], [], [], 0.2)[0]:
            seen += os.read(descriptor, 65536).decode("utf-8", "replace")
    return seen


def test_a_request_keeps_its_phases_where_its_detokenizer_has_it_too(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path), level=3)
    start, ms = time.monotonic_ns() - 1_000_000_000, 1_000_000
    request, key = recorder.new_id(), recorder.new_id()
    recorder.write(RequestBegin(request, "one", start, *context.new(), "chat tiny", {}))
    recorder.write(RequestSeen(key, "one", start))
    recorder.spans(QUEUE)(recorder.new_id(), key, key, start, start + 200 * ms, (None,))
    recorder.write(RequestSeen(recorder.new_id(), "one", start + 300 * ms))
    recorder.announce(DECODE, recorder.new_id(), key, key, start + 300 * ms)
    live = LiveRun(tmp_path)
    live.poll()
    phases = live.phases["one"]
    live.close()
    assert (phases.current, phases.seconds) == ("decode", {"queue": 0.2})


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [("", None, ""), ("abort", None, "left"), ("ValueError", 400, "refused"), ("error", 500, "failed")],
)
def test_only_the_server_fails(error: str, status: int | None, outcome: str, tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path), level=3)
    request, start = recorder.new_id(), time.monotonic_ns() - 1_000_000_000
    recorder.write(RequestBegin(request, "one", start, *context.new(), "chat tiny", {}))
    values = [None] * (len(REQUEST.attributes) - 1)
    recorder.spans(REQUEST)(request, request, 0, start, start + 1, [*values, status], error)
    live = LiveRun(tmp_path)
    live.poll()
    (ended,) = [each for second in live.seconds.values() for each in second.finished]
    live.close()
    assert (ended.outcome, ended.is_error) == (outcome, outcome == "failed")


def test_what_a_client_names_acts_on_no_terminal_and_on_no_shell(tmp_path: Path) -> None:
    recorder, named = RingRecorder(str(tmp_path), level=3), "one; reboot"
    recorder.write(
        RequestBegin(
            *(5, named, time.monotonic_ns(), *context.new(), "chat"),
            {"gen_ai.request.model": "\x1b]0;owned\x07"},
        )
    )
    live = LiveRun(tmp_path)
    live.poll()
    text = shown(live, 120, view=View(selected=named))
    live.close()
    assert "\x1b" not in text
    assert "why 'one; reboot'" in text


def test_an_idle_scheduler_has_no_batch(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path), level=3)
    step, end = recorder.new_id(), time.monotonic_ns() - 5_000_000_000
    recorder.spans(STEP)(step, step, 0, end - 1, end, [1, "decode", 8, 8, 0, 8, 0.5])
    live = LiveRun(tmp_path)
    live.poll()
    text = shown(live, 100)
    live.close()
    assert re.search(r"running 0 .*waiting 0 +KV 50% .* batch 0", text)


def test_phases_differ_without_colours(live: LiveRun) -> None:
    (row,) = [line for line in shown(live, 140).splitlines() if "quick" in line]
    assert re.search("▒+▓+█+", row)


def test_an_image_has_its_phases(tmp_path: Path) -> None:
    recorder, second = RingRecorder(str(tmp_path), level=3), 10**9
    start = time.monotonic_ns() - 10 * second
    request, key = recorder.new_id(), recorder.new_id()
    recorder.write(RequestBegin(request, "drawn", start, *context.new(), "generate_content", {}))
    recorder.write(RequestSeen(key, "drawn", start))
    ends = {QUEUE: 2, ENCODE: 4, DENOISE: 6, DECODE_LATENTS: 8}
    for phase, end in ends.items():
        values: list[Any] = [None] * len(phase.attributes)
        times = start + (end - 2) * second, start + end * second
        recorder.spans(phase)(recorder.new_id(), key, key, *times, values)
    mode: list[Any] = [0, "denoise", 1, 1, 0, 0, 0.0, None, None]
    recorder.spans(STEP)(
        recorder.new_id(), recorder.new_id(), 0, start + 5 * second, start + 6 * second, mode
    )
    live = LiveRun(tmp_path)
    live.poll()
    wide, narrow = shown(live, 140), shown(live, 80, view=View(selected="drawn"))
    live.close()
    names = "queue encode denoise decode_latents prefill decode"
    assert names in wide
    (row,) = [line for line in wide.splitlines() if "drawn" in line]
    assert re.search("▒+▚+▇+▄+░+", row)
    assert re.search(r"queue 2\.00 s +encode 2\.00 s +denoise 2\.00 s +decode_latents 2\.00 s", narrow)
    assert re.search(r"^denoise +\d", narrow, re.MULTILINE)
    assert "encode" not in shown(LiveRun(tmp_path / "none"), 140)
