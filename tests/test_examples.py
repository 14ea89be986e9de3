"""Every example runs and prints its documented output (vendor_platform: test_vendor_platform.py)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sgl_aspects.analysis.spans import read_spans
from tests.support.otlp_receiver import http_receiver
from tests.support.processes import output_of, python
from tests.support.tiny_models import llama_fixture

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PRINTING = ("custom_operator", "fix_rope", "replace_class", "required_hook")


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "1", **environment}
    return python(*arguments, cwd=cwd, without=("OTEL_", "SGL"), **environment)


def test_none_is_forgotten() -> None:
    """A new example is named here with its test."""
    assert {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"} == {
        *(f"{name}.py" for name in PRINTING),
        "first_hook.py",  # test_readme.py
        "quickstart.py",
        "trace_to_otlp.py",
        "own_function",
        "test_with_aspects.py",
        "trace_sglang.sh",
        "vendor_platform",
        "kubernetes",  # test_kubernetes.py
    }


@pytest.mark.parametrize("name", PRINTING)
def test_it_prints_its_documented_output(name: str, tmp_path: Path) -> None:
    file = EXAMPLES / f"{name}.py"
    said = (ast.get_docstring(ast.parse(file.read_text())) or "").split("Prints:\n")[1]
    printed = output_of(run(str(file), cwd=tmp_path))
    assert printed.strip() == textwrap.dedent(said).strip()


model = llama_fixture()


def test_quickstart(model: Path, tmp_path: Path) -> None:
    printed = output_of(run(str(EXAMPLES / "quickstart.py"), str(model), "report.html", cwd=tmp_path))
    assert "spans recorded; otlp-json-file: " in printed
    assert re.search(r"^report\.html: 3 requests, \d+ spans", printed, re.MULTILINE)
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_trace_to_otlp(model: Path, tmp_path: Path) -> None:
    with http_receiver() as receiver:
        output_of(run(str(EXAMPLES / "trace_to_otlp.py"), str(model), receiver.endpoint, cwd=tmp_path))
        spans = list(receiver.spans)
    (request,) = [span for span in spans if span.name.startswith("text_completion")]
    assert request.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert {"queue", "prefill", "decode", "scheduler.step"} <= {span.name for span in spans}


def test_own_function(tmp_path: Path) -> None:
    folder = EXAMPLES / "own_function"
    command = re.search(r"^sgl-aspects (run .*)$", (folder / "program.py").read_text(), re.MULTILINE)
    assert command is not None
    words = command[1].split(" -- ")
    options = [word.replace("aspects.toml", str(folder / "aspects.toml")) for word in words[0].split()]
    program = [sys.executable, "-c", "import program; program.main()"]
    assert words[1] == 'python -c "import program; program.main()"'
    done = run(
        "-m", "sgl_aspects", *options, "--", *program,
        cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1, 0]\n"
    spans = read_spans(tmp_path / "spans.jsonl")
    assert [(span.name, dict(span.attributes)) for span in spans] == [
        ("answer", {"keys": ["a", "b"]}),
        ("look up", {"key": "a", "found": 1}),
        ("look up", {"key": "b", "found": 0}),
    ]
    assert {span.parent_id for span in spans[1:]} == {spans[0].span_id}


def test_aspects_in_pytest(tmp_path: Path) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(tmp_path)]
    printed = output_of(run("-m", "pytest", *arguments, str(EXAMPLES / "test_with_aspects.py"), cwd=tmp_path))
    assert "2 passed" in printed


def test_the_sglang_script_names_flags_that_exist() -> None:
    """That it serves is shown by ``make test-sglang``."""
    text = (EXAMPLES / "trace_sglang.sh").read_text()
    done = run("-m", "sgl_aspects", "run", "--help", cwd=ROOT)
    for flag in re.findall(r"(--[a-z-]+)", text.split("exec ")[1].split(" -- ")[0]):
        assert flag in done.stdout
    assert os.access(EXAMPLES / "trace_sglang.sh", os.X_OK)
