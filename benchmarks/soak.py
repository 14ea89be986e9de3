"""Hours in minutes: a traced server under random requests, leaving clients, weight updates, changing hooks.

    python -m benchmarks.soak [--minutes 10]

Fails where a request got no answer, a wrong one or no span, a slot of the key-value cache was not given back,
or the memory of the server, the scheduler or the collector grew (see memory_growth.py). The weights are
replaced by equal ones, so that every greedy answer can be compared with the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil

from benchmarks.memory_growth import Watched, watch
from benchmarks.receiver import counted, receiver
from sgl_aspects.run.collector import collector_state
from sgl_aspects.run.folder import runs
from sgl_aspects.tracing.record.format import SUFFIX
from tests.support.distributions import install
from tests.support.http_server import Server, serving
from tests.support.processes import wait_until
from tests.support.tiny_models import make_llama

CLIENTS = 16
#: Prompt tokens that are computed in one step.
CHUNK = 512
#: MiB by which a process may grow after the warm-up, for caches that fill late. A leak shows in an hour.
MOST_GROWTH = 3.0
#: glibc keeps freed memory. Otherwise it gives back and takes again a block of 13 MiB in the scheduler, for
#: minutes at a time, which reads as growth of 24 ± 10 MiB an hour. All of it, blocks of up to 32 MiB (glibc's
#: limit) included, is in one arena, which grows only if more is in use than ever before.
KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_ARENA_MAX": "1",
}
SHARED = "the quick brown fox jumps over the lazy dog " * 12
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

# In every process of the server: a thread that weaves and removes hooks, and in the process that owns the
# engine another one that updates the weights.
PLUGIN = """
import os, threading, time
import sgl_aspects as aspects
from sgl_aspects.errors import SchedulerDiedError

TARGETS = (
    "sgl_aspects.runtime.scheduling.scheduler:Scheduler.step",
    "sgl_aspects.runtime.execution.model_runner:ModelRunner.forward",
    "sgl_aspects.runtime.frontend.manager:RequestManager.handle_output",
    "sgl_aspects.runtime.server.calls:Calls.end",
)

def new_hook(target):
    def passing(original_fn, *args, **kwargs):
        return original_fn(*args, **kwargs)
    return aspects.around(target)(passing)

def weave_and_remove():
    while True:
        handles = [aspects.weave(new_hook(target)) for target in TARGETS]
        time.sleep(0.5)
        for handle in handles:
            handle.remove()
        time.sleep(0.2)

def update_weights(engine):
    while engine.failure is None:
        time.sleep(10)
        try:
            engine.update_weights(engine.server_args.model_path)
        except SchedulerDiedError:
            return  # the server stops
        with open(os.environ["SOAK_UPDATES"], "a") as file:
            file.write("x")

def start_updates(result, engine, *args, **kwargs):
    threading.Thread(target=update_weights, args=(engine,), daemon=True).start()

def activate():
    aspects.HookRegistry.register("sgl_aspects.runtime.engine:Engine.__init__", start_updates)
    threading.Thread(target=weave_and_remove, daemon=True).start()
