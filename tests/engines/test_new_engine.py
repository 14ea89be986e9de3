"""docs/new-engine.md, followed to the letter: an engine and its room, from nothing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.attachable import spans_in
from tests.support.processes import output_of, python

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
    return output_of(python(*words, cwd=folder, PYTHONPATH=str(folder / "site")))


def test_the_page_gives_an_engine_whole_traces(folder: Path) -> None:
    assert execute(folder, "run.py").startswith(
        "[19, 20, 21, 22]\n20 spans recorded; otlp-json-file: 20 delivered"
    )
    spans = spans_in(folder / "traces.jsonl")
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


#: The page's engine with numbers as ids, a function that returns the request, and none that sends it. A
#: request is aborted while it waits.
OTHERWISE = {
    "run.py": {
        "    engine = hare.Engine()\n": """    engine = hare.Engine()
    aborted = engine.accept("never", 4)
    engine.scheduler.add(aborted)
    engine.scheduler.drop(aborted)
    from sgl_aspects import report
    assert not any(hook.errors for hook in report().hooks)
""",
    },
    "hare.py": {
        "    def next_batch(self):\n": """    def drop(self, request):
        self.waiting.remove(request)

    def next_batch(self):
""",
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
        "SCHEDULER_ROLES = {\n": """SCHEDULER_ROLES = {
    "abort_scheduled_request": Role(("hare:Scheduler.drop",), ("scheduler:self", "message:request")),
""",
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


#: The page's engine where no function in Python receives requests or hands out answers.
WITHOUT_FRONT_END = {
    "roles={**REQUEST_ROLES, **SCHEDULER_ROLES},": "roles=SCHEDULER_ROLES,",
    "attributes={**REQUEST_ATTRIBUTES, **SCHEDULER_ATTRIBUTES},": """attributes={
        "manager.model": lambda manager: "hare-1b",
        "request.max_tokens": "max_tokens",
        "message.prompt_tokens": lambda request: len(request.prompt),
        "scheduler.front_end": lambda scheduler: scheduler,
        **SCHEDULER_ATTRIBUTES,
    },""",
}


def test_a_request_without_a_front_end_in_python_is_seen_by_its_scheduler(tmp_path: Path) -> None:
    written(tmp_path)
    text = (tmp_path / "hare_room.py").read_text()
    for before, after in WITHOUT_FRONT_END.items():
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "hare_room.py").write_text(text)
    execute(installed(tmp_path), "run.py")
    spans = spans_in(tmp_path / "traces.jsonl")
    assert Counter(span["name"] for span in spans)["scheduler.step"] == 4
    (root,) = [span for span in spans if span["name"] == "text_completion hare-1b"]
    below = {span["name"] for span in spans if span.get("parentSpanId") == root["spanId"]}
    assert below == {"queue", "prefill", "decode"}
    values = {each["key"]: next(iter(each["value"].values())) for each in root["attributes"]}
    assert [int(values[f"gen_ai.usage.{name}_tokens"]) for name in ("input", "output")] == [19, 4]
    assert float(values["gen_ai.latency.time_to_first_token"]) > 0
    assert int(values["gen_ai.request.max_tokens"]) == 4
