"""With tracing not attached, the engine in its scheduler process is the engine as it was written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from sgl_aspects.engines.embedded import EMBEDDED
from sgl_aspects.runtime import Engine, SamplingParams
from tests.support.distributions import install_plugin
from tests.support.tiny_models import make_llama

# A plugin runs in the scheduler process before the engine's modules are imported there. This one looks, from
# inside, at the namespace of each module after its own code has run, and again while requests are served.
PROBE = '''
import importlib.abc, importlib.machinery, json, os, sys, threading

OUT = os.environ["PROBE_OUT"]
TARGETS = json.loads(os.environ["PROBE_TARGETS"])
made = {}

class Finder(importlib.abc.MetaPathFinder):
    """Keeps the functions that a module's code made, before other code could change them."""
    def find_spec(self, name, path=None, target=None):
        if name not in {t.partition(":")[0] for t in TARGETS}:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)))
        spec.loader = Loader(spec.loader)
        return spec

class Loader:
    def __init__(self, loader):
        self.loader = loader
    def __getattr__(self, name):
        return getattr(self.loader, name)
    def exec_module(self, module):
        self.loader.exec_module(module)
        for target in TARGETS:
            if target.startswith(module.__name__ + ":"):
                made[target] = look_up(target)

def look_up(target):
    name, _, path = target.partition(":")
    owner, _, attribute = path.partition(".")
    return vars(getattr(sys.modules[name], owner))[attribute]

def activate():
    if os.environ.get("PROBE_OWNER") == str(os.getpid()):
        return
    sys.meta_path.insert(0, Finder())
    threading.Thread(target=wait, daemon=True).start()

def wait():
    asked = threading.Event()
    while not os.path.exists(OUT + ".ask"):
        asked.wait(0.02)
    answer = {
        "same": [t for t in made if look_up(t) is made[t] and not hasattr(made[t], "__wrapped__")],
        "made": list(made),
        "watchers": [n for n in sys.modules if n.startswith(("opentelemetry", "sgl_aspects.tracing."))
                     and n != "sgl_aspects.tracing.plugin"],
        "hooks": len(sys.modules["sgl_aspects"].report().hooks),
        "finders": [type(f).__name__ for f in sys.meta_path if type(f).__name__ == "ModuleWatcher"],
    }
    with open(OUT + ".tmp", "w") as file:
        json.dump(answer, file)
    os.rename(OUT + ".tmp", OUT)
'''


@pytest.mark.parametrize("attached", [False, True])
def test_the_schedulers_functions_are_the_original_objects(
    attached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler_side = [
        target
        for role in EMBEDDED.roles.values()
        for target in role.targets
        if "request_manager" not in target and "+" not in target  # a family: a class for each platform
    ]
    assert len(scheduler_side) >= 5
    install_plugin(tmp_path, "probe", PROBE)
    out = tmp_path / "answer.json"
    monkeypatch.syspath_prepend(str(tmp_path))  # a spawned child gets the parent's path
    monkeypatch.setenv("PROBE_OWNER", str(os.getpid()))
    monkeypatch.setenv("PROBE_OUT", str(out))
    monkeypatch.setenv("PROBE_TARGETS", json.dumps(scheduler_side))
    if attached:  # the probe can tell the difference
        monkeypatch.setenv("SGL_ASPECTS_TRACE", "4")  # of lower levels not all are woven
        monkeypatch.setenv("SGL_ASPECTS_TRACE_RUN", str(tmp_path / "ended-run"))
    else:
        monkeypatch.delenv("SGL_ASPECTS_TRACE", raising=False)

    make_llama(tmp_path / "model")
    with Engine(model_path=str(tmp_path / "model"), max_total_tokens=512) as engine:
        assert engine.generate([5, 6, 7], SamplingParams(max_new_tokens=4, temperature=0.0)).output_ids
        (tmp_path / "answer.json.ask").touch()
        deadline = time.monotonic() + 60
        while not out.exists():
            assert time.monotonic() < deadline, "the probe in the scheduler process did not answer"
            time.sleep(0.02)
    answer = json.loads(out.read_text())

    if attached:
        assert answer["same"] == []
        assert answer["hooks"] > 0
    else:
        assert sorted(answer["same"]) == sorted(answer["made"])
        loaded = {target.partition(":")[0] for target in answer["made"]}
        assert len(answer["made"]) >= 10
        assert "sgl_aspects.runtime.scheduling.scheduler" in loaded
        assert answer["watchers"] == []
        assert answer["hooks"] == 0
        assert answer["finders"] == []