"""


class Clients:
    """Tasks that each send random requests one after the other; ``seen`` counts their outcomes."""

    def __init__(self, server: Server, end: float) -> None:
        self._client = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=0, timeout=120)
        self._end = end
        self._greedy: dict[str, str] = {}
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        async with self._client:
            await self._ask_each_length()
            await asyncio.gather(*(self._one(random.Random(number)) for number in range(CLIENTS)))

    async def _complete(self, prompt: Any, **more: Any) -> Any:
        return await self._client.completions.create(model="tiny", prompt=prompt, **more)

    async def _ask_each_length(self) -> None:
        """Request prompts of all lengths, nearly: kernels compiled for them are kept, and chance is slow."""
        for length in (*range(1, 64), *range(64, CHUNK + 1, 8)):
            prompt = [(length + place) % 250 for place in range(length)]  # no two begin alike
            await self._complete(prompt, max_tokens=1)

    async def _one(self, draw: random.Random) -> None:
        kinds = (self._ask_greedy, self._ask_anything, self._leave, self._ask_nonsense, self._ask_json)
        while time.monotonic() < self._end:
            kind = draw.choices(kinds, weights=(5, 5, 3, 1, 1))[0]
            try:
                await asyncio.wait_for(kind(draw), 150)
                self.seen[kind.__name__.strip("_")] += 1
            except Exception as error:  # noqa: BLE001 - reported at the end
                self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def _ask_greedy(self, draw: random.Random) -> None:
        prompt = SHARED[: draw.choice((40, 200, 500))] + str(draw.randrange(20))
        more = {"ignore_eos": True}
        answer = await self._complete(prompt, max_tokens=30, temperature=0, extra_body=more)
        text = answer.choices[0].text
        if self._greedy.setdefault(prompt, text) != text:
            self.wrong.append(f"another greedy answer: {prompt[-30:]!r}: {self._greedy[prompt]!r}, {text!r}")

    async def _ask_anything(self, draw: random.Random) -> None:
        more = {"top_k": draw.choice((1, 20)), "min_p": 0.01, "repetition_penalty": draw.choice((1.0, 1.3))}
        chunks = await self._client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": SHARED[: draw.randrange(1, 500)]}],
            max_tokens=draw.randrange(1, 200),
            n=draw.choice((1, 1, 3)),
            temperature=draw.choice((0.0, 1.0)),
            logprobs=draw.random() < 0.2,
            stop=draw.choice((None, ["x", "fox"])),
            stream=True,
            extra_body=more,
        )
        ended = {choice.index async for chunk in chunks for choice in chunk.choices if choice.finish_reason}
        if not ended:
            raise AssertionError("no end")

    async def _leave(self, draw: random.Random) -> None:
        prompt, more = SHARED[: draw.randrange(1, 500)], {"ignore_eos": True}
        chunks = await self._complete(prompt, max_tokens=800, stream=True, extra_body=more)
        for _ in range(draw.randrange(1, 20)):
            await anext(chunks)
        await chunks.close()

    async def _ask_nonsense(self, draw: random.Random) -> None:
        wrong: Any = draw.choice(({"temperature": -1}, {"max_tokens": 10**6}, {"stop": [""]}, {"n": 0}))
        try:
            await self._complete("a", **wrong)
        except openai.BadRequestError:
            return
        raise AssertionError(f"{wrong} was answered")

    async def _ask_json(self, draw: random.Random) -> None:
        answer = await self._client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": SHARED[: draw.randrange(1, 100)]}],
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        )
        if answer.choices[0].finish_reason == "stop":
            json.loads(answer.choices[0].message.content or "")


def _collector(process_id: int) -> psutil.Process:
    """Return the collector of the run in which the process takes part, which is not its descendant."""
    for folder in runs():
        state = collector_state(folder)
        if state is not None and state.is_alive and list(Path(folder).glob(f"{process_id}-*{SUFFIX}")):
            return psutil.Process(state.process_id)
    raise AssertionError("no collector runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as name, receiver() as url:
        faults = _soak(Path(name), minutes, url)
    for fault in faults:
        print(f"FAULT: {fault}")
    sys.exit(1 if faults else 0)


def _soak(folder: Path, minutes: float, url: str) -> list[str]:
    make_llama(folder / "tiny", max_position_embeddings=2048)
    (folder / "soak_hooks.py").write_text(PLUGIN)
    install(folder, "soak-hooks", "[sgl_aspects.plugins]\nsoak = soak_hooks:activate\n")
    updates = folder / "updates"
    updates.write_text("")

    environment = {
        "SOAK_UPDATES": str(updates),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "SGL_ASPECTS_TRACE": "3",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/ours",
        **KEEPING,
    }
    # A small cache: requests are preempted now and then.
    flags = f"--max-total-tokens 1024 --max-running-requests 12 --chunked-prefill-size {CHUNK}".split()
    with serving(folder / "tiny", folder / "log", *flags, environment=environment) as server:
        end = time.monotonic() + 60 * minutes
        clients = Clients(server, end)
        processes = [
            Watched("the server, which owns the engine", psutil.Process(server.process.pid)),
            Watched("the scheduler", psutil.Process(server.scheduler_pid)),
            Watched("the collector", _collector(server.process.pid)),
        ]

        async def both() -> None:
            await asyncio.gather(clients.run(), watch(processes, end))

        asyncio.run(both())
        faults = clients.wrong[:20]
        try:
            wait_until(server.is_quiet, 30)
        except AssertionError:
            faults.append(f"slots of the cache are not free in the end: {server.metrics()}")
        found = server.metrics()
        received = found["sgl_aspects_requests_received_total"]
        finished = sum(count for name, count in found.items() if "requests_finished_total" in name)
        print(f"{minutes:g} minutes, {received:.0f} requests: {dict(clients.seen)}")
        retracted = found.get("sgl_aspects_scheduler_retractions", 0)
        print(f"{len(updates.read_text())} weight updates, {retracted:.0f} requests preempted")
        for process in processes:
            growth = process.growth(60 * minutes)
            print(process.story())
            print(f"    after the warm-up {growth.slope:+.1f} ± {growth.standard_error:.1f} MiB an hour")
            if growth.surely > MOST_GROWTH:
                faults.append(f"{process.name} has surely grown by {growth.surely:.1f} MiB after the warm-up")
        if server.stop() != 0:
            faults.append(f"the server ended with status {server.process.returncode}")
        psutil.wait_procs([processes[-1].process], timeout=60)  # it exports the rest
        spans = Counter(counted(url))
        print(f"{spans['requests']} spans of requests were exported, {spans['refused']} of refused ones")
        answered = received - found.get('sgl_aspects_requests_finished_total{reason="error"}', 0)
        for count, told, other, done in (
            (received, "received", finished, "finished"),
            (answered, "answered", spans["requests"], "have a span"),
            (clients.seen["ask_nonsense"], "refused", spans["refused"], "have a span"),
        ):
            if count != other:
                faults.append(f"{count:.0f} requests were {told}, {other:.0f} {done}")
        text = server.log.read_text()
        if "Traceback" in text:
            faults.append(f"a traceback in the log: {text[-3000:]}")
    return faults


if __name__ == "__main__":
    main()
