"""OpenTelemetry's launcher: `opentelemetry-instrument PROGRAM` traces it as `sgl-aspects run` does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sgl_aspects.bootstrap.instrumentor import Instrumentor
from tests.support.otlp_receiver import Span, http_receiver
from tests.support.processes import finished, output_of

pytest.importorskip("opentelemetry.instrumentation.auto_instrumentation")

SHOP = "def sell(item):\n    return len(item)\n"
PROGRAM = """
import multiprocessing
import shop
if __name__ == "__main__":
    shop.sell("apple")
    child = multiprocessing.get_context("spawn").Process(target=shop.sell, args=("pear",))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
LAUNCHER = (sys.executable, "-c", "from opentelemetry.instrumentation.auto_instrumentation import run; run()")
QUIET = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
OURS = (sys.executable, "-m", "sgl_aspects", "run", "--")


def spans_of(folder: Path, *launchers: str, **variables: str) -> list[Span]:
    (folder / "shop.py").write_text(SHOP)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "aspects.toml").write_text('[[trace]]\ntarget = "shop:sell"\nname = "sell"\n')
    with http_receiver() as receiver:
        variables |= QUIET | {
            "SGL_ASPECTS_CONFIG": str(folder / "aspects.toml"),
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp",
        }
        output_of(finished(*launchers, sys.executable, "program.py", cwd=folder, variables=variables))
        return receiver.named("sell")


def test_a_program_and_its_children_are_traced(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, *LAUNCHER)
    assert len({span.resource["process.pid"] for span in spans}) == len(spans) == 2


def test_spans_come_once_below_both_launchers(tmp_path: Path) -> None:
    assert len(spans_of(tmp_path, *OURS, *LAUNCHER)) == 2


def test_a_level_that_is_set_stays(tmp_path: Path) -> None:
    assert spans_of(tmp_path, *LAUNCHER, SGL_ASPECTS_TRACE="0") == []


def test_a_wrong_configuration_ends_the_program_with_one_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('reached')")
    (tmp_path / "aspects.toml").write_text('[[trace]]\ntarget = "shop:sell"\nspan = "sell"\n')
    variables = QUIET | {"SGL_ASPECTS_CONFIG": str(tmp_path / "aspects.toml")}
    done = finished(*LAUNCHER, sys.executable, program, variables=variables)
    assert done.returncode == 1
    assert done.stderr.startswith(f"sgl-aspects: {tmp_path}/aspects.toml: trace 1: unknown key 'span'")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_it_is_left_out_where_opentelemetry_is_told_so(tmp_path: Path) -> None:
    disabled = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "sgl_aspects"}
    assert spans_of(tmp_path, *LAUNCHER, **disabled) == []


def test_uninstrument_restores_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from sgl_aspects import HookRegistry, HookType

    original = json.dumps
    HookRegistry.register("json:dumps", lambda result, *args, **kwargs: result, HookType.AFTER)
    HookRegistry.apply_hooks()
    assert json.dumps is not original
    Instrumentor().uninstrument()
    assert json.dumps is original
