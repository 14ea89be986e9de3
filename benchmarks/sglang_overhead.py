"""The cost of tracing for a real SGLang server with a real small model (in .sglang-venv):

    python -m benchmarks.sglang_overhead [--minutes 4] [--model FOLDER] [--sizes 1 16] [--subjects 2 3]
    python -m benchmarks.sglang_overhead --device cuda --model FOLDER --sizes 1 16 64 [--eager] [--turn 60]

One server that makes token after token, in turns of a few steps with tracing and without (:mod:`.turns`): the
level is changed live, so that nothing else differs. A step goes from one call of the scheduler's
``process_batch_result`` to the next, stamped there, on the wall and by the thread's own processor time.
"attached" compares level 0 with hooks and level 0 without any, each other function SGLang's own again;
"nothing" compares level 0 with itself: its distance from 0 is noise. SGLang's own tracing (--enable-trace,
level 3) is decided with each request: there turns are requests, timed by their client.

All export over OTLP to one receiver. Our collector is stopped while the level is 0, so that its work for a
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.receiver import receiver
from benchmarks.step_times import StepTimes, thread_mean
from benchmarks.switch import Switch
from benchmarks.turns import compare, interval, step_aside
from sgl_aspects.cli.models import ensure_model
from sgl_aspects.run.control import Control, write_control
from sgl_aspects.run.folder import runs
from tests.support import sglang_server
from tests.support.engine_server import EngineServer
from tests.support.sglang_models import hugging_face_folder
from tests.support.sglang_server import Server, serve

NOTHING, ATTACHED, SGLANGS = "nothing", "attached", "enable-trace"
SUBJECTS = (NOTHING, ATTACHED, "2", "3", SGLANGS)
SIZES = (1, 16)
#: Of a request that keeps the server busy, and of one that is a turn itself.
TOKENS, FEW_TOKENS = 400, 8
STEP = "sglang.srt.managers.scheduler:Scheduler.process_batch_result"
ROUNDS = 3


class Load:
    """Requests that keep a server busy: only its steps are measured."""

    def __init__(self, server: EngineServer, tokens: int = TOKENS, few_tokens: int = FEW_TOKENS) -> None:
        self.server, self._tokens, self._few_tokens = server, tokens, few_tokens

    @contextmanager
    def at_work(self, size: int) -> Iterator[None]:
        """The server makes step after step, for this number of requests at a time."""
        is_over = threading.Event()

        def ask() -> None:
            step_aside()  # of Linux' threads each has its own priority
            while not is_over.is_set():
                for _ in self._answer(size, self._tokens):
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
            list(self._answer(size, self._few_tokens))
            yield (time.perf_counter() - start) / self._few_tokens

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


class Traced(Load):
    """A traced server in which tracing is switched on and off. ``steps``: the seconds of each."""

    def __init__(self, server: Server, switch: Switch, steps: StepTimes, *tokens: int) -> None:
        super().__init__(server, *tokens)
        self.steps, self._switch = steps, switch
        (first,) = (ring for run in runs() for ring in run.glob(f"{server.process.pid}-*.ring"))
        self._rings = list(first.parent.glob("*.ring"))
        (self._collector,) = _collectors(first.parent)

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


def _collectors(run: Path) -> Iterator[int]:
    """The process ids of a run's collectors, without the small program that restarts a killed one."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        words = process.read_bytes().split(b"\0")
        if str(run).encode() in words and not any(word.endswith(b"keeper.py") for word in words):
            yield int(process.parent.name)


@contextmanager
def traced_server(given: str | None, device: Device | None = None) -> Iterator[Traced]:
    """A server of the model in the folder ``given``; None: of SmolLM2, made here.

    ``device``: None leaves the options of the test server as they are.
    """
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
        if device is not None:
            sglang_server.ARGUMENTS.update(device.arguments)
            sglang_server.SWITCHES = device.switches
            environment.update(device.environment)
        traces = ("--otlp-traces-endpoint", f"{url}/sglangs/v1/traces")
        sglang_server.SWITCHES = (*sglang_server.SWITCHES, "--enable-trace", *traces)
        with serve(model, folder / "log", environment=environment) as server:
            tokens = () if device is None else (device.tokens, device.few_tokens)
            traced = Traced(server, switch, steps, *tokens)
            try:
                yield traced
            finally:
                traced.collect(True)


@dataclass(frozen=True)
class Device:
    """A server's arguments on a device, and how its steps are measured.

    A turn has ``turn`` steps, the first ``skip`` after a switch left out: hooks of the level are woven in
    them, and the interpreter specialises the code around them anew, for which CPython takes 53 runs of it.
    ``warm_up`` steps come before.
    """

    arguments: dict[str, str]
    switches: tuple[str, ...]
    environment: dict[str, str]
    turn: int
    skip: int
    warm_up: int
    tokens: int
    few_tokens: int


