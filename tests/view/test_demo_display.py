"""The demo's display of made-up spans and answers: numbers, bars, and live lines."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sgl_aspects.analysis.numbers import report_run
from sgl_aspects.analysis.spans import Span, read_spans
from sgl_aspects.cli.live import follow_answers
from sgl_aspects.cli.summary import print_delivery, print_summary
from sgl_aspects.cli.waterfall import most_telling_request, print_waterfall
from sgl_aspects.errors import ConfigError, SchedulerDiedError
from sgl_aspects.runtime import StreamChunk
from sgl_aspects.terminal import replace_unencodable
from sgl_aspects.tracing import TraceSummary
from sgl_aspects.view.text import duration, one_line

MS = 1_000_000


def span(
    name: str,
    ident: str,
    start: float,
    end: float,
    *,
    parent: str = "",
    links: Sequence[str] = (),
    **attributes: Any,
) -> Span:
    """Times in milliseconds. The id is ``trace.span``; attributes with ``__`` for their dots."""
    trace, _, span_id = ident.partition(".")
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    is_server = name.startswith("chat")
    return Span(name, trace, span_id, parent, is_server, int(start * MS), int(end * MS), named, tuple(links))


def request(trace: str, start: float, end: float, *, tokens: int, first: float) -> Span:
    return span(
        "chat tiny",
        f"{trace}.root",
        start,
        end,
        gen_ai__usage__output_tokens=tokens,
        gen_ai__usage__input_tokens=10,
        gen_ai__latency__time_to_first_token=first,
    )


def step(
    number: int, start: float, end: float, mode: str, forward: float, links: Sequence[str] = ()
) -> list[Span]:
    trace = f"step{number}"
    attributes: dict[str, Any] = {"sgl_aspects__forward__mode": mode, "sgl_aspects__batch__tokens": 4}
    whole = span("scheduler.step", f"{trace}.{trace}", start, end, links=links, **attributes)
    return [whole, span("forward", f"{trace}.f", start, start + forward, parent="run")]


def shown(spans: Sequence[Span], width: int = 80) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width)
    report = report_run(spans)
    print_waterfall(console, most_telling_request(report, spans), spans)
    print_summary(console, report)
    return output.getvalue()


SPANS = [
    request("a", 0, 1000, tokens=11, first=0.5),
    request("b", 100, 2000, tokens=1, first=1.9),
    span("tokenize", "b.t", 100, 100.2, parent="root", gen_ai__usage__input_tokens=10),
    span("prefill", "b.p", 1050, 1525, parent="root", sgl_aspects__prefill__tokens=8),
    span("prefill", "b.q", 1525, 2000, parent="root", sgl_aspects__prefill__tokens=2),
    *step(1, 0, 100, "extend", 80, ["root"]),
    *step(2, 100, 200, "mixed", 40),
    *step(3, 200, 300, "decode", 90, ["root"]),
    *step(4, 300, 500, "decode", 150, ["root"]),
]


def test_the_numbers_of_a_run() -> None:
    report = report_run(SPANS)
    assert report.seconds == 2.0
    assert report.output_tokens == 12
    assert report.output_tokens_per_second == 6.0
    # (1 s - 0.5 s) / 10 tokens after the first; a request with one token has none.
    assert sorted(str(request.time_per_output_token) for request in report.requests) == ["0.05", "None"]
    assert report.forward_share == pytest.approx(360 / 500)
    assert [(p.phase, len(p.steps), p.tokens, p.step_seconds) for p in report.phases] == [
        ("prefill", 1, 4, 0.1),
        ("mixed", 1, 4, 0.1),
        ("decode", 2, 8, pytest.approx(0.3)),
    ]
    assert report.phases[2].forward_share == pytest.approx(0.8)


def test_a_file_without_requests_has_no_numbers() -> None:
    report = report_run([])
    assert report.requests == ()
    assert report.output_tokens_per_second == 0.0
    assert report.forward_share == 0.0


def test_the_waterfall_draws_to_scale() -> None:
    lines = shown(SPANS, width=80).splitlines()
    assert lines[0] == "chat tiny   trace b"
    rows = {line.split()[1]: line for line in lines[2:5]}
    whole = lines[1]
    start, width = whole.index("█"), whole.count("█")
    assert rows["tokenize"][start] == "▏"  # too short for its scale, at the very start
    first = lines[3]
    assert first.count("█") + first.count("▌") + first.count("▐") == pytest.approx(width / 4, abs=1.5)
    assert first.index("█") == pytest.approx(start + width / 2, abs=1)
    last = lines[4].rstrip().rpartition("█")[0]
    assert len(last) + 1 == start + width  # ends where the request ends
    assert "├─ prefill" in lines[3]
    assert "└─ prefill" in lines[4]
    assert "8 tokens" in lines[3]
    assert "475 ms" in lines[3]


def test_steps_are_summarised_by_phase_and_only_the_linked_ones() -> None:
    text = shown(SPANS, width=100)
    assert "├─ 1 × prefill" in text
    assert "└─ 2 × decode" in text
    assert "150 ms each, 80% forward" in text
    assert "× mixed" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = shown(SPANS, width=width)
    waterfall = text[: text.index("output tokens/s")]
    assert max(len(line.rstrip()) for line in waterfall.splitlines()) <= width
    assert "request" in waterfall


def test_bars_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    replace_unencodable()  # as every command does
    print_waterfall(Console(file=output, width=80), SPANS[1], SPANS)
    output.flush()
    shown = output.buffer.getvalue()
    assert b"####" in shown
    assert b"|-" in shown
    assert b"?" not in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"),
        (850e-6, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.00999, "9.99 ms"),
        (0.42, "420 ms"),
        (1.24, "1.24 s"),
        (26.4, "26.4 s"),
        (312.0, "312 s"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_spans_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = {
        "name": "chat m",
        "traceId": "0a" * 16,
        "spanId": "0b" * 8,
        "kind": 2,
        "startTimeUnixNano": "1700000000000000001",
        "endTimeUnixNano": "1700000001500000001",
        "attributes": [
            {"key": "i", "value": {"intValue": "7"}},
            {"key": "d", "value": {"doubleValue": 0.5}},
            {"key": "l", "value": {"arrayValue": {"values": [{"stringValue": "stop"}]}}},
        ],
        "links": [{"traceId": "0c" * 16, "spanId": "0d" * 8}],
    }
    file = tmp_path / "spans.jsonl"
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [written]}]}]})
    file.write_text(f"{line}\n{line}\n")
    (first,) = read_spans(file)
    assert first == Span(
        "chat m",
        "0a" * 16,
        "0b" * 8,
        "",
        True,
        1700000000000000001,
        1700000001500000001,
        {"i": 7, "d": 0.5, "l": ["stop"]},
        ("0d" * 8,),
    )
    assert first.seconds == 1.5
    file.write_text(f"{line}\nnot json\n")
    with pytest.raises(ConfigError, match=r"spans\.jsonl:2"):
        read_spans(file)


@pytest.mark.parametrize(
    ("summary", "expected", "unexpected"),
    [
        (
            TraceSummary(9, {"otlp-json-file": 9}, {"otlp-json-file": 0}),
            "9 spans written to f.jsonl",
            "deliver",
        ),
        (
            TraceSummary(9, {"otlp-json-file": 9, "otlp": 9}, {"otlp-json-file": 0, "otlp": 0}),
            "9 spans delivered to http://x",
            "not delivered",
        ),
        (
            TraceSummary(9, {"otlp-json-file": 9, "otlp": 2}, {"otlp-json-file": 0, "otlp": 7}),
            "7 of 9 spans were not delivered to http://x",
            "lost",
        ),
        (
            TraceSummary(9, {"otlp-json-file": 9}, {"otlp-json-file": 0}, dropped=3),
            "3 spans were lost",
            "deliver",
        ),
        (TraceSummary(problem="the trace collector was killed"), "the trace collector was killed", "written"),
    ],
)
def test_what_became_of_the_spans(summary: TraceSummary, expected: str, unexpected: str) -> None:
    output = io.StringIO()
    print_delivery(Console(file=output, width=80), summary, Path("f.jsonl"), "http://x")
    assert expected in output.getvalue()
    assert unexpected not in output.getvalue()


class FakeHandle:
    """Gives the words of a text as chunks."""

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.text, self.error = text, error

    def __iter__(self) -> Iterator[StreamChunk]:
        for word in self.text.split(" "):
            yield StreamChunk("rid", word + " ", [1])
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_are_shown_whole_when_they_end(is_terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, width=60, force_terminal=is_terminal, color_system=None)
    handles: Any = [FakeHandle("It is [bold]Paris[/bold]."), FakeHandle("Bananas\nOranges")]
    answers = follow_answers(console, ["Capital?", "A very " + "long " * 30 + "prompt"], handles)
    text = output.getvalue()
    assert "▸ Capital?\n  It is [bold]Paris[/bold].\n" in text  # an answer is text, not markup
    assert "  Bananas\n  Oranges\n\n" in text
    assert f"▸ {one_line('A very ' + 'long ' * 30, 58)}\n" in text
    assert [answer.tokens for answer in answers] == [3, 1]
    assert is_terminal == ("\x1b" in text)


def test_the_error_of_a_request_is_raised() -> None:
    handles: Any = [FakeHandle("fine"), FakeHandle("half an", SchedulerDiedError("the scheduler died"))]
    with pytest.raises(SchedulerDiedError):
        follow_answers(Console(file=io.StringIO()), ["one", "two"], handles)
