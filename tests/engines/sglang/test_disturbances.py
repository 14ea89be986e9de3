"""Real SGLang under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("sglang")

from tests.support import disturbances
from tests.support.disturbances import DISTURBANCES, Disturbance, Found, Targets
from tests.support.sglang_server import serve
from tests.support.tiny_models import make_llama

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

TARGETS = Targets(
    "sglang.srt.model_executor.model_runner:ModelRunner.forward",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",
    "sglang.srt.constrained.xgrammar_backend:XGrammarGrammarBackend.dispatch_json",
)
OPTIONS = {
    "--max-total-tokens": disturbances.ROOM,
    "--max-running-requests": disturbances.BATCH,
    "--chunked-prefill-size": disturbances.CHUNK,
    "--context-length": 2500,
    # It keeps little room for answers, so that it has to retract.
    "--schedule-conservativeness": 0.01,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("disturbed")
    make_llama(folder / "mini", max_position_embeddings=4096)
    file = folder / "spans.jsonl"
    prefix = [sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", str(file), "--"]
    more = [str(word) for pair in OPTIONS.items() for word in pair]
    environment = disturbances.environment(folder, TARGETS)
    with serve(
        folder / "mini",
        folder / "log",
        prefix=prefix,
        more=more,
        environment=environment,
        without=list(OPTIONS),
    ) as running:
        server = disturbances.Server(running.port, "mini", folder, has_min_tokens=True)
        problems = disturbances.disturb(server)
    return disturbances.found_in(file, server, problems)


@pytest.mark.parametrize("disturbance", DISTURBANCES, ids=lambda one: one.name)
def test_its_cause_comes_first(found: Found, disturbance: Disturbance) -> None:
    found.check(disturbance)
