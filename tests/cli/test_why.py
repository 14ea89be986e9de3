"""``sgl-aspects why`` on files of spans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from tests.support.processes import command, output_of
from tests.support.simulated_run import SimulatedRun


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a prompt of many chunks, the 20th, arrives while others decode."""
    return SimulatedRun(40).write(tmp_path_factory.mktemp("run") / "spans.jsonl")


def test_the_table_names_causes_and_culprits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "request-19", str(file)]) == 0
    first, heading, *_ = capsys.readouterr().out.splitlines()
    assert "request-19" in first
    assert heading.split() == ["cause", "time", "share", "because", "of"]
    main(["why", "request-19", str(file)])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "others' prefill in its steps" in line]
    assert "request-20" in row


def test_another_program_reads_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = "x" * 60 + "-"
    file = SimulatedRun(40, prefix=prefix).write(tmp_path / "long.jsonl")
    assert main(["why", f"{prefix}19", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(f"{prefix}20 (" in line for line in lines if "others' prefill in its steps" in line)


def test_an_output_without_unicode_has_the_table_too(file: Path) -> None:
    whole = output_of(command("why", "request-19", file, PYTHONIOENCODING="utf-8"))
    plain = output_of(command("why", "request-19", file, PYTHONIOENCODING="ascii"))
    assert " µs " in whole
    assert plain.isascii()
    assert " us " in plain


def test_without_an_output_nothing_is_shown(file: Path) -> None:
    program = (*(sys.executable, "-m", "sgl_aspects", "why", "slowest"), str(file))
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_may_be_left_out_is_not_said_to_be_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["why"])
    assert capsys.readouterr().err.endswith("required: REQUEST\n")


def test_a_stall_names_the_trace_of_a_step_without_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's and transformers' steps have none."""
    run = SimulatedRun(40)
    steps = [span for _, span in run.spans if span["name"] == "scheduler.step"]
    for step in steps:
        step["attributes"] = [each for each in step["attributes"] if each["key"] != "sgl_aspects.step.id"]
    assert main(["why", "request-18", str(run.write(tmp_path / "numberless.jsonl"))]) == 0
    stalls = [line for line in capsys.readouterr().out.splitlines() if ", step " in line]
    named = {line.split(", step ")[1].split(":")[0] for line in stalls}
    assert named
    assert named <= {step["traceId"] for step in steps}


_ASLEEP = [("sleep", 0, 2), ("pause", 0, 1)]


@pytest.mark.parametrize(
    "moments",
    [
        [("pause", 0, 1), ("resume", 999, 1000)],
        [("sleep", 0, 1), ("wake_up", 999, 1000)],
        [("update_weights", 0, 1000)],
        [*_ASLEEP, ("wake_up", 400, 401), ("wake_up", 998, 1000), ("resume", 999, 1000)],
        [*_ASLEEP, ("wake_up", 400, 401), ("update_weights", 500, 600), ("resume", 999, 1000)],
    ],
    ids=lambda moments: "-".join(name for name, _, _ in moments),
)
def test_what_stops_the_server_is_a_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moments: list[tuple[str, int, int]]
) -> None:
    """Until the last part of it is over: an engine that is woken in part is still paused. Milliseconds."""

    def times() -> dict[str, str]:
        assert main(["why", "request-19", str(run.write(tmp_path / "run.jsonl"))]) == 0
        rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[2:]]
        return {cells[0]: next(filter(None, cells[1:])).strip() for cells in rows if len(cells) > 1}

    run = SimulatedRun(40)
    before = times()
    (request,) = (span for _, span in run.spans if "request-19" in str(span) and span["kind"] == 2)
    steps = [(process, span) for process, span in run.spans if span["name"] == "scheduler.step"]
    own = [each for each in steps if request["spanId"] in str(each[1].get("links"))]
    process, step = own[len(own) // 2]
    at = int(step["endTimeUnixNano"])
    for _, span in run.spans:
        for key, is_later in (("startTimeUnixNano", at.__le__), ("endTimeUnixNano", at.__lt__)):
            if is_later(int(span[key])):
                span[key] = str(int(span[key]) + 10**9)
    for number, (name, start, end) in enumerate(moments, 1):
        took = {"startTimeUnixNano": str(at + start * 10**6), "endTimeUnixNano": str(at + end * 10**6)}
        run.spans.append((process, {**step, **took, "name": name, "spanId": f"{number:016x}"}))
    after = times()
    assert after.pop("its server was paused, asleep or changed") == "1.00 s"
    assert after == before


def test_the_slowest_request(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "slowest", str(file)]) == 0
    assert "request-" in capsys.readouterr().out.splitlines()[0]


def test_a_request_that_an_attach_met_under_way_is_not_the_slowest(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time that was seen of it is no latency."""
    assert main(["why", "slowest", str(file)]) == 0
    slowest = capsys.readouterr().out.split(":")[0].split()[-1]
    flag = {"key": "sgl_aspects.attached", "value": {"boolValue": True}}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    parts = [part for line in lines for each in line["resourceSpans"] for part in each["scopeSpans"]]
    for span in (span for part in parts for span in part["spans"]):
        if span["kind"] == 2 and {"stringValue": slowest} in [one["value"] for one in span["attributes"]]:
            span["attributes"].append(flag)
    changed = tmp_path / "attached.jsonl"
    changed.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["why", "slowest", str(changed)]) == 0
    assert f"{slowest}:" not in capsys.readouterr().out.splitlines()[0]
    assert main(["why", slowest, str(changed)]) == 0
    assert "a part: it was under way" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("request_id", "message"),
    [
        ("request-1", None),  # an exact id, though others begin with it
        ("request-", "40 requests begin with 'request-', such as request-0, "),
        ("other", "spans.jsonl has no request 'other'; it has 40, the slowest are request-"),
    ],
)
def test_ids(file: Path, request_id: str, message: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", request_id, str(file)]) == (2 if message else 0)
    if message:
        assert message in capsys.readouterr().err


def test_of_several_requests_with_one_id_the_slowest(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "request-1", str(file)]) == 0
    of_the_slower = capsys.readouterr().out.splitlines()[0]
    same = tmp_path / "same.jsonl"
    same.write_text(file.read_text().replace('"request-1"', '"request-20"'))
    assert main(["why", "request-20", str(same)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == of_the_slower.replace("request-1", "request-20")


def test_a_file_without_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert main(["why", "slowest", str(tmp_path / "empty.jsonl")]) == 2
    assert "holds no requests" in capsys.readouterr().err


def test_without_steps_no_cause_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimulatedRun(3)
    run.spans = [each for each in run.spans if each[1]["name"] != "scheduler.step"]
    assert main(["why", "request-1", str(run.write(tmp_path / "level 1.jsonl"))]) == 2
    told = capsys.readouterr()
    assert "no steps were recorded (level 1) of request request-1" in told.err
    assert "trace at level 2" in told.err
    assert told.out == ""
