"""The chart and the image of examples/kubernetes: rendered by helm, built by the Dockerfile's own steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.cli.main import _parse
from tests.support.builds import sources
from tests.support.otlp_receiver import http_receiver
from tests.support.tree import ROOT

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.integration
FOLDER = ROOT / "examples" / "kubernetes"


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which("helm"):
        pytest.skip("helm is not on PATH: make test-integration installs it")
    return subprocess.run(["helm", *words], capture_output=True, text=True, timeout=60)


def rendered(*settings: str) -> dict[str, Any]:
    """Return the resources by kind."""
    flags = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "mine", str(FOLDER / "chart"), *flags)
    assert done.returncode == 0, done.stderr
    return {resource["kind"]: resource for resource in yaml.safe_load_all(done.stdout)}


def test_the_chart_has_no_faults() -> None:
    done = helm("lint", "--strict", str(FOLDER / "chart"))
    assert done.returncode == 0, done.stdout


def test_the_engine_runs_below_the_package_that_the_init_container_brings() -> None:
    pod = rendered("aspects.level=3", "aspects.sample=0.1")["Deployment"]["spec"]["template"]["spec"]
    (engine,), (brought,) = pod["containers"], pod["initContainers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (engine, brought):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    target = {mount["name"]: mount["mountPath"] for mount in brought["volumeMounts"]}["aspects"]
    assert shlex.split(dockerfile("CMD").strip("[]").replace(",", ""))[-1] == target
    variables = {variable["name"]: variable.get("value") for variable in engine["env"]}
    assert variables["PYTHONPATH"] == target
    assert variables["SGL_ASPECTS_TRACE"] == "3"
    assert variables["OTEL_TRACES_SAMPLER_ARG"] == "0.1"
    module = engine["command"].index("sgl_aspects")
    arguments = _parse(engine["command"][module + 1 :])
    assert arguments.command == ["--", "python3", "-m", "sglang.launch_server"]


def test_an_instrumentation_of_the_operator_has_the_same_settings() -> None:
    found = rendered("instrumentation.create=true", "deployment.create=false", "aspects.level=2")
    assert list(found) == ["Instrumentation"]
    python = found["Instrumentation"]["spec"]["python"]
    assert python["env"] == [{"name": "SGL_ASPECTS_TRACE", "value": "2"}]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("aspects.level=9", "level"),
        ("aspects.endpoint=host:4318", "endpoint"),
        ("aspects.sample=1.5", "sample"),
    ],
)
def test_a_wrong_value_is_named(setting: str, named: str) -> None:
    done = helm("template", "mine", str(FOLDER / "chart"), "--set", setting)
    assert done.returncode
    assert named in done.stderr


def dockerfile(instruction: str) -> str:
    (line,) = re.findall(rf"^{instruction} (.*)", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return str(line)


def test_the_image_traces_a_program_in_the_chart_and_below_the_operator(tmp_path: Path) -> None:
    """With an interpreter that has nothing of ours: the folder of the image is all that it gets."""
    wheel = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--outdir",
        str(tmp_path / "wheels"),
        str(sources(tmp_path)),
    ]
    subprocess.run(wheel, check=True, capture_output=True, timeout=300)
    image = tmp_path / "autoinstrumentation"
    step = (
        dockerfile("RUN")
        .replace("/wheels", str(tmp_path / "wheels"))
        .replace("/autoinstrumentation", str(image))
    )
    subprocess.run(
        ["bash", "-c", f"PATH={Path(sys.executable).parent}:$PATH; {step}"], check=True, timeout=300
    )
    (tmp_path / "program.py").write_text("import json\njson.dumps([1])\n")
    (tmp_path / "aspects.toml").write_text('[[trace]]\ntarget = "json:dumps"\nname = "dumps"\n')
    bare = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    program = [bare, str(tmp_path / "program.py")]
    for paths, command in (
        ([image], [bare, "-m", "sgl_aspects", "run", "--", *program]),
        ([image / "opentelemetry" / "instrumentation" / "auto_instrumentation", image], program),
    ):
        with http_receiver() as receiver:
            environment = {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "SGL_ASPECTS_CONFIG": str(tmp_path / "aspects.toml"),
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            }
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert len(receiver.named("dumps")) == 1, (json.dumps(command), done.stderr)
