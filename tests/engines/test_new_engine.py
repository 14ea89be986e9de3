"""docs/new-engine.md, followed to the letter: an engine and its room, from nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions import install

PAGE = Path(__file__).resolve().parents[2] / "docs" / "new-engine.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page; its entry point as an installed distribution has it."""
    found = tmp_path_factory.mktemp("hare")
    for text in re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = text.split("\n")[0].removeprefix("# ").removesuffix(", continued")
        with (found / name).open("a") as file:
            file.write(text)
    project = (found / "pyproject.toml").read_text()
    (group,) = re.findall(r'entry-points\."(.*)"\]', project)
    (point,) = re.findall(r'^(hare) = "(.*)"$', project, re.MULTILINE)
    install(found, "hare-room", f"[{group}]\n{point[0]} = {point[1]}\n")
    return found


def execute(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_gives_an_engine_whole_traces(folder: Path) -> None:
    assert execute(folder, "run.py").startswith(
        "[19, 20, 21, 22]\n20 spans recorded; otlp-json-file: 20 delivered"
    )
    spans: list[dict[str, Any]] = [
        span
        for line in (folder / "traces.jsonl").read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    steps = ["schedule", "run_batch", "process_result", "scheduler.step"]
    request = ["text_completion hare-1b", "queue", "prefill", "decode"]
    assert Counter(span["name"] for span in spans) == Counter(
        {**dict.fromkeys(steps, 4), **dict.fromkeys(request, 1)}
    )
    root = next(span for span in spans if span["name"] == request[0])
    links = [span["links"] for span in spans if span["name"] == "scheduler.step"]
    assert all([link["spanId"] for link in of_step] == [root["spanId"]] for of_step in links)


def test_doctor_reads_its_roles(folder: Path) -> None:
    (folder / "source").mkdir(exist_ok=True)
    package = folder / "source" / "hare"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text((folder / "hare.py").read_text())
    printed = execute(folder, "-m", "sgl_aspects", "doctor", "--engine", str(folder / "source"))
    assert "hare" in printed
    assert "missing" not in printed
