"""Real SGLang with a host cache: what it loads from the host's memory and writes back to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("sglang")

from tests.support import host_cache
from tests.support.callers import CALLER, parent, trace_id
from tests.support.distributions import install_plugin
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver, run_prefix
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

FIRST, *OTHERS, AGAIN = range(6)
#: Less than the prompts need together.
MEMORY = 300


def root(receiver: Receiver, number: int) -> Span | None:
    found = (span for span in receiver.spans if span.trace_id == trace_id(number))
    return next((span for span in found if span.parent_id == CALLER), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "plugin").mkdir()
    install_plugin(folder / "plugin", "host_cache", host_cache.PLUGIN)
    more = [*host_cache.OPTIONS, "--max-total-tokens", str(MEMORY)]
    path = os.pathsep.join([str(folder / "plugin"), os.environ.get("PYTHONPATH", "")])
    with engine_receiver() as receiver:
        with serve(
            make_mini(folder / "mini"),
            folder / "log",
            prefix=run_prefix(receiver, level=4),
            more=more,
            environment={"PYTHONPATH": path},
            without=("--max-total-tokens",),
        ) as server:
            for number in (FIRST, *OTHERS, AGAIN):
                text = f"{FIRST if number == AGAIN else number} " + "fox " * 90
                sampling = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
                server.post("/generate", {"text": text, "sampling_params": sampling}, parent(number))
        receiver.wait_for(lambda spans: root(receiver, AGAIN) is not None)
        yield receiver


def test_what_is_loaded_is_what_was_written_back(run: Receiver) -> None:
    written, loaded = run.named("cache.write_back"), run.named("cache.load")
    tokens = [sum(span.attributes["sgl_aspects.kv.tokens"] for span in spans) for spans in (written, loaded)]
    moved = [sum(span.attributes["sgl_aspects.kv.bytes"] for span in spans) for spans in (written, loaded)]
    last = root(run, AGAIN)
    assert last is not None
    assert tokens[1] == last.attributes["sgl_aspects.prefix_cache.host_tokens"] > 0
    assert tokens[0] > tokens[1]
    # Keys and values of each layer.
    assert moved[0] * tokens[1] == moved[1] * tokens[0] > 0
