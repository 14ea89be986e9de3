"""What activation costs each process of SGLang: python -m benchmarks.sglang_activation (in .sglang-venv).

SGLang's ``load_plugins()``, in turns with hooks registered in its registry adopted by ours and left to it:
the milliseconds that it takes, and the modules that it imports early.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 3
# Plugins that hook functions of the scheduler and of the model's layers, as vendors do.
TARGETS = (
    "sglang.srt.layers.rotary_embedding.factory.get_rope",
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
)
PROGRAM = """
import json, sys, time
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


def main() -> None:
    for targets, tracing in (((), "0"), ((), "3"), (TARGETS, "0")):
        found: dict[str, list[list[float]]] = {"1": [], "0": []}
        for _ in range(ROUNDS):
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
            [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(targets)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
        )
    return [float(number) for number in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    main()
