"""Device time in forward spans against the torch profiler's, and the cost of tracing on a GPU.

    python -m benchmarks.device_time [--write] [--folder DIR] [--layers N]

A scheduler of the embedded engine in this process, with a model in the shape of Llama 3.2 1B (random bfloat16
weights), serves prompts and decodes, eagerly and by graphs. While the profiler looks, each pass is also
marked for it; the profiler's duration is from the first to the last piece of device work that the pass
launched, of a replayed one that its graph launched. Then, without the profiler, steps with tracing off and
at levels 2 and 3 take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode import SHAPE, write_model
from benchmarks.turns import interval
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.messages import TokenizedRequest
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.record import format as ring_format

PAGE = Path(__file__).resolve().parent / "results" / "tracing-on-a-gpu.md"
MARK = "bench.forward"
BATCH, PROMPT, STEPS = 8, 256, 12
LEVELS, TURNS, TURN_STEPS = (2, 3), 24, 20
_WORK = 8192  # a product of square matrices of this size takes an H100 1.5 ms
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Engine:
    """A scheduler that is driven step by step."""

    def __init__(self, folder: Path) -> None:
        from sgl_aspects.runtime.scheduling.scheduler import Scheduler

        self._ours, theirs = multiprocessing.Pipe()
        self.scheduler = Scheduler(
            ServerArgs(folder, max_total_tokens=32768, max_running_requests=BATCH), theirs
        )
        runner = self.scheduler.model_runner
        self._graph_runner = runner.graph_runner
        # Inside the marks there is the woven function: our events and the profiler see the same work.
        forward = runner.forward

        def marked(batch: Any) -> torch.Tensor:
            if self.is_kept_busy:
                torch.mm(work, work)
            with torch.profiler.record_function(MARK):
                return forward(batch)

        #: Whether the device still has something to do when a pass is launched, as a loaded engine's has: an
        #: idle one waits for the launch, which takes the profiler up to 0.3 ms.
        self.is_kept_busy = False
        work = torch.ones(_WORK, _WORK, device=runner.device, dtype=torch.bfloat16)
        runner.forward = marked  # type: ignore[method-assign]
        self._requests = 0

    def use_graphs(self, yes: bool) -> bool:
        """False where there are none."""
        self.scheduler.model_runner.graph_runner = self._graph_runner if yes else None
        return not yes or self._graph_runner is not None

    def step(self) -> float:
        """Seconds."""
        start = time.perf_counter()
        self.scheduler.step()
        took = time.perf_counter() - start
        while self._ours.poll(0):
            self._ours.recv()
        return took

    def add_requests(self, tokens: int) -> None:
        for _ in range(BATCH):
            self._requests += 1
            generator = torch.Generator().manual_seed(self._requests)
            prompt = torch.randint(0, SHAPE["vocab_size"], (PROMPT,), generator=generator).tolist()
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            self.scheduler.add_request(TokenizedRequest(f"r{self._requests}", prompt, params))

    def finish(self) -> None:
        for req in list(self.scheduler.running):
            self.scheduler.abort_request(req.rid)
        self.step()


def profiled(engine: Engine, folder: Path, name: str) -> int:
    """Serves requests under the profiler; how many forward passes that took."""
    engine.use_graphs(name == "graphs")
    engine.add_requests(STEPS + 4)
    engine.is_kept_busy = True
    with torch.profiler.profile() as profiler:
        count = 0
        while count < STEPS:
            engine.step()
            count += 1
        current_platform.synchronize()
    engine.is_kept_busy = False
    engine.finish()
    profiler.export_chrome_trace(str(folder / f"{name}.json"))
    return count


def durations(trace: Path) -> list[float]:
    """Return for each marked pass the seconds from the first to the last device work that it launched, or its
    graph.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == MARK and event.get("cat") == "user_annotation"
    )
    work: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            one = (event["ts"], event["ts"] + event["dur"])
            work.setdefault(event["args"]["correlation"], []).append(one)
    found = []
    for begin, end in marks:
        launches = [
            event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= event["ts"] <= end
        ]
        of_graph = [event for event in launches if "GraphLaunch" in event["name"]]
        pieces = [
            piece
            for event in of_graph or launches
            for piece in work.get(event["args"].get("correlation", -1), ())
        ]
        found.append((max(last for _, last in pieces) - min(first for first, _ in pieces)) / 1e6)
    return found


def forward_spans(file: Path) -> Iterator[dict[str, Any]]:
    """The attributes of our spans ``forward``, in order."""
    spans = []
    for line in file.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                spans += [span for span in scope["spans"] if span["name"] == "forward"]
    for span in sorted(spans, key=lambda span: int(span["startTimeUnixNano"])):
        yield {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}


