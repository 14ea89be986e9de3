"""The embedded engine's server under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

import pytest

from tests.support import disturbances
from tests.support.disturbances import DISTURBANCES, Disturbance, Found, Targets
from tests.support.http_server import serving
from tests.support.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGETS = Targets(
    "sgl_aspects.runtime.execution.model_runner:ModelRunner.compute_logits",
    "sgl_aspects.runtime.loader.tokenizer:Tokenizer.encode",
    "sgl_aspects.runtime.grammar:GrammarCompiler.compile",
)
FLAGS = {
    "--max-total-tokens": disturbances.ROOM,
    "--max-running-requests": disturbances.BATCH,
    "--chunked-prefill-size": disturbances.CHUNK,
    "--decode-reserve": 0,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("disturbed")
    make_llama(folder / "mini", max_position_embeddings=4096)
    file = folder / "spans.jsonl"
    environment = {
        **disturbances.environment(folder, TARGETS),
        "SGL_ASPECTS_TRACE": "3",
        "SGL_ASPECTS_TRACE_EXPORTER": "otlp-json-file",
        "SGL_ASPECTS_TRACE_FILE": str(file),
    }
    flags = [str(word) for pair in FLAGS.items() for word in pair]
    with serving(folder / "mini", folder / "log", *flags, environment=environment) as running:
        server = disturbances.Server(running.port, running.model, folder)
        problems = disturbances.disturb(server)
        running.stop()
    return disturbances.found_in(file, server, problems)


@pytest.mark.parametrize("disturbance", DISTURBANCES, ids=lambda one: one.name)
def test_its_cause_comes_first(found: Found, disturbance: Disturbance) -> None:
    found.check(disturbance)
