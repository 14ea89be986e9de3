"""Real vLLM under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("vllm")

from tests.support import disturbances
from tests.support.disturbances import DISTURBANCES, Disturbance, Found, Targets
from tests.support.tiny_models import make_llama
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BLOCK = 128
TARGETS = Targets(
    "vllm.v1.worker.**:GPUModelRunner.execute_model",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar",
)
OPTIONS = {
    "--block-size": BLOCK,
    "--num-gpu-blocks-override": disturbances.ROOM // BLOCK + 1,  # one of them is never used
    "--max-num-seqs": disturbances.BATCH,
    "--max-num-batched-tokens": disturbances.CHUNK,
    "--max-model-len": 2500,
    "--dtype": "float32",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("disturbed")
    make_llama(folder / "mini", num_hidden_layers=2, hidden_size=128, max_position_embeddings=4096)
    file = folder / "spans.jsonl"
    prefix = [sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", str(file), "--"]
    more = ["--enforce-eager", *(str(word) for pair in OPTIONS.items() for word in pair)]
    environment = disturbances.environment(folder, TARGETS)
    with serve(folder / "mini", folder / "log", prefix=prefix, more=more, environment=environment) as running:
        server = disturbances.Server(running.port, "mini", folder)
        problems = disturbances.disturb(server)
    return disturbances.found_in(file, server, problems)


@pytest.mark.parametrize("disturbance", DISTURBANCES, ids=lambda one: one.name)
def test_its_cause_comes_first(found: Found, disturbance: Disturbance) -> None:
    found.check(disturbance)
