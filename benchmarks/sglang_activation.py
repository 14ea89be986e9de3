"""The time that activation adds to the start of each SGLang process: python -m benchmarks.sglang_activation
[PAIRS].

Fresh interpreters, in turns. First a plain one, with and without `sgl-aspects run`. Then SGLang's own
``load_plugins()``, timed from inside with SGLang's loader imported: without any plugin, with ours all off,
with tracing, and with hooks of other plugins, adopted and left to SGLang. The table has medians with
quartiles, the number of modules imported, and how many of them are SGLang's.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

LAUNCHED = "import sys, json; print(json.dumps([0, len(sys.modules), 0]))"
# The last line has the cost; wall time is the whole process's.
LOADED = """
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
THREE = (
    "sglang.srt.layers.rotary_embedding.factory.get_rope",
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        trace = {"SGL_ASPECTS_TRACE": "3", "SGL_ASPECTS_TRACE_FILE": f"{folder}/traces.jsonl"}
        nothing = {"SGLANG_PLUGINS": "nothing"}
        own, adopted = {"SGL_ASPECTS_ADOPT": "0"}, {"SGL_ASPECTS_ADOPT": "1"}
        _compare(
            f"interpreters, {pairs} pairs, whole processes",
            {
                "plain": ([], LAUNCHED, (), {}),
                "under sgl-aspects run --level 3": (_launcher(folder), LAUNCHED, (), {}),
            },
            pairs,
            wall=True,
        )
        _compare(
            f"load_plugins(), {pairs} rounds",
            {
                "no plugin": ([], LOADED, (), nothing),
                "ours, all off": ([], LOADED, (), {}),
                "ours, tracing at level 3": ([], LOADED, (), trace),
            },
            pairs,
        )
        for targets in (THREE, tuple(_methods(50))):
            ways = {
                "adopted": ([], LOADED, targets, adopted),
                "left to SGLang": ([], LOADED, targets, {**own, **nothing}),
            }
            _compare(f"load_plugins() with {len(targets)} hooks of other plugins, {pairs} pairs", ways, pairs)


Way = tuple[list[str], str, tuple[str, ...], Mapping[str, str]]


def _launcher(folder: str) -> list[str]:
    return [sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", f"{folder}/run.jsonl", "--"]


def _methods(count: int) -> Iterator[str]:
    """Methods of the scheduler and of the model runner, as vendors hook them."""
    for module, cls in (
        ("sglang.srt.managers.scheduler", "Scheduler"),
        ("sglang.srt.model_executor.model_runner", "ModelRunner"),
    ):
        spec = importlib.util.find_spec(module.partition(".")[0])
        assert spec is not None
        root = Path(str(spec.origin)).parent.parent
        tree = ast.parse((root / f"{module.replace('.', '/')}.py").read_text())
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
        plain = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
        for name in plain[: count // 2]:
            yield f"{module}.{cls}.{name}"


def _compare(title: str, ways: Mapping[str, Way], rounds: int, *, wall: bool = False) -> None:
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways) if turn % 2 else list(reversed(ways)):
            found[name].append(_run(ways[name], wall))
    print(f"{title}:")
    for name, runs in found.items():
        low, middle, high = statistics.quantiles([seconds * 1e3 for seconds, *_ in runs], n=4)
        modules, sglangs = (statistics.median(column) for column in list(zip(*runs))[1:])
        what = f"{modules:.0f} modules" + ("" if wall else f", {sglangs:.0f} of them SGLang's")
        print(f"  {name:32} {middle:8.0f} ms ({low:.0f} to {high:.0f}), {what}", flush=True)


def _run(way: Way, wall: bool) -> tuple[float, int, int]:
    before, script, targets, settings = way
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("SGL", "ASPECTS_", "OTEL_"))
    }
    environment = {**clean, "SGLANG_PLATFORM": "sgl_aspects_cpu", "HF_HUB_OFFLINE": "1", **settings}
    command = [*before, sys.executable, "-W", "ignore", "-c", script, json.dumps(targets)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    took = time.perf_counter() - start
    seconds, modules, sglangs = json.loads(done.stdout.splitlines()[-1])
    return took if wall else seconds, modules, sglangs


if __name__ == "__main__":
    main()
