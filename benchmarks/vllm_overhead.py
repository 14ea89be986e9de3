"""The cost of tracing for a real vLLM server on the CPU (in .vllm-venv), measured as SGLang's is:

    python -m benchmarks.vllm_overhead [--minutes 4] [--model FOLDER] [--sizes 1 16] [--subjects 2 3]

A step goes from one call of the scheduler's ``update_from_output`` to the next. vLLM's own tracing, the
subject "enable-trace", is decided when a server starts: a second server has it, ours is off in both, and
their clients' turns are requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.receiver import receiver
from benchmarks.sglang_overhead import HEADER, SGLANGS, SIZES, SUBJECTS, Load, Traced, make_device, measure
from benchmarks.step_times import StepTimes
from benchmarks.switch import Switch
from sgl_aspects.cli.models import ensure_model
from tests.support.engine_server import EngineServer
from tests.support.sglang_models import hugging_face_folder
from tests.support.vllm_server import serve

OWN = SGLANGS
STEP = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"


def completions(port: int, size: int, tokens: int) -> Iterator[bytes]:
    """Stream the answers of this number of prompts, as lines."""
    body = {
        "model": "mini",
        "prompt": [f"the quick brown fox {number}" for number in range(size)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    yield from connection.getresponse()
    connection.close()


class VllmLoad(Load):
    """Requests that keep a vLLM server busy."""

    def _answer(self, size: int, tokens: int) -> Iterator[bytes]:
        yield from completions(self.server.port, size, tokens)


class TracedVllm(Traced):
    """``other``: a server of the same model with vLLM's own tracing, if that is measured."""

    def __init__(
        self, server: EngineServer, switch: Switch, steps: StepTimes, other: EngineServer | None
    ) -> None:
        super().__init__(server, switch, steps)
        self._other, self._target = other, server

    def be(self, subject: str, is_on: bool) -> None:
        if subject == OWN:
            self._target = self._other if is_on and self._other is not None else self.server
        else:
            super().be(subject, is_on)

    def _answer(self, size: int, tokens: int) -> Iterator[bytes]:
        yield from completions(self._target.port, size, tokens)


@contextmanager
def traced_server(given: str | None, subjects: Sequence[str]) -> Iterator[TracedVllm]:
    """A server of the model in the folder ``given``; None: of SmolLM2, made here."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(receiver())
        model = Path(given) if given else hugging_face_folder(ensure_model(), folder / "model")
        switch, steps = Switch(folder), StepTimes(folder, STEP)
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        environment = {
            **protocol,
            **switch.environment,
            **steps.environment,
            "SGL_ASPECTS_TRACE": "4",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/ours",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }
        server = stack.enter_context(serve(model, folder / "log", environment=environment))
        other = None
        if OWN in subjects:
            own = ("--otlp-traces-endpoint", f"{url}/vllms/v1/traces")
            other = stack.enter_context(
                serve(model, folder / "log of its own", more=own, environment=protocol)
            )
        traced = TracedVllm(server, switch, steps, other)
        try:
            yield traced
        finally:
            traced.collect(True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_overhead")
    parser.add_argument("--minutes", type=float, default=4, help="of measuring, in all")
    parser.add_argument("--model", help="the folder of a model; SmolLM2 is made otherwise")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="requests in a batch")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    given = parser.parse_args()
    rows = [HEADER]
    with traced_server(given.model, given.subjects) as traced:
        device = make_device("cpu", eager=True, largest_batch=max(given.sizes))
        for size in given.sizes:
            rows += measure(traced, device, size, given.subjects, given.minutes * 60 / len(given.sizes))
            print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
