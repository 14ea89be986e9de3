"""Two runs compared: regressions are found by name, and equal runs are not told apart.

The runs are simulated, with the noise of a real engine's steps, so that each is the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from sgl_aspects.analysis.comparison import Change, Measures, compare, regressions
from sgl_aspects.analysis.spans import Span, read_spans
from sgl_aspects.cli.main import main
from sgl_aspects.tracing.schema import MODE
from tests.support.simulated_run import SimulatedRun

REQUESTS = 300
NOTHING: Mapping[str, float] = {}


def simulated(noise: int, slower: Mapping[str, float] = NOTHING, most_running: int = 48) -> SimulatedRun:
    return SimulatedRun(
        REQUESTS, rate=8, noise=noise, slower=slower, has_operators=True, most_running=most_running
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def before(folder: Path) -> Measures:
    return measured(folder, simulated(1))


def measured(folder: Path, run: SimulatedRun) -> Measures:
    return Measures.of(read_spans(run.write(folder / "run.jsonl")))


@pytest.mark.parametrize(
    ("part", "factor"),
    [
        ("forward, decode", 1.03),
        ("forward, decode", 1.05),
        ("tokenize", 1.12),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("forward, mixed", 1.10),
                ("attention, decode", 1.05),
                ("attention, mixed", 1.20),
                ("operator linear, decode", 1.06),
                ("sample, decode", 1.12),
                ("process_result, decode", 1.20),
                ("detokenize", 1.15),
            )
        ),
    ],
)
def test_a_regression_is_found_by_name(part: str, factor: float, folder: Path, before: Measures) -> None:
    after = measured(folder, simulated(2, {part: factor}))
    found = regressions(compare(before, after), 0.01)
    assert found, part
    assert found[0].measure.removesuffix(" of requests") == part, found
    assert found[0].low < factor - 1 < found[0].high


def test_of_ranks_that_run_the_same_steps_those_of_the_one_that_answers_are_compared() -> None:
    spans = [
        Span("chat", "1", "a", "", True, 0, 9, {}, (), 1),
        Span("decode", "1", "b", "a", False, 0, 9, {}, (), 2),
        Span("scheduler.step", "2", "c", "", False, 0, 5, {MODE: "decode"}, ("a",), 2),
        Span("scheduler.step", "3", "d", "", False, 0, 7, {MODE: "decode"}, ("a",), 3),
    ]
    (step,) = Measures.of(spans).durations["step, decode"]
    assert step.seconds == 5e-9


@pytest.mark.slow
def test_equal_runs_are_not_told_apart(folder: Path) -> None:
    runs = [measured(folder, simulated(noise)) for noise in range(10, 17)]
    pairs = list(itertools.combinations(runs, 2))
    alarms = [found for pair in pairs if (found := certain(compare(*pair)))]
    assert len(pairs) == 21
    assert len(alarms) <= 1, alarms


def certain(changes: list[Change]) -> list[Change]:
    return [change for change in changes if change.is_certain]


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, str]:
    runs = {"one": simulated(1), "same": simulated(3), "slower": simulated(2, {"forward, decode": 1.05})}
    return {name: str(run.write(folder / f"{name}.jsonl")) for name, run in runs.items()}


def test_the_command_names_regressions_and_writes_a_page(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", "--compare", files["one"], files["slower"], "-o", str(page)]) == 1
    shown = capsys.readouterr().out
    assert "forward, decode" in shown
    assert "Regressions beyond 2.0%: forward, decode" in shown
    text = page.read_text()
    assert text.count("<iframe") == 2
    assert "<td>forward, decode</td>" in text


def test_the_share_that_is_allowed(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-o", str(tmp_path / "page.html")]
    assert main(["report", "--compare", files["one"], files["slower"], "--beyond", "0.2", *words]) == 0
    assert main(["report", "--compare", files["one"], files["same"], *words]) == 0
    assert "measures compared, 0 changed" in capsys.readouterr().out


def test_runs_without_enough_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimulatedRun(3)
    run.spans = [(process, span) for process, span in run.spans if span["kind"] == 2]
    small = str(run.write(tmp_path / "small.jsonl"))
    assert main(["report", "--compare", small, small]) == 2
    assert "each needs 20 requests" in capsys.readouterr().err


def test_a_comparison_is_a_page_of_two_runs(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    compared = ["report", "--compare", files["one"], files["same"]]
    for further in (["--format", "perfetto"], [files["slower"]]):
        assert main([*compared, *further]) == 2
        told = f"--compare A B makes a page of two runs: leave out {' '.join(further)}"
        assert told in capsys.readouterr().err
