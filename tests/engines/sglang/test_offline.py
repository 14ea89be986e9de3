"""Real SGLang without a server: the `Engine` object in the process of a program."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.phases import engine_receiver, run_prefix
from tests.support.processes import finished, output_of
from tests.support.sglang_models import make_mini

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("models") / "mini")


OFFLINE = """
import asyncio
import sys
import sglang

four = {"max_new_tokens": 4, "ignore_eos": True}  # a random model may end its answer at any token

def whole(engine):
    engine.generate("one", four)
    engine.generate(["two", "and three"], four)
    engine.generate("four", {**four, "n": 2})
    list(engine.generate("five", four, stream=True))

async def at_once(engine):
    generate = engine.async_generate
    stream = await generate("five", four, stream=True)
    whole = generate("one", four), generate(["two", "and three"], four), generate("four", {**four, "n": 2})
    await asyncio.gather(*whole)
    async for _ in stream:
        pass

def streams(engine):
    engine.loop.run_until_complete(at_once(engine))

def vectors(engine):
    engine.encode("one")
    engine.encode(["two", "and three"])

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], dtype="float32", device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", disable_cuda_graph=True, max_total_tokens=8192, context_length=1024,
        served_model_name="mini", is_embedding=WORK is vectors,
    )
    WORK(engine)
    engine.shutdown()
"""


@pytest.mark.parametrize("work", ["whole", "streams", "vectors"])
def test_an_engine_without_a_server_is_traced(model: Path, tmp_path: Path, work: str) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE.replace("WORK", work))
    settings: dict[str, Any] = {
        "SGLANG_PLATFORM": "sgl_aspects_cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with engine_receiver() as receiver:
        output_of(finished(*run_prefix(receiver, level=1), sys.executable, script, model, **settings))
        expected = 2 if work == "vectors" else 4
        receiver.wait_for(lambda spans: sum(not span.parent_id for span in spans) >= expected)
    requests = [span for span in receiver.spans if not span.parent_id]
    tokens = Counter(span.attributes.get("gen_ai.usage.output_tokens") for span in requests)
    assert not any(span.is_error for span in receiver.spans)
    if work == "vectors":
        assert tokens == {None: 2}
        assert {span.name for span in requests} == {"embeddings mini"}
    else:
        assert tokens == {4: 2, 8: 2}
        assert Counter(span.name for span in receiver.spans)["decode"] == 6