def make_device(name: str, *, eager: bool, largest_batch: int) -> Device:
    """The CPU of any machine, or a GPU that SGLang's own platform drives, by captured graphs or eagerly."""
    report = "--enable-cache-report"
    if name == "cpu":
        return Device({"--dtype": "bfloat16"}, ("--disable-cuda-graph", report), {}, 5, 1, 20, 400, 8)
    arguments = {
        "--device": name,
        "--dtype": "bfloat16",
        "--attention-backend": "triton",
        "--context-length": "8192",
        "--max-total-tokens": "131072",
        "--max-running-requests": str(max(32, largest_batch)),
        "--mem-fraction-static": "0.5",
    }
    graphs = ("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", str(largest_batch))
    switches = (report, *(("--disable-cuda-graph",) if eager else graphs))
    # SGLang's own platform, with what is installed of its kernels.
    environment = {
        "SGLANG_PLATFORM": "",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Device(arguments, switches, environment, 60, 60, 300, 1000, 64)


def measure(
    traced: Traced, device: Device, size: int, subjects: Sequence[str], seconds: float
) -> Iterator[str]:
    """Return the rows of a table, one for each subject: the time that it adds to a step."""
    found: dict[str, list[tuple[float, ...]]] = {subject: [] for subject in subjects}
    traced.be("2", False)
    traced.be(SGLANGS, False)
    with traced.at_work(size):
        for _ in range(device.warm_up):
            next(traced.steps)
        steps = [next(traced.steps) for _ in range(device.warm_up)]
    wall, thread = statistics.median(steps), thread_mean(steps)
    print(f"batch of {size}: a step takes {wall * 1e3:.3f} ms, its thread {thread * 1e3:.3f} ms", flush=True)
    for _ in range(ROUNDS):
        for subject in random.sample(subjects, len(subjects)):
            switch, share = partial(traced.be, subject), seconds / ROUNDS / len(subjects)
            if subject == SGLANGS:
                kinds = (statistics.median, statistics.fmean)
                found[subject] += compare(traced.requests(size), switch, share, kinds, skip=0, count=2)
                continue
            with traced.at_work(size):
                # Removing hooks takes time: longer turns.
                count = device.turn * (3 if subject == ATTACHED else 1)
                kinds = (statistics.median, statistics.fmean, thread_mean)
                found[subject] += compare(traced.steps, switch, share, kinds, skip=device.skip, count=count)
                if subject == ATTACHED:
                    switch(True)
    for subject, pairs in found.items():
        cells = [_change(ratios, base) for ratios, base in zip(zip(*pairs), (wall, wall, thread))]
        cells += ["-"] * (3 - len(cells))  # of a request its client sees no thread
        yield " | ".join(
            ["", f"{size}", f"{wall * 1e3:.2f} ms", subject, *cells, f"{len(pairs)}", ""]
        ).strip()


def _change(ratios: Sequence[float], base: float) -> str:
    """The median of the ratios with its 95 % interval, as per cent and as microseconds of ``base``."""
    low, middle, high = (value - 1 for value in interval(ratios))
    return (
        f"{middle:+.2%} ({low:+.2%} to {high:+.2%}), "
        f"{middle * base * 1e6:+.1f} µs ({low * base * 1e6:+.1f} to {high * base * 1e6:+.1f})"
    )


HEADER = """
| batch | step | subject | median step | all steps | processor time of the scheduler's thread | pairs |
| ---: | ---: | --- | --- | --- | --- | ---: |"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_overhead")
    parser.add_argument("--minutes", type=float, default=4, help="of measuring, in all")
    parser.add_argument("--model", help="the folder of a model; SmolLM2 is made otherwise")
    parser.add_argument(
        "--device", default="cpu", help="cpu, or one that SGLang's own platform drives (cuda)"
    )
    parser.add_argument("--eager", action="store_true", help="decode without captured graphs")
    parser.add_argument("--turn", type=int, help="steps of one turn")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="requests in a batch")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--page", type=Path, help="a file that the table is added to")
    given = parser.parse_args()
    device = make_device(given.device, eager=given.eager, largest_batch=max(given.sizes))
    if given.turn:
        device = replace(device, turn=given.turn)
    rows = [HEADER]
    with traced_server(given.model, device) as traced:
        print(f"ready after {traced.server.start_seconds:.0f} s", flush=True)
        for size in given.sizes:
            share = given.minutes * 60 / len(given.sizes)
            rows += measure(traced, device, size, given.subjects, share)
            print("\n".join(rows), flush=True)
    if given.page:
        with given.page.open("a") as page:
            page.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
