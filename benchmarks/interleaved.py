"""What tracing adds to a decode step of a live, real SGLang, on a machine that others share:

    python -m benchmarks.interleaved --device cuda --model FOLDER [--sizes 1 16 64] [--seconds 60]

:mod:`.sglang_overhead` changes the level in turns of many steps; a host that others use becomes faster and
slower by more than the budget within a turn. Here one server stays at level 3, and every 12 to 20 steps
the code of its woven functions is exchanged (:mod:`.exchange_codes`): for SGLang's own ("off"), for what
level 2 weaves, or for all of it. Each group of steps is compared with the groups of "off" right before and
after it.

In the groups: woven functions, observers, the device's events, and what they evict from the caches. Not in
them: weaving itself, and the collector, a process of its own that reads all the time. "nothing" is "off"
once more: its distance from 0 is noise. "burn 10" spends 10 µs in the scheduler's thread: what of it is
seen in a step. "empty":
observers that do nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.receiver import receiver
from benchmarks.sglang_overhead import Load, make_device
from benchmarks.switch import Switch, add_plugin
from benchmarks.turns import interval
from tests.support import sglang_server
from tests.support.sglang_server import serve

VARIANTS = ("nothing", "burn 10", "level 2", "level 3", "level 3, no event", "level 3, empty")
_ROOT = Path(__file__).parent.parent
Groups = list[tuple[str, list[int]]]


class Exchange:
    """The plugin in the scheduler of a server with ``environment``."""

    def __init__(self, folder: Path) -> None:
        add_plugin(folder, "exchange_codes", "from benchmarks.exchange_codes import activate")
        self._file = folder / "exchange.json"
        self.environment = {"EXCHANGE": str(self._file)}

    def measure(self, size: int, variants: Sequence[str], seconds: float) -> Groups:
        """The groups of steps with ``size`` requests in a batch, each with what it ran: nanoseconds."""
        self._file.write_text(json.dumps({"size": size, "variants": variants, "seconds": seconds}))
        made = self._file.with_suffix(".made")
        made.unlink(missing_ok=True)
        os.kill(int(self._file.with_suffix(".pid").read_text()), signal.SIGRTMIN + 3)
        deadline = time.monotonic() + seconds + 60
        while not made.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the scheduler did not finish; is it decoding batches of that size?")
            time.sleep(0.1)
        found: Groups = json.loads(made.read_text())
        return found


def rows(groups: Groups, size: int) -> Iterator[str]:
    """A line for each variant: microseconds beyond the neighbouring groups of "off"."""
    off = [median(steps) for name, steps in groups if name == "off"]
    step = median(off) / 1e3
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for (before, one), (name, other), (after, another) in zip(groups, groups[1:], groups[2:]):
        if before == after == "off" != name:
            pair = [kind(other) - (kind(one) + kind(another)) / 2 for kind in (median, _mean)]
            found[name].append((pair[0] / 1e3, pair[1] / 1e3))
    for name, pairs in found.items():
        if len(pairs) > 8:
            cells = [_cell([pair[kind] for pair in pairs]) for kind in (0, 1)]
            yield f"| {size} | {step:.0f} µs | {name} | {cells[0]} | {cells[1]} | {len(pairs)} |"


def _mean(steps: Sequence[int]) -> float:
    """Without the longest tenth: interruptions by others."""
    return fmean(sorted(steps)[: len(steps) - len(steps) // 10])


def _cell(values: Sequence[float]) -> str:
    low, middle, high = interval(values)
    return f"{middle:+.1f} µs ({low:+.1f} to {high:+.1f})"


HEADER = """
| batch | step | | median step | mean step | groups |
| ---: | ---: | --- | --- | --- | ---: |"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interleaved")
    parser.add_argument("--model", type=Path, required=True, help="the folder of a model")
    parser.add_argument("--device", default="cuda", help="one that SGLang's own platform drives")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 16, 64), help="requests in a batch")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seconds", type=float, default=60, help="for each size")
    parser.add_argument("--groups", type=Path, help="a file for the groups as they were measured")
    given = parser.parse_args()
    device = make_device(given.device, eager=False, largest_batch=max(given.sizes))
    sglang_server.ARGUMENTS.update(device.arguments)
    sglang_server.SWITCHES = device.switches
    measured: dict[int, Groups] = {}
    with tempfile.TemporaryDirectory() as name, receiver() as url:
        folder = Path(name)
        switch, exchange = Switch(folder), Exchange(folder)
        path = os.pathsep.join([switch.environment["PYTHONPATH"], str(_ROOT)])
        environment = {
            **switch.environment,
            **exchange.environment,
            **device.environment,
            "PYTHONPATH": path,
            "SGL_ASPECTS_TRACE": "3",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/ours",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        }
        with serve(given.model, folder / "log", environment=environment) as server:
            print(f"ready after {server.start_seconds:.0f} s\n{HEADER}", flush=True)
            for size in given.sizes:
                load = Load(server, device.tokens, device.few_tokens)
                with load.at_work(size):
                    time.sleep(2)
                    measured[size] = exchange.measure(size, given.variants, given.seconds)
                print("\n".join(rows(measured[size], size)), flush=True)
    if given.groups:
        given.groups.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
