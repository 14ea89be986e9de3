"""An engine's own tracing beside ours: what each adds to the time between two tokens, as a client sees it.

    python -m benchmarks.own_tracing --device cuda --model FOLDER [--engine vllm] [--sizes 1 16 64]

Each subject is a server of its own on the same device. In each round all of them answer the same requests, in
random order; SGLang's others, whose idle schedulers spin, are suspended meanwhile. The figures are the
medians of the rounds' ratios to the server that is not traced, with intervals of 95 %; "nothing" is another
one without tracing: its distance from 0 is noise. :mod:`.interleaved` finds what ours adds, which is below.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.load import ENGINES, Device, Load, make_device, serving
from benchmarks.receiver import counted, receiver
from benchmarks.turns import interval, signal_all
from tests.support.engine_server import EngineServer

TOKENS = 200


class Subject(NamedTuple):
    """How a server is started. ``receives``: the name under which its spans must arrive."""

    level: int = 0
    options: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # noqa: RUF012  never changed
    receives: str = ""


def subjects(engine: str, url: str) -> dict[str, Subject]:
    """Return them by name, first the one that all are compared with."""
    endpoint = ("--otlp-traces-endpoint", f"{url}/theirs/v1/traces")
    found = {"untraced": Subject(), "nothing": Subject(), "ours, level 3": Subject(3, receives="ours")}
    if engine == "vllm":
        return {**found, "vLLM's own": Subject(options=endpoint, receives="theirs")}
    own = Subject(options=("--enable-trace", *endpoint), receives="theirs")
    asynchronous = own._replace(environment={"SGLANG_TRACE_ASYNC": "1"})
    return {**found, "--enable-trace": own, "with SGLANG_TRACE_ASYNC=1": asynchronous}


def step(server: EngineServer, device: Device, size: int, *, spins: bool) -> float:
    """Return the seconds between two tokens of ``size`` streamed answers."""
    if spins:
        signal_all(server.process.pid, signal.SIGCONT)
    try:
        chunks = (line for line in Load(server, device).answer(size, TOKENS) if line.startswith(b"data: {"))
        times = [time.perf_counter() for _ in chunks]
    finally:
        if spins:
            signal_all(server.process.pid, signal.SIGSTOP)
    return (times[-1] - times[len(times) // 5]) / (0.8 * TOKENS)  # the first fifth includes the prompts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_tracing")
    parser.add_argument("--model", type=Path, help="the folder of a model; SmolLM2 is made otherwise")
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("options", nargs="*", help="more of the engine's own options, after --")
    parser.add_argument("--device", default="cpu", help="cpu, or one that SGLang's own platform drives")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 16, 64), help="requests in a batch")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    device, spins = make_device(given.device, largest_batch=max(given.sizes)), given.engine == "sglang"
    with ExitStack() as stack:
        url = stack.enter_context(receiver())
        servers: dict[str, EngineServer] = {}
        wanted = subjects(given.engine, url)
        for name, subject in wanted.items():
            settings: Any = {"url": url, "level": subject.level, "environment": subject.environment}
            options = (*given.options, *subject.options)
            server = stack.enter_context(serving(given.engine, given.model, device, options, **settings))
            servers[name] = server
            stack.callback(signal_all, server.process.pid, signal.SIGCONT)
            step(server, device, max(given.sizes), spins=spins)
        print("\n| batch | a step | subject | added to a step |\n| ---: | ---: | --- | --- |", flush=True)
        for size in given.sizes:
            rounds = []
            for _ in range(given.rounds + 1):
                order = random.sample(list(servers), len(servers))
                rounds.append({name: step(servers[name], device, size, spins=spins) for name in order})
            plain, *others = wanted
            middle = median(one[plain] for one in rounds[1:])
            for name in others:
                low, added, high = (v - 1 for v in interval([one[name] / one[plain] for one in rounds[1:]]))
                cells = f"{middle * 1e3:.2f} ms | {name} | {added:+.1%} ({low:+.1%} to {high:+.1%})"
                print(f"| {size} | {cells} |", flush=True)
        received = counted(url)
        for name in wanted:
            if wanted[name].receives and not received.get(wanted[name].receives):
                raise SystemExit(f"no span of {name} has arrived; its log:\n{servers[name].log.read_text()}")
        print(f"spans received: {received}")


if __name__ == "__main__":
    main()
