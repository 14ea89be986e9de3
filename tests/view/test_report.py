"""``sgl-aspects report``: what is read, and the page that is written (test_report_page.py looks at it)."""

from __future__ import annotations

import base64
import gzip
import json
import math
import multiprocessing
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.analysis.sources import Run, load_run
from sgl_aspects.analysis.spans import Span, read_spans
from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import schema
from sgl_aspects.view.page import SCRIPTS, STYLES, page_of
from sgl_aspects.view.payload import payload_of
from tests.support import workers
from tests.support.simulated_run import HOSTILE, SimulatedRun

spawn = multiprocessing.get_context("spawn")


def data_of(page: str) -> dict[str, Any]:
    coded = re.search(r'id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert coded is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(coded[1])))
    return data


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SimulatedRun(40).write(tmp_path_factory.mktemp("run") / "run.otlp.jsonl")


def test_the_page_makes_no_network_request(file: Path) -> None:
    page = page_of(load_run(str(file)))
    elements = Elements(page).found
    assert not [attributes for _, attributes in elements if {"src", "href", "srcset"} & set(attributes)]
    assert not re.search(r"@import|url\((?!data:)", page)
    assert [tag for tag, _ in elements if tag in ("script", "style")] == ["style", "script", "script"]
    (policy,) = [a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_data_are_the_spans(file: Path) -> None:
    spans = read_spans(file)
    data = data_of(page_of(load_run(str(file))))
    assert len(data["start"]) == len(spans) > 500
    names = [data["types"][number][0] for number in data["type"]]
    assert names == [span.name for span in spans]
    assert len(data["requests"]) == 40
    assert data["names"]["MODE"] == schema.MODE  # of the constants that its program reads
    assert [spans[index].name for index in data["steps"]] == ["scheduler.step"] * len(data["steps"])
    for index, span in enumerate(spans):
        if span.parent_id:
            assert spans[data["parent"][index]].span_id == span.parent_id
        linked = [spans[link].span_id for link in data["links"].get(str(index), [])]
        assert linked == list(span.links)
        assert data["t0_ms"] * 1e6 + data["start"][index] == pytest.approx(span.start_ns, abs=1e3)
        assert data["process"][index] in (4001, 4002)
        attributes = dict(zip(data["types"][data["type"][index]][1], data["values"][index]))
        assert attributes == dict(span.attributes)


def test_text_of_strangers_stays_text(tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        spans = [
            Span(
                text, "t", "1", "", True, 5, 10, {"gen_ai.request.model": text, text: [text]}, ("1", "nobody")
            ),
            Span("scheduler.step", "s", "2", "2", False, 6, 9, {"sgl_aspects.forward.mode": text}, ("1",)),
        ]
        page = page_of(Run(f"{text} {number}", spans))
        assert Elements(page).found == Elements(page_of(Run("plain", spans))).found
        data = data_of(page)
        assert data["types"][0] == [text, ["gen_ai.request.model", text]] or "\ud800" in text
        assert data["links"] == {"0": [0], "1": [0]}
        assert data["parent"] == [-1, -1]


def test_values_that_json_has_no_word_for() -> None:
    attributes = {
        "a": math.nan,
        "b": math.inf,
        "c": "x" * 100_000,
        "d": [1.5, math.nan],
        "e": None,
        "f": True,
    }
    payload = payload_of(Run("run", [Span("n", "t", "1", "", False, 10, 5, attributes, ())]))
    (values,) = payload["values"]
    assert values[:2] == ["nan", "inf"]
    assert len(values[2]) < 3000
    assert values[3:] == [[1.5, "nan"], None, True]
    assert payload["duration"] == [0]
    attributes = {"large": 10**400, "exact": 2**53}
    far = Span("n", "t", "1", "", False, 10**300, 10**400, attributes, ())
    payload = payload_of(Run("run", [Span("n", "t", "2", "", False, -5, 10, {}, ()), far]))
    assert payload["start"] == [0, 1 << 63]
    assert payload["duration"] == [15, 1 << 63]
    assert payload["values"][1][1] == 2**53
    json.dumps(payload, allow_nan=False)


def test_every_part_of_the_page_is_used() -> None:
    folder = Path(__file__).parents[2] / "sgl_aspects" / "view" / "page"
    parts = {str(path.relative_to(folder)) for path in folder.rglob("*.[cj]s*")}
    assert parts == set(STYLES) | set(SCRIPTS)
    for name in parts:
        assert "</" not in (folder / name).read_text() or name == "vendor/uPlot.iife.min.js"
    assert "</script" not in (folder / "vendor" / "uPlot.iife.min.js").read_text()


def test_a_file_whose_writer_is_at_work(tmp_path: Path) -> None:
    whole = SimulatedRun(10).write(tmp_path / "whole.jsonl", lines_of=20)
    cut = tmp_path / "cut.jsonl"
    cut.write_text(whole.read_text()[:-200])
    assert 0 < len(read_spans(whole)) - len(read_spans(cut)) <= 20
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_bytes(b"\xef\xbb\xbf" + lines[0].encode() + '{"name": "é'.encode()[:-1])
    assert len(read_spans(cut)) == 20
    cut.write_text(lines[0] + lines[1][:100] + "\n" + lines[2])
    with pytest.raises(ConfigError, match=r"cut\.jsonl:2 is not a line"):
        read_spans(cut)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"not json", "is not a line of OTLP-JSON"),
        (b"[]\n", "is not a line of OTLP-JSON"),
        (b"\xff\xfe\x00", "is not a line of OTLP-JSON"),
        (b"[" * 100_000, "is not a line of OTLP-JSON"),
        (b"", "holds no spans"),
        (
            b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "a"}]}]}]}\n',
            "is not a line of OTLP-JSON",
        ),
        *(
            (
                (
                    b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "a", "startTimeUnixNano": "1", '
                    b'"endTimeUnixNano": "2", "traceId": "1", "spanId": "2", "%s": "no id"}]}]}]}\n' % key
                ),
                "is not a line of OTLP-JSON.*no id",
            )
            for key in (b"traceId", b"spanId", b"parentSpanId")
        ),
        *(
            (
                (
                    b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "a", "startTimeUnixNano": %s, '
                    b'"endTimeUnixNano": "2", "traceId": "1", "spanId": "2"}]}]}]}\n' % time
                ),
                "is not a line of OTLP-JSON",
            )
            for time in (b"1e999", b"9" * 400)
        ),
    ],
)
def test_a_file_that_is_none(
    content: bytes, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(content)
    for form in ("page", "perfetto"):
        assert main(["report", str(file), "--format", form, "-o", str(tmp_path / "report.html")]) == 2
        error = capsys.readouterr().err
    assert re.fullmatch(rf"sgl-aspects: error: .*some\.jsonl.*{part}.*\n", error), error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "value",
    [
        {"arrayValue": {"values": [{"stringValue": "a"}]}},
        {"kvlistValue": {"values": []}},
        {"bytesValue": "AA=="},
        {"stringValue": "a"},
        {"doubleValue": "NaN"},
        {"doubleValue": "Infinity"},
        {"doubleValue": 1e308},
        {"boolValue": True},
        {},
    ],
)
def test_an_attribute_of_any_type_stops_no_command(value: dict[str, Any], tmp_path: Path) -> None:
    good, odd = SimulatedRun(22).write(tmp_path / "good.jsonl"), tmp_path / "odd.jsonl"
    lines = [json.loads(line) for line in good.read_text().splitlines()]
    spans = [span for line in lines for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    for attribute in [each for span in spans for each in span.get("attributes", ())]:
        attribute["value"] = value
    odd.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = ["-o", str(tmp_path / "report.html")]
    assert main(["report", str(odd), *page]) == 0
    assert main(["report", str(odd), "--format", "perfetto", *page]) == 0
    assert main(["report", "--compare", str(good), str(odd), *page]) in (0, 1, 2)
    assert main(["why", "slowest", str(odd)]) == 0
    assert main(["usage", str(odd)]) == 0


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["-o", str(tmp_path / "report.html")]
    assert main(["report", str(tmp_path / "absent.jsonl"), *output]) == 2
    assert "absent.jsonl: No such file" in capsys.readouterr().err
    (tmp_path / "run.jsonl").touch()
    assert main(["report", str(tmp_path), *output]) == 2
    assert f"such as {tmp_path / 'run.jsonl'}" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["kill", "hang"])
