"""The time that tracing adds to a decode step of a live SGLang or vLLM server, on a shared machine:

    python -m benchmarks.interleaved --device cuda --model FOLDER [--sizes 1 16 64] [--seconds 60]
    python -m benchmarks.interleaved --engine vllm --model FOLDER

The speed of a shared host changes by more than the budget within seconds. So one server stays at its level
(--level, 3), and every 4 to 8 steps the woven methods run other code (:mod:`.exchange`): the engine's own
("off"), that of level 2, or all.

There are two figures. "added" is timed around each woven method and inside of it, between the engine's own
work with its cold caches: woven functions, observers, the device's events. "step" is the increase of a step's
duration, by least squares after removing the steps' autocorrelation: it includes the effect on the caches and
has a wide interval. Neither includes weaving itself, and the collector, a separate process that always runs.
"nothing" is "off" again: its distance from 0 is noise.
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
from typing import Any

from benchmarks.load import ENGINES, Load, make_device, serving
from benchmarks.receiver import receiver
from benchmarks.turns import interval
from tests.support.distributions import install_plugin
from tests.support.processes import wait_until

ROOT = Path(__file__).parent.parent
VARIANTS = ("nothing", "level 2", "level 3")
_LAGS = 6
#: The intervals of the figures are over this many parts of a measurement.
_PARTS = 16
Steps = list[tuple[str, int, list[int]]]


class Exchange:
    """The plugin in the scheduler of a server with ``environment``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "exchange.json"
        install_plugin(folder, "exchange_codes", "from benchmarks.exchange import activate")
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {"PYTHONPATH": path, "EXCHANGE": str(self._file)}

    def measure(self, size: int, variants: Sequence[str], seconds: float) -> Steps:
        """Return steps of ``size`` requests: the variant, nanoseconds, and those added to each method.

        The last of ``variants`` is all that is woven.
        """
        self._file.write_text(json.dumps({"size": size, "variants": variants, "seconds": seconds}))
        made = self._file.with_suffix(".made")
        made.unlink(missing_ok=True)
        os.kill(int(self._file.with_suffix(".pid").read_text()), signal.SIGRTMIN + 3)
        wait_until(made.exists, seconds + 60)
        found = json.loads(made.read_text())
        self.methods: list[str] = found["methods"]
        return [tuple(step) for step in found["steps"]]  # type: ignore[misc]


def rows(steps: Steps, size: int, variants: Sequence[str]) -> Iterator[str]:
    """A line for each variant."""
    length = len(steps) // _PARTS
    parts = [steps[part * length : (part + 1) * length] for part in range(_PARTS)]
    wall = median(ns for name, ns, _ in steps if name == "off") / 1e3
    for name, (longer, error) in zip(variants, _longer(steps, variants)):
        low, added, high = interval([value for part in parts for value in _added(part, name)])
        count = sum(one == name for one, _, _ in steps)
        yield (
            f"| {size} | {wall:.0f} µs | {name} | {added:+.1f} µs ({low:+.1f} to {high:+.1f}) "
            f"| {longer:+.1f} µs ({longer - 1.96 * error:+.1f} to {longer + 1.96 * error:+.1f}) | {count} |"
        )


def by_method(steps: Steps, methods: Sequence[str], variants: Sequence[str]) -> Iterator[str]:
    """Return a line for each variant: the time that it adds to each woven method."""
    for name in variants:
        parts = []
        for at, method in enumerate(methods):
            of_one = [(one, wall, own[at : at + 1]) for one, wall, own in steps]
            parts.extend(f"{method} {added:+.2f}" for added in _added(of_one, name))
        yield f"{name}, µs: {', '.join(parts)}"


def _added(steps: Steps, name: str) -> Iterator[float]:
    """Microseconds between the two functions around each woven method, beyond those of "off"."""
    own: dict[str, list[int]] = {"off": [], name: []}
    for (_, _, _), (before, _, _), (one, _, ns) in zip(steps, steps[1:], steps[2:]):
        if one == before and one in own:  # the first processes another variant's batch
            own[one].append(sum(ns))
    if own[name] and own["off"]:
        yield (fmean(_without_longest(own[name])) - fmean(_without_longest(own["off"]))) / 1e3


def _without_longest(values: Sequence[int]) -> Sequence[int]:
    """Drop the longest hundredth, in which other processes have interrupted the step."""
    return sorted(values)[: len(values) - len(values) // 100]


def _longer(steps: Steps, variants: Sequence[str]) -> list[tuple[float, float]]:
    """Microseconds that each variant makes a step longer, and the standard error."""
    import torch

    known = [step for step in steps if step[0]]
    wall = torch.tensor([ns / 1e3 for _, ns, _ in known], dtype=torch.float64)
    low, high = wall.quantile(0.005), wall.quantile(0.995)
    wall = wall.clamp(low, high) - wall.median()
    is_one = torch.tensor([[float(name == one) for one in variants] for name, _, _ in known]).to(wall.dtype)
    lags = range(1, _LAGS + 1)
    before = torch.stack([wall[_LAGS - lag : -lag] for lag in lags], 1)
    weights = torch.linalg.lstsq(before, wall[_LAGS:, None]).solution
    own = wall[_LAGS:, None] - before @ weights
    shifted = torch.stack([weights[lag - 1] * is_one[_LAGS - lag : -lag] for lag in lags]).sum(0)
    columns = torch.cat([is_one[_LAGS:] - shifted, torch.ones(len(own), 1, dtype=wall.dtype)], 1)
    solution = torch.linalg.lstsq(columns, own).solution
    variance = (own - columns @ solution).square().mean() * torch.linalg.inv(columns.T @ columns).diagonal()
    return [(float(value), float(error)) for (value,), error in zip(solution, variance.sqrt())][:-1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interleaved")
    parser.add_argument("--model", type=Path, required=True, help="the folder of a model")
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("options", nargs="*", help="more of the engine's own options, after --")
    parser.add_argument("--device", default="cuda", help="one that SGLang's own platform drives")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 16, 64), help="requests in a batch")
    parser.add_argument("--level", type=int, choices=(2, 3), default=3, help="of the server")
    parser.add_argument("--seconds", type=float, default=60, help="for each size")
    parser.add_argument("--methods", action="store_true", help="print the time added to each woven method")
    given = parser.parse_args()
    device = make_device(given.device, largest_batch=max(given.sizes))
    with tempfile.TemporaryDirectory() as folder, receiver() as url:
        exchange = Exchange(Path(folder))
        settings: Any = {"url": url, "level": given.level, "environment": exchange.environment}
        variants = VARIANTS[: given.level]
        with serving(given.engine, given.model, device, given.options, **settings) as server:
            print("\n| batch | step | | added | step longer by | steps |")
            print("| ---: | ---: | --- | --- | --- | ---: |", flush=True)
            for size in given.sizes:
                with Load(server, device).at_work(size):
                    time.sleep(2)
                    try:
                        measured = exchange.measure(size, variants, given.seconds)
                    except (AssertionError, OSError):
                        print(server.log.read_text()[-20000:])
                        raise
                print("\n".join(rows(measured, size, variants)), flush=True)
                if given.methods:
                    print("\n".join(by_method(measured, exchange.methods, variants)), flush=True)


if __name__ == "__main__":
    main()
