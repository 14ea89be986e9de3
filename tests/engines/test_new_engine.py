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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "new-engine.md"


def written(found: Path) -> Path:
    """Write the files of the page."""
    for text in re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = text.split("\n")[0].removeprefix("# ").removesuffix(", continued")
        with (found / name).open("a") as file:
            file.write(text)
    return found


def installed(found: Path) -> Path:
    """Install it as `pip install .` does, without a network."""
    words = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    execute(found, "-m", *words, "--target", "site", ".")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(written(tmp_path_factory.mktemp("hare")))


def execute(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
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
    printed = execute(folder, "-m", "sgl_aspects", "doctor", "--engine", ".")
    assert "serve_request" in printed
    assert "missing" not in printed


#: The page's engine with numbers as ids, a function that returns the request, and none that sends it.
OTHERWISE = {
    "hare.py": {
        'Request(f"hare-{next(self.ids)}", prompt, max_tokens)': "self.accept(prompt, max_tokens)",
        "        self.accept(request)\n": "",
        "    def accept(self, request):\n        self.requests[request.rid] = request\n": """
    def accept(self, prompt, max_tokens):
        request = Request(next(self.ids), prompt, max_tokens)
        self.requests[request.rid] = request
        return request
""",
    },
    "hare_room.py": {
        'Role(("hare:Engine.accept",), ("_", "request"), required=True)': """Role(
        ("hare:Engine.accept",), reads={"request": lambda args, kwargs, result=None: result}
    )""",
        '    "send_request": Role(("hare:Scheduler.add",), ("_", "tokenized:request")),\n': "",
    },
}


def test_ids_are_numbers_and_the_request_is_a_result(tmp_path: Path) -> None:
    written(tmp_path)
    for name, changes in OTHERWISE.items():
        text = (tmp_path / name).read_text()
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        (tmp_path / name).write_text(text)
    assert execute(installed(tmp_path), "run.py").startswith("[19, 20, 21, 22]\n20 spans recorded")
