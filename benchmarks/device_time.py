"""Device time in forward spans against the torch profiler's.

    python -m benchmarks.device_time [--write] [--folder DIR] [--layers N]

A scheduler of the embedded engine in this process, with a model in the shape of Llama 3.2 1B (random bfloat16
weights), serves prompts and decodes, eagerly and by graphs. While the profiler looks, each pass is also
marked for it; the profiler's duration is from the first to the last piece of device work that the pass
launched, of a replayed one that its graph launched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.stepped import SHAPE, SteppedEngine, write_model
from sgl_aspects.platforms import current_platform
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.record import format as ring_format

PAGE = Path(__file__).resolve().parent / "results" / "device-time.md"
MARK = "bench.forward"
BATCH, PROMPT, STEPS = 8, 256, 12
_WORK = 8192  # a product of square matrices of this size takes an H100 1.5 ms
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Marked(SteppedEngine):
    """Each forward pass is marked for the profiler.

    ``is_kept_busy``: the device still has something to do when a pass is launched, as a loaded engine's has.
    An idle one waits for the launch, which takes the profiler up to 0.3 ms.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(model, BATCH)
        self.is_kept_busy = False
        work = torch.ones(_WORK, _WORK, device=self.runner.device, dtype=torch.bfloat16)
        # Inside the marks there is the woven function: our events and the profiler see the same work.
        forward = self.runner.forward

        def marked(batch: Any) -> torch.Tensor:
            if self.is_kept_busy:
                torch.mm(work, work)
            with torch.profiler.record_function(MARK):
                return forward(batch)

        self.runner.forward = marked  # type: ignore[method-assign]


def profiled(engine: Marked, folder: Path, name: str) -> None:
    """Serve requests for STEPS steps under the profiler."""
    engine.use_graphs(name == "graphs")
    engine.add_requests(BATCH, PROMPT, STEPS + 4)
    engine.is_kept_busy = True
    with torch.profiler.profile() as profiler:
        for _ in range(STEPS):
            engine.step()
        current_platform.synchronize()
    engine.is_kept_busy = False
    engine.finish()
    profiler.export_chrome_trace(str(folder / f"{name}.json"))


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


def compare(folder: Path, ways: list[str]) -> list[str]:
    """Return a line for each execution mode: both medians, and the ratios."""
    spans = list(forward_spans(folder / "traces.jsonl"))[-STEPS * len(ways) :]
    lines = [
        "| forward passes | as labelled | spans, ms | profiler, ms | ratio: median (lowest to highest) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for number, name in enumerate(ways):
        mine = spans[number * STEPS : (number + 1) * STEPS]
        theirs = durations(folder / f"{name}.json")
        # The first eager pass after replays has none.
        ours = [float(each.get("sgl_aspects.forward.device_time", 0)) for each in mine]
        for mode in sorted({each["sgl_aspects.forward.mode"] for each in mine}):
            of_mode = [each["sgl_aspects.forward.mode"] == mode for each in mine]
            chosen = [at for at in range(STEPS) if of_mode[at] and ours[at]]
            if len(theirs) != STEPS or not chosen:
                lines.append(f"| {name}, {mode} | {len(mine)} spans, {len(theirs)} marks | | | |")
                continue
            ratios = [ours[at] / theirs[at] for at in chosen]
            label = {mine[at].get("sgl_aspects.forward.graph", "") for at in chosen}
            mean = [statistics.median(each[at] for at in chosen) * 1e3 for each in (ours, theirs)]
            lines.append(
                f"| {name}, {mode} ({len(chosen)}) | {', '.join(sorted(label))} | {mean[0]:.3f} | "
                f"{mean[1]:.3f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
            )
    return lines


_PAGE = """# Device time on a GPU

Made by `make bench-gpu`: a model in the shape of Llama 3.2 1B ({layers} layers, random bfloat16 weights),
served by the embedded engine. {device}, torch {torch}.

Forward spans carry the device's own time, from events that are read later. The profiler's is from the first
to the last piece of device work that the same pass launched, of a replayed pass that its graph launched. Both
look at the same passes, with a step scheduled while the one before it runs, and the device has other work
when a pass is launched, as in a loaded engine. (An idle one also waits for the launch: up to 0.3 ms under the
profiler.) In brackets: how many.

{durations}

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
        write_model(scratch / "model", arguments.layers)
        with attach(level=3, file=str(folder / "traces.jsonl")) as session:
            words = session.recorder.steps.words  # type: ignore[union-attr]
            engine = Marked(scratch / "model")
            ways = [name for name in ("eager", "graphs") if engine.use_graphs(name == "graphs")]
            words[ring_format.WORD_LEVEL] = 0
            for name in ways:  # compile, choose kernels
                engine.use_graphs(name == "graphs")
                engine.add_requests(BATCH, PROMPT, 4)
                for _ in range(4):
                    engine.step()
                engine.finish()
            words[ring_format.WORD_LEVEL] = 4  # level 3 does not time each of its short replays
            for name in ways:
                profiled(engine, folder, name)
        page = _PAGE.format(
            layers=arguments.layers,
            device=current_platform.get_device_name(0),
            torch=torch.__version__,
            durations="\n".join(compare(folder, ways)),
        )
        print(page)
        if arguments.write:
            PAGE.write_text(page)


if __name__ == "__main__":
    main()
