"""Microseconds of each observer in the scheduler of a live, real SGLang, by level (in .sglang-venv):

    python -m benchmarks.observer_times [--requests 16] [--levels 2 3] [--device cuda --model FOLDER]

A plugin of the server times around each ``enter`` and ``exit`` that tracing has woven, and around an empty
function for what the timing itself takes. Between two steps the model runs, on the CPU in the same caches.
A random mini model is made unless a folder is given.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from pathlib import Path

from benchmarks.sglang_overhead import make_device
from benchmarks.switch import Switch, add_plugin
from tests.support import sglang_server
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import Server, serve

_PLUGIN = """
import json, os, threading, time
from statistics import median

found = {}
clock = time.perf_counter_ns

def timed(name, function):
    times = found.setdefault(name, [])
    keep = times.append
    def call(*args):
        before = clock()
        result = function(*args)
        keep(clock() - before)
        return result
    return call

def empty(*args):
    pass

def tell():
    path = os.environ["OBSERVER_TIMES"]
    while True:
        time.sleep(1.0)
        if found.get("run_batch enter"):
            known = {name: list(times) for name, times in found.items()}
            rows = {name: (len(times), median(times), sum(times)) for name, times in known.items() if times}
            with open(path + ".new", "w") as file:
                json.dump(rows, file)
            os.replace(path + ".new", path)

def activate():
    # Tracing is there already: its observers are made and woven once more, each timed.
    from sgl_aspects.tracing import observers, session
    from sgl_aspects.tracing.observers.observation import Observation

    current = session.current()
    if current is None or not current._undo:
        return
    finish, nothing = Observation.__post_init__, timed("(timing an empty function)", empty)

    def __post_init__(self):
        finish(self)
        enter, exit = self.enter, self.exit
        self.enter = enter and timed(self.role + " enter", enter)
        self.exit = exit and timed(self.role + " exit", exit)
        if self.role == "run_batch":
            inner = self.enter
            def both(args, kwargs):
                nothing(args, kwargs)
                return inner(args, kwargs)
            self.enter = both

    Observation.__post_init__ = __post_init__
    for step in reversed(current._undo):
        step()
    current._undo = observers.weave_observers(current.recorder)
    threading.Thread(target=tell, daemon=True).start()
"""


def _generate(server: Server, requests: int, tokens: int) -> None:
    body = {
        "text": [f"the quick brown fox {number}" for number in range(requests)],
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    connection.getresponse().read()
    connection.close()


def measure(
    model: Path, level: int, requests: int, tokens: int, more: dict[str, str]
) -> dict[str, tuple[int, float, float]]:
    """By enter and exit: calls, median nanoseconds of a call, nanoseconds in all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        switch = Switch(folder)
        add_plugin(folder, "zz_observer_times", _PLUGIN)
        times = folder / "times"
        environment = {
            **switch.environment,
            **more,
            "OBSERVER_TIMES": str(times),
            "SGL_ASPECTS_TRACE": str(level),
            "SGL_ASPECTS_TRACE_FILE": str(folder / "traces.jsonl"),
        }
        with serve(model, folder / "log", environment=environment) as server:
            _generate(server, requests, tokens)
            time.sleep(2.5)
            found: dict[str, tuple[int, float, float]] = json.loads(times.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observer_times", description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--device", default="cpu", help="cpu, or one that SGLang's own platform drives (cuda)"
    )
    given = parser.parse_args()
    environment: dict[str, str] = {}
    if given.device != "cpu":
        device = make_device(given.device, eager=False, largest_batch=max(16, given.requests))
        sglang_server.ARGUMENTS.update(device.arguments)
        sglang_server.SWITCHES = device.switches
        environment = device.environment
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or make_mini(Path(folder) / "mini")
        for level in given.levels:
            found = measure(model, level, given.requests, given.tokens, environment)
            empty = found.pop("(timing an empty function)")[1]
            steps = found["run_batch enter"][0]
            print(f"\nlevel {level}, {steps} steps of {given.requests} requests (empty: {empty:.0f} ns)")
            whole = 0.0
            for name, (calls, median, _) in sorted(found.items(), key=lambda row: -row[1][2]):
                own = max(0.0, median - empty) / 1000
                if calls >= steps * 0.8 and calls < steps * 40:
                    whole += own * calls / steps
                print(f"    {name:<34}{calls:>8} calls  {own:8.2f} µs")
            print(f"    of a step, by medians: {whole:.1f} µs")


if __name__ == "__main__":
    main()
