"""What tracing costs a real SGLang server: python -m benchmarks.sglang_overhead [ROUNDS] (in .sglang-venv).

One server, one model, one run: the hooks are switched off and on between rounds, so that a neighbour on the
machine slows all of them alike. Each round serves the same batch once per mode, in turning order; told are
the medians of the rounds' own ratios to "off", with quartiles: of the throughput, and of the processor time
that the scheduler took, which a busy machine disturbs less. "off": woven and disabled.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.sglang_models import make_mini
from tests.sglang_server import Server, serve

MODES = ("off", "2", "3")
TOKENS = 64
SIZES = (1, 16)

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
            weaver.set_enabled([a for a in traced if a not in forward], mode != "off")
            weaver.set_enabled(forward, mode == "3")
        time.sleep(0.05)

def activate():
    threading.Thread(target=follow, daemon=True).start()
"""


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        switch = folder / "mode"
        switch.write_text("off")
        (folder / "follow_switch.py").write_text(SWITCH)
        info = folder / "follow_switch-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: follow-switch\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[sgl_aspects.plugins]\nswitch = follow_switch:activate\n")
        environment = {
            "PYTHONPATH": str(folder),
            "SWITCH": str(switch),
            "SGL_ASPECTS_TRACE": "3",
            "SGL_ASPECTS_TRACE_FILE": str(folder / "traces.jsonl"),
        }
        with serve(make_mini(folder / "mini"), folder / "log", environment=environment) as server:
            for size in SIZES:
                _compare(server, switch, size, rounds)


def _compare(server: Server, switch: Path, size: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    busy: dict[str, list[float]] = {mode: [] for mode in MODES}
    scheduler = _process_named("sglang::scheduler", server.process.pid)
    for turn in range(rounds + 2):
        for step in range(len(MODES)):
            mode = MODES[(turn + step) % len(MODES)]
            switch.write_text(mode)
            time.sleep(0.15)
            busy_before, start = _processor_seconds(scheduler), time.perf_counter()
            _generate(server, size)
            took = time.perf_counter() - start
            if turn >= 2:  # the first rounds warm up
                seconds[mode].append(took)
                busy[mode].append(_processor_seconds(scheduler) - busy_before)
    speed = size * TOKENS / statistics.median(seconds["off"])
    print(f"batch of {size}: {speed:.0f} output tokens/s with nothing switched on, {rounds} rounds")
    for mode in MODES[1:]:
        _tell(f"level {mode}, time", seconds[mode], seconds["off"])
        _tell(f"level {mode}, scheduler's processor time", busy[mode], busy["off"])


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
