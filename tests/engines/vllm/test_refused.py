"""What real vLLM refuses without an HTTP server is a request, too (make test-vllm)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import Span
from tests.support.phases import engine_receiver, run_prefix
from tests.support.processes import finished, output_of

pytest.importorskip("vllm")

from tests.support.sglang_models import make_mini
from tests.support.vllm_server import ENVIRONMENT, VLLM_SERVE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOO_LONG = "much " * 600
PROGRAM = f"""
import sys
from vllm import LLM, SamplingParams

def main():
    engine = LLM(
        sys.argv[1], served_model_name="mini", dtype="float32", max_model_len=512, enforce_eager=True
    )
    four = SamplingParams(max_tokens=4, ignore_eos=True)
    unknown_token = SamplingParams(max_tokens=4, logit_bias={{10**6: 1}})
    for call, asked, sampling in (
        (engine.generate, ["one", {TOO_LONG!r}], four),
        (engine.generate, ["two", "three"], [four, unknown_token]),
        (engine.chat, [{{"role": "user", "content": {TOO_LONG!r}}}], four),
    ):
        try:
            call(asked, sampling)
        except Exception as error:
            print("refused by", type(error).__name__)

if __name__ == "__main__":
    main()
"""


def _roots(words: Sequence[str], count: int) -> tuple[str, list[Span]]:
    """Return what a program prints, and its requests once these have come."""
    with engine_receiver() as receiver:
        settings = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ended = finished(*run_prefix(receiver, level=1), *words, seconds=400, variables=settings)
        printed = output_of(ended)
        receiver.wait_for(lambda spans: sum(not span.parent_id for span in spans) >= count)
    return printed, [span for span in receiver.spans if not span.parent_id]


def test_a_programs_requests_that_are_refused_are_seen_once_each(tmp_path: Path) -> None:
    """Those before them in the same call are given up, those after them not made."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    model = make_mini(tmp_path / "mini")
    printed, roots = _roots([sys.executable, str(script), str(model)], 5)
    by = [line.split()[-1] for line in printed.splitlines() if line.startswith("refused by ")]
    found = Counter((root.name, root.attributes["error.type"]) for root in roots)
    assert found == Counter(
        [
            *[("text_completion mini", "abort")] * 2,
            *(("text_completion", name) for name in by[:2]),
            ("chat", by[2]),
        ]
    )


def test_each_line_of_a_file_of_requests_is_a_request(tmp_path: Path) -> None:
    """Also one for what this model, or a file of requests, does not do."""
    chat: dict[str, Any] = {"model": "mini", "max_tokens": 4}
    said = [[{"role": "user", "content": text}] for text in ("one", TOO_LONG)]
    bodies = [chat | {"messages": each} for each in said] + [chat | {"model": "other", "messages": said[0]}]
    urls = [*["/v1/chat/completions"] * len(bodies), "/v1/completions", "/v1/embeddings"]
    bodies += [bodies[0], {"model": "mini", "input": "one"}]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(zip(urls, bodies))
    ]
    asked, answered, model = tmp_path / "asked", tmp_path / "answered", make_mini(tmp_path / "mini")
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [VLLM_SERVE[0], "run-batch", "-i", str(asked), "-o", str(answered), "--model", str(model)]
    words += ["--served-model-name", "mini", "--max-model-len", "512", "--enforce-eager"]
    _, roots = _roots(words, len(lines))
    statuses = [json.loads(line)["response"]["status_code"] for line in answered.read_text().splitlines()]
    recorded = [root.attributes.get("http.response.status_code", 200) for root in roots]
    assert sorted(recorded) == sorted(statuses) == [200, 400, 400, 400, 404]
    names = {"chat mini": 1, "chat": 2, "embeddings": 1, "text_completion": 1}
    assert Counter(root.name for root in roots) == names
