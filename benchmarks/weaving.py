"""The cost of weaving: registering, rebinding, importing; each figure from processes of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RUNS = 7

REGISTER = """
import json, sys, time
import sgl_aspects as aspects
def hook(original_fn, *args, **kwargs): return original_fn(*args, **kwargs)
targets = [f"not_loaded_{i % 50}.module_{i}:Class.method_{i}" for i in range(500)]
before, start = len(sys.modules), time.perf_counter()
for target in targets:
    aspects.HookRegistry.register(target, hook, aspects.HookType.AROUND)
aspects.HookRegistry.apply_hooks()
print(json.dumps([(time.perf_counter() - start) * 1e3, len(sys.modules) - before]))
"""

# 3,000 modules of about 100 attributes; each target is copied into six modules, as `from X import f` does.
WORLD = """
import json, sys, time, types
COUNT, OURS = int(sys.argv[1]), sys.argv[2] == "ours"
if not OURS:
    sys.path.insert(0, sys.argv[3])
    import logging; logging.disable(logging.CRITICAL)
    from benchmarks.peers import sglang
    registry, around = sglang.HookRegistry, sglang.HookType.AROUND
else:
    import sgl_aspects as aspects
    registry, around = aspects.HookRegistry, aspects.HookType.AROUND
modules = []
for number in range(3000):
    module = types.ModuleType(f"world_{number}")
    exec(f"def f_{number}(x): return x", module.__dict__)
    module.__dict__.update({f"name_{i}": (number, i) for i in range(95)})
    sys.modules[module.__name__] = module
    modules.append(module)
for number in range(COUNT):
    for copy in range(1, 7):
        holder = modules[(number * 5 + copy) % 3000]
        setattr(holder, f"copied_{number}", getattr(modules[number], f"f_{number}"))
def make():
    return lambda original_fn, *args, **kwargs: original_fn(*args, **kwargs) + 1
for number in range(COUNT):
    registry.register(f"world_{number}.f_{number}", make(), around)
start = time.perf_counter()
registry.apply_hooks()
elapsed = (time.perf_counter() - start) * 1e3
for number in range(COUNT):
    assert getattr(modules[(number * 5 + 6) % 3000], f"copied_{number}")(1) == 2
print(json.dumps([elapsed]))
"""

# A package of small modules, each with a function and two methods, under two patterns.
GROWTH = """
import importlib.machinery, json, statistics, sys, time, types
PLACES, WOVEN = int(sys.argv[1]), sys.argv[2] == "woven"
import sgl_aspects as aspects
source = "def f(x): return x\\nclass C:\\n    def m(self): pass\\n    def n(self): pass\\n"
code = compile(source, "pk.py", "exec")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pk":
            return importlib.machinery.ModuleSpec(name, self, is_package=name == "pk")
    def create_module(self, spec): return None
    def exec_module(self, module): exec(code, module.__dict__)
def around(target): return aspects.around(target)(lambda original_fn, *args: original_fn(*args))
def seconds(change):
    start = time.process_time()
    change()
    return time.process_time() - start
sys.meta_path.insert(0, Finder())
if WOVEN:
    aspects.weave(around("pk.**:*"), around("pk.**:*.*"))
imports = [seconds(lambda: importlib.import_module(f"pk.m{n}")) for n in range(PLACES // 3)]
other = types.ModuleType("other")
exec("\\n".join(f"def f{n}(): pass" for n in range(30)), other.__dict__)
sys.modules["other"] = other
hooks, handles = [around(f"other:f{n}") for n in range(30)], []
weaves = [seconds(lambda: handles.append(aspects.weave(hook))) for hook in hooks]
removals = [seconds(handle.remove) for handle in handles]
print(json.dumps([statistics.median(times[-30:]) * 1e3 for times in (imports, weaves, removals)]))
"""

IMPORTS = ("import wrapt", "import sgl_aspects")


class Row(NamedTuple):
    """One figure with its budget, both in ms."""

    what: str
    milliseconds: float
    budget: str


def _run(program: str, *arguments: str) -> list[float]:
    # With compiled modules on disk, as an installed package has them.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    values: list[float] = json.loads(done.stdout)
    return values


def _import_ms(statement: str) -> float:
    program = (
        "import time, json; start = time.perf_counter()\n"
        f"{statement}\nprint(json.dumps([(time.perf_counter() - start) * 1e3]))"
    )
    return _run(program)[0]


def _growth() -> list[Row]:
    rows = []
    for places in (100, 1000, 3000, 10_000):
        bare, woven = (_run(GROWTH, str(places), which) for which in ("bare", "woven"))
        what = f"with {places:,} woven places: "
        rows.append(Row(f"{what}import a module with three more (bare: {bare[0]:.2f})", woven[0], "0.5"))
        rows.append(Row(f"{what}weave one more", woven[1], "0.3"))
        rows.append(Row(f"{what}remove it", woven[2], "0.3"))
    return rows


def measure() -> list[Row]:
    """Medians over processes of their own, rounds interleaved."""
    registering = [_run(REGISTER) for _ in range(RUNS)]
    imported = max(int(values[1]) for values in registering)
    what = f"register and apply 500 hooks on unloaded modules ({imported} modules imported)"
    rows = [Row(what, statistics.median(values[0] for values in registering), "5")]
    for count in (1, 10, 100, 500):
        ours = statistics.median(_run(WORLD, str(count), "ours")[0] for _ in range(3))
        theirs = _run(WORLD, str(count), "sglang", str(ROOT))[0]
        what = f"weave and rebind {count} loaded targets among 3,000 modules"
        rows.append(Row(what, ours, "100" if count == 500 else ""))
        rows.append(Row(f"the same with SGLang's registry, {count}", theirs, ""))
    rows += _growth()
    rounds = [[_import_ms(statement) for statement in IMPORTS] for _ in range(RUNS)]
    wrapt, ours = (statistics.median(times) for times in zip(*rounds))
    rows += [Row(name, value, "") for name, value in zip(IMPORTS, (wrapt, ours))]
    return [*rows, Row("import sgl_aspects beyond import wrapt", ours - wrapt, "10")]
