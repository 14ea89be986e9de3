"""The chart and the image of examples/kubernetes: rendered by helm, built by buildah or by its own steps."""

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
from tests.support.local_image import Images
from tests.support.otlp_receiver import http_receiver
from tests.support.processes import output_of
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
    printed = output_of(helm("template", "mine", str(FOLDER / "chart"), *flags))
    return {resource["kind"]: resource for resource in yaml.safe_load_all(printed)}


def test_the_chart_has_no_faults() -> None:
    output_of(helm("lint", "--strict", str(FOLDER / "chart")))


def test_the_engine_runs_below_the_package_that_the_init_container_brings() -> None:
    settings = ("aspects.level=3", "aspects.sample=0.1", "aspects.controlFrom=http://levels/rules.json")
    pod = rendered(*settings)["Deployment"]["spec"]["template"]["spec"]
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
    assert variables["SGL_ASPECTS_CONTROL_FROM"] == "http://levels/rules.json"
    module = engine["command"].index("sgl_aspects")
    arguments = _parse(engine["command"][module + 1 :])
    assert arguments.command == ["--", "python3", "-m", "sglang.launch_server"]


def test_the_lines_for_a_deployment_are_those_of_the_chart() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    (block,) = re.findall(r"```yaml\n(spec:.*?)```", text, re.DOTALL)
    of_page, of_chart = yaml.safe_load(block)["spec"], rendered()["Deployment"]["spec"]["template"]["spec"]
    assert of_page["volumes"] == of_chart["volumes"]
    (engine,), (charted,) = of_page["containers"], of_chart["containers"]
    assert engine["command"] == charted["command"]
    assert engine["volumeMounts"] == charted["volumeMounts"]
    names = {variable["name"] for variable in charted["env"]}
    assert {variable["name"] for variable in engine["env"]} <= names
    (brought,) = of_page["initContainers"]
    assert brought.items() <= of_chart["initContainers"][0].items()


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
        ("aspects.controlFrom=rules.json", "controlFrom"),
    ],
)
def test_a_wrong_value_is_named(setting: str, named: str) -> None:
    done = helm("template", "mine", str(FOLDER / "chart"), "--set", setting)
    assert done.returncode
    assert named in done.stderr


def dockerfile(instruction: str) -> str:
    (line,) = re.findall(rf"^{instruction} (.*)", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return str(line)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, and what the Dockerfile installs with it: an image built here has no package index."""
    folder = tmp_path_factory.mktemp("image")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist")]
    subprocess.run([*command, str(sources(folder))], check=True, capture_output=True, timeout=300)
    packages = dockerfile("RUN").partition("*.whl ")[2].split()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder / "dist")]
    (own,) = map(str, (folder / "dist").iterdir())
    subprocess.run([*command, own, *packages], check=True, capture_output=True, timeout=300)
    return folder / "dist"


def test_the_image_brings_the_package_as_an_init_container(wheels: Path, tmp_path: Path) -> None:
    """Built by buildah; the container runs as the image's own user, who may do nothing."""
    images = Images(tmp_path)
    try:
        image = images.build(FOLDER / "Dockerfile", wheels.parent, "BUILDER", "CARRIER")
        volume = tmp_path / "volume"
        volume.mkdir()
        volume.chmod(0o777)  # as an emptyDir
        configured = images.run(image, str(volume), "/aspects")
    finally:
        images.close()
    assert configured["User"] == "65532:65532"
    check_that_it_traces(volume, tmp_path)


def test_the_steps_of_the_dockerfile_make_a_folder_that_traces(wheels: Path, tmp_path: Path) -> None:
    image = tmp_path / "autoinstrumentation"
    step = dockerfile("RUN").replace("/wheels", str(wheels)).replace("/autoinstrumentation", str(image))
    path = f"PATH={Path(sys.executable).parent}:$PATH; {step}"
    subprocess.run(["bash", "-c", path], check=True, timeout=300)
    check_that_it_traces(image, tmp_path)


def check_that_it_traces(image: Path, tmp_path: Path) -> None:
    """In the chart and below the Operator, by an interpreter that gets nothing of ours but this folder."""
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