def test_the_rings_of_a_run_dead_and_live(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    process = spawn.Process(target=workers.record_like_a_scheduler, args=(str(folder), ["r1", "r2"], ending))
    process.start()
    try:
        if ending == "kill":
            process.join(60)
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.ring")) or len(load_run(str(folder)).spans) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        output = tmp_path / "report.html"
        assert main(["report", str(folder), "-o", str(output)]) == 0
        assert "0 requests, 6 spans" in capsys.readouterr().out
        data = data_of(output.read_text())
        assert data["is_live"] == (ending == "hang")
        assert data["dropped"] == data["damaged"] == 0
        assert len(data["steps"]) == 2
        assert len(data["errors"]) == 1  # the step that had not ended
    finally:
        process.kill()
        process.join(60)


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path) -> None:
    """A file of a terabyte takes nothing on the disk, or in the archive that it was sent in."""
    endless = tmp_path / "endless.jsonl"
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    program = (
        "import resource, sys; from sgl_aspects.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); sys.exit(main(['report', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", program, str(endless)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "endless.jsonl:1 is not a line of OTLP-JSON" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("command", ["report", "why", "usage"])
def test_a_large_file_is_announced_before_it_is_read(
    command: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sgl_aspects.cli.arguments._LARGE", file.stat().st_size + 1)
    assert main([command, *["slowest"] * (command == "why"), str(file)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sgl_aspects.cli.arguments._LARGE", file.stat().st_size)
    assert main([command, *["slowest"] * (command == "why"), str(file)]) == 0
    assert re.fullmatch(rf"reading {re.escape(str(file))} \(\d+ MB\) \.\.\.\n", capsys.readouterr().err)