def compare(folder: Path, counts: dict[str, int]) -> list[str]:
    """Return a line for each execution mode, in the order of ``counts``: both medians, and the ratios."""
    spans = list(forward_spans(folder / "traces.jsonl"))[-sum(counts.values()) :]
    lines = [
        "| forward passes | as labelled | spans, ms | profiler, ms | ratio: median (lowest to highest) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, count in counts.items():
        mine, spans = spans[:count], spans[count:]
        theirs = durations(folder / f"{name}.json")
        # The first eager pass after replays has none.
        ours = [float(each.get("sgl_aspects.forward.device_time", 0)) for each in mine]
        for mode in sorted({each["sgl_aspects.forward.mode"] for each in mine}):
            of_mode = [each["sgl_aspects.forward.mode"] == mode for each in mine]
            chosen = [number for number in range(count) if of_mode[number] and ours[number]]
            if len(theirs) != count or not chosen:
                lines.append(f"| {name}, {mode} | {len(mine)} spans, {len(theirs)} marks | | | |")
                continue
            ratios = [ours[number] / theirs[number] for number in chosen]
            label = {mine[number].get("sgl_aspects.forward.graph", "") for number in chosen}
            mean = [statistics.median(each[number] for number in chosen) * 1e3 for each in (ours, theirs)]
            lines.append(
                f"| {name}, {mode} ({len(chosen)}) | {', '.join(sorted(label))} | {mean[0]:.3f} | "
                f"{mean[1]:.3f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
            )
    return lines


def overhead(engine: Engine, words: Any, name: str) -> str:
    """Steps with tracing off and at each of LEVELS, in turns; one line of a table for each level."""
    engine.use_graphs(name == "graphs")
    levels = [0, *LEVELS]
    engine.add_requests(len(levels) * TURNS * (TURN_STEPS + 1) + 60)
    while engine.scheduler.waiting or any(not req.is_prefill_done for req in engine.scheduler.running):
        engine.step()
    took: dict[int, list[float]] = {level: [] for level in levels}
    for _ in range(TURNS):
        for level in levels:
            words[ring_format.WORD_LEVEL] = level
            engine.step()
            current_platform.synchronize()
            start = time.perf_counter()
            for _ in range(TURN_STEPS):
                engine.step()
            current_platform.synchronize()
            took[level].append((time.perf_counter() - start) / TURN_STEPS)
        levels.append(levels.pop(0))
    engine.finish()
    step = statistics.median(took[0])
    lines = []
    for level in LEVELS:
        ratios = [on / off for on, off in zip(took[level], took[0], strict=True)]
        low, middle, high = (100 * (ratio - 1) for ratio in interval(ratios))
        lines.append(
            f"| {name} | {step * 1e3:.3f} | {level} | {middle:+.2f} % ({low:+.2f} to {high:+.2f}) "
            f"| {middle / 100 * step * 1e6:+.1f} |"
        )
    return "\n".join(lines)


_PAGE = """# Tracing on a GPU

Made by `make bench-gpu`: a model in the shape of Llama 3.2 1B ({layers} layers, random bfloat16 weights),
served by the embedded engine. {device}, torch {torch}, {cores} cores.

## Device time

Forward spans carry the device's own time, from events that are read later. The profiler's is from the first
to the last piece of device work that the same pass launched, of a replayed pass that its graph launched. Both
look at the same passes, with a step scheduled while the one before it runs, and the device has other work
when a pass is launched, as in a loaded engine. (An idle one also waits for the launch: up to 0.3 ms under the
profiler.) In brackets: how many.

{durations}

## What it costs

Decode steps of eight requests, with tracing off and at each level in turns of twenty; the median of the
turns' ratios and its 95 % interval. With graphs, a step is scheduled while the one before it runs.

| decode steps | ms with tracing off | level | more | µs a step |
| --- | --- | --- | --- | --- |
{costs}
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_time", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--folder", type=Path, help="keep the profiler's traces and our spans there")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-")))
        folder = arguments.folder or scratch
        current_platform.set_device(current_platform.get_device(0))
        (scratch / "model").mkdir()
        write_model(scratch / "model", arguments.layers)
        with attach(level=3, file=str(folder / "traces.jsonl")) as session:
            words = session.recorder.steps.words  # type: ignore[union-attr]
            engine = Engine(scratch / "model")
            ways = [name for name in ("eager", "graphs") if engine.use_graphs(name == "graphs")]
            words[ring_format.WORD_LEVEL] = 0
            for name in ways:  # compile, choose kernels
                engine.use_graphs(name == "graphs")
                engine.add_requests(4)
                for _ in range(4):
                    engine.step()
                engine.finish()
            costs = [overhead(engine, words, name) for name in ways]
            words[ring_format.WORD_LEVEL] = 4  # level 3 does not time each of its short replays
            counts = {name: profiled(engine, folder, name) for name in ways}
        (folder / "counts.json").write_text(json.dumps(counts))
        page = _PAGE.format(
            layers=arguments.layers,
            device=current_platform.get_device_name(0),
            torch=torch.__version__,
            cores=os.cpu_count(),
            durations="\n".join(compare(folder, counts)),
            costs="\n".join(costs),
        )
        print(page)
        if arguments.write:
            PAGE.write_text(page)


if __name__ == "__main__":
    main()
