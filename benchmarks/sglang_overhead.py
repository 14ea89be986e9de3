"""What tracing costs a real SGLang server: python -m benchmarks.sglang_overhead [ROUNDS] (in .sglang-venv).

One server, one model, one run: hooks and SGLang's own tracing (--enable-trace, level 3) are switched off and
on between rounds, so that a neighbour on the machine slows all of them alike. Each round serves the same
batch once per mode, in turning order; told are the medians of the rounds' ratios to "off", with quartiles:
of the throughput, and of the processor time that the scheduler took, which a busy machine disturbs less.
"off": our hooks woven and disabled, SGLang's tracing at level 0. Both export over OTLP to one receiver.

Before that: what activation costs each process, with hooks registered in SGLang's registry, adopted or not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests import sglang_server
from tests.otlp_receiver import http_receiver
from tests.sglang_models import make_mini
from tests.sglang_server import Server, serve

SGLANGS = "SGLang's own"
MODES = ("off", "2", "3", SGLANGS)
TOKENS = 256
SIZES = (1, 16)

# Plugins that hook functions of the scheduler and of the model's layers, as vendors do.
TARGETS = (
    "sglang.srt.layers.rotary_embedding.factory.get_rope",
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
)
ACTIVATION = """
import json, os, sys, time
import sglang.srt.plugins as plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
def hook(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)
for target in json.loads(sys.argv[1]):
    HookRegistry.register(target, hook, HookType.AROUND)
before, start = set(sys.modules), time.perf_counter()
plugins.load_plugins()
seconds, new = time.perf_counter() - start, set(sys.modules) - before
print(json.dumps([seconds, len(new), len([name for name in new if name.startswith("sglang")])]))
"""

# In each process of the server: a thread that follows the mode in a file.
SWITCH = """
import os, threading, time
from sgl_aspects.weaving.faces import weaver

def follow():
    path, known = os.environ["SWITCH"], None
    while True:
        with open(path) as file:
            mode = file.read()
        if mode != known:
            known = mode
            traced = [a for a in weaver.advices if a.source and a.source.plugin_name == "tracing"]
            forward = [a for a in traced if "ForwardAspect" in a.hook.__qualname__]
            weaver.set_enabled([a for a in traced if a not in forward], mode in ("2", "3"))
            weaver.set_enabled(forward, mode == "3")
            with open(f"{path}.{os.getpid()}", "w") as file:
                file.write(mode)
        time.sleep(0.05)

def activate():
    threading.Thread(target=follow, daemon=True).start()
"""


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    _activation()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        switch = folder / "mode"
        switch.write_text("off")
        (folder / "follow_switch.py").write_text(SWITCH)
        info = folder / "follow_switch-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: follow-switch\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[sgl_aspects.plugins]\nswitch = follow_switch:activate\n")
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,), daemon=True)
        receiver.start()
        endpoint = ours.recv()
        environment = {
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "SWITCH": str(switch),
            "SGL_ASPECTS_TRACE": "3",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "SGLANG_TRACE_LEVEL": "0",
        }
        sglang_server.SWITCHES += ("--enable-trace", "--otlp-traces-endpoint", f"{endpoint}/v1/traces")
        with serve(make_mini(folder / "mini"), folder / "log", environment=environment) as server:
            for size in SIZES:
                _compare(server, switch, size, rounds)
        receiver.kill()


def _receive(told: Connection) -> None:
    with http_receiver() as receiver:
        told.send(receiver.endpoint)
        while True:
            time.sleep(5)
            receiver.requests.clear()


def _activation() -> None:
    """Time and modules of SGLang's ``load_plugins()``, in turns with its hooks adopted and not."""
    for targets in ((), TARGETS):
        for tracing in ("0", "3") if not targets else ("0",):
            found: dict[str, list[list[float]]] = {"1": [], "0": []}
            for _ in range(3):
                for adopt in found:
                    found[adopt].append(_load_plugins(targets, adopt, tracing))
            for adopt, name in (("1", "adopted"), ("0", "left to SGLang")):
                seconds, modules, own = (statistics.median(column) for column in zip(*found[adopt]))
                what = f"load_plugins, {len(targets)} hooks {name}, tracing level {tracing}"
                new = f"{modules:.0f} modules, {own:.0f} of them SGLang's"
                print(f"{what}: {seconds * 1e3:.0f} ms, {new}", flush=True)


def _load_plugins(targets: tuple[str, ...], adopt: str, tracing: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SGL_ASPECTS_ADOPT": adopt, "SGLANG_PLATFORM": "sgl_aspects_cpu", "HF_HUB_OFFLINE": "1"}
        if tracing != "0":
            settings |= {"SGL_ASPECTS_TRACE": tracing, "SGL_ASPECTS_TRACE_FILE": f"{folder}/traces.jsonl"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ACTIVATION, json.dumps(targets)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
        )
    return [float(number) for number in json.loads(done.stdout.splitlines()[-1])]


def _compare(server: Server, switch: Path, size: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    busy: dict[str, list[float]] = {mode: [] for mode in MODES}
    scheduler = _process_named("sglang::scheduler", server.process.pid)
    for turn in range(rounds + 2):
        for step in range(len(MODES)):
            mode = MODES[(turn + step) % len(MODES)]
            switch.write_text(mode)
            server.get(f"/set_trace_level?level={3 if mode == SGLANGS else 0}")
            _wait_for_switch(switch, mode)
            busy_before, start = _processor_seconds(scheduler), time.perf_counter()
            _generate(server, size)
            took = time.perf_counter() - start
            if turn >= 2:  # the first rounds warm up
                seconds[mode].append(took)
                busy[mode].append(_processor_seconds(scheduler) - busy_before)
    speed = size * TOKENS / statistics.median(seconds["off"])
    print(f"batch of {size}: {speed:.0f} output tokens/s with nothing switched on, {rounds} rounds")
    for mode in MODES[1:]:
        name = mode if mode == SGLANGS else f"level {mode}"
        _tell(f"{name}, throughput", seconds["off"], seconds[mode])
        _tell(f"{name}, scheduler's processor time", busy[mode], busy["off"])


def _wait_for_switch(switch: Path, mode: str) -> None:
    """Until every process has the mode: switching takes some hundred milliseconds of the engine's."""
    processes = list(switch.parent.glob(f"{switch.name}.*"))
    deadline = time.monotonic() + 10
    while any(process.read_text() != mode for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)


def _tell(what: str, values: list[float], base: list[float]) -> None:
    more = [100 * (one / off - 1) for one, off in zip(values, base)]
    low, middle, high = statistics.quantiles(more, n=4)
    print(f"  {what}: {middle:+.2f} % (quartiles {low:+.2f} and {high:+.2f})", flush=True)


def _process_named(name: str, ancestor: int) -> int:
    """The process of this title (up to 15 letters count) in the session of ``ancestor``."""
    found = subprocess.run(
        ["pgrep", "-s", str(ancestor), name[:15]], capture_output=True, text=True, check=True
    )
    return int(found.stdout.split()[0])


def _processor_seconds(process_id: int) -> float:
    """What all threads of a process have run."""
    threads = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _generate(server: Server, size: int) -> None:
    body = {
        "text": [f"the quick brown fox {number}" for number in range(size)],
        "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0},
    }
    server.post("/generate", body)


if __name__ == "__main__":
    main()
