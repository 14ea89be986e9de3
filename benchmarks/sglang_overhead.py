"""What tracing costs a real SGLang server with a real small model (in .sglang-venv):

    python -m benchmarks.sglang_overhead [--minutes 4] [--model FOLDER] [--sizes 1 16] [--subjects 2 3]

One server that makes token after token, in turns of a few steps with tracing and without (:mod:`.turns`):
the level is changed live, so that nothing else differs. A step goes from one call of the scheduler's
``process_batch_result`` to the next, stamped there. "attached" compares level 0 with hooks and level 0
without any, each other function SGLang's own again; "nothing" compares level 0 with itself: its distance from
0 is noise. SGLang's own tracing (--enable-trace, level 3) is decided with each request: there turns are
requests, timed by their client.

All export over OTLP to one receiver. Our collector is stopped while the level is 0: what it has to do for a
level is done in that level's turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.receiver import receiver
from benchmarks.step_times import StepTimes
from benchmarks.switch import Switch
from benchmarks.turns import Pair, alternate, more, step_aside
from sgl_aspects.cli.models import ensure_model
from sgl_aspects.tracing.control import Control, runs, write_control
from tests.support import sglang_server
from tests.support.sglang_models import hugging_face_folder
from tests.support.sglang_server import Server, serve

NOTHING, ATTACHED, SGLANGS = "nothing", "attached", "enable-trace"
SUBJECTS = (NOTHING, ATTACHED, "2", "3", SGLANGS)
SIZES = (1, 16)
#: Of a request that is only there for its steps, and of one that is a turn.
TOKENS, FEW_TOKENS = 400, 8
STEP = "sglang.srt.managers.scheduler:Scheduler.process_batch_result"
ROUNDS = 3


class Traced:
    """A traced server, and what switches tracing on and off in it. ``steps``: the seconds of each."""

    def __init__(self, server: Server, switch: Switch, steps: StepTimes) -> None:
        self.server, self.steps, self._switch = server, steps, switch
        (first,) = (ring for run in runs() for ring in run.glob(f"{server.process.pid}-*.ring"))
        self._rings = list(first.parent.glob("*.ring"))
        (self._collector,) = (
            int(process.parent.name)
            for process in Path("/proc").glob("[0-9]*/cmdline")
            if str(first.parent).encode() in process.read_bytes().split(b"\0")
        )

    def be(self, subject: str, is_on: bool) -> None:
        if subject == ATTACHED:
            self._switch.turn(is_on)
        elif subject == SGLANGS:
            self.server.get(f"/set_trace_level?level={3 if is_on else 0}")
        elif subject != NOTHING:
            for ring in self._rings:
                write_control(ring, Control(int(subject) if is_on else 0, 4))
            self.collect(is_on)
        self.steps.forget()

    def collect(self, is_on: bool) -> None:
        os.kill(self._collector, signal.SIGCONT if is_on else signal.SIGSTOP)

    @contextmanager
    def at_work(self, size: int) -> Iterator[None]:
        """The server makes step after step, for so many requests at a time."""
        is_over = threading.Event()

        def ask() -> None:
            step_aside()  # of Linux' threads each has its own priority
            while not is_over.is_set():
                for _ in self._answer(size, TOKENS):
                    if is_over.is_set():
                        break

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            yield
        finally:
            is_over.set()
            asking.join()

    def requests(self, size: int) -> Generator[float, None, None]:
        """The seconds of a step in a whole batch."""
        while True:
            start = time.perf_counter()
            list(self._answer(size, FEW_TOKENS))
            yield (time.perf_counter() - start) / FEW_TOKENS

    def _answer(self, size: int, tokens: int) -> Iterator[bytes]:
        body = {
            "text": [f"the quick brown fox {number}" for number in range(size)],
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        yield from connection.getresponse()
        connection.close()


@contextmanager
def traced_server(given: str | None) -> Iterator[Traced]:
    """``given``: the folder of a model; None: of SmolLM2, made here."""
    with tempfile.TemporaryDirectory() as name, receiver() as url:
        folder = Path(name)
        model = Path(given) if given else hugging_face_folder(ensure_model(), folder / "model")
        switch, steps = Switch(folder), StepTimes(folder, STEP)
        environment = {
            **switch.environment,
            **steps.environment,
            "SGL_ASPECTS_TRACE": "4",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/ours",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
            "SGLANG_TRACE_LEVEL": "0",
        }
        sglang_server.ARGUMENTS["--dtype"] = "bfloat16"
        traces = ("--otlp-traces-endpoint", f"{url}/sglangs/v1/traces")
        sglang_server.SWITCHES = (*sglang_server.SWITCHES, "--enable-trace", *traces)
        with serve(model, folder / "log", environment=environment) as server:
            traced = Traced(server, switch, steps)
            try:
                yield traced
            finally:
                traced.collect(True)


def measure(traced: Traced, size: int, subjects: Sequence[str], seconds: float) -> None:
    """Prints one line a subject."""
    found: dict[str, list[Pair]] = {subject: [] for subject in subjects}
    traced.be("2", False)
    traced.be(SGLANGS, False)
    with traced.at_work(size):
        step = statistics.median(next(traced.steps) for _ in range(20))
    for _ in range(ROUNDS):
        for subject in random.sample(subjects, len(subjects)):
            switch, share = partial(traced.be, subject), seconds / ROUNDS / len(subjects)
            if subject == SGLANGS:
                found[subject] += alternate(traced.requests(size), switch, share, skip=0, count=1)
                continue
            with traced.at_work(size):
                if subject == ATTACHED:  # which takes a while
                    found[subject] += alternate(traced.steps, switch, share, skip=1, count=15)
                    switch(True)
                else:
                    found[subject] += alternate(traced.steps, switch, share, skip=1)
    print(f"batch of {size}, a step of {step * 1e3:.0f} ms")
    for subject, pairs in found.items():
        medians, means = (more([1 / ratio for ratio in ratios]) for ratios in zip(*pairs))
        print(f"  {subject}: throughput {medians}, all steps {means}, {len(pairs)} pairs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_overhead")
    parser.add_argument("--minutes", type=float, default=4, help="of measuring, in all")
    parser.add_argument("--model", help="the folder of a model; SmolLM2 is made otherwise")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="requests in a batch")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    given = parser.parse_args()
    with traced_server(given.model) as traced:
        for size in given.sizes:
            measure(traced, size, given.subjects, given.minutes * 60 / len(given.sizes))


if __name__ == "__main__":
    main()
