"""Switches tracing's hooks off and on in every process of a live engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.distributions import install_plugin as add_plugin

# In each process of the engine: a thread that follows the file, and confirms it.
_PLUGIN = """
import os, threading, time
from sgl_aspects.weaving import weaver

def follow():
    path, known = os.environ["SWITCH"], "on"
    while os.path.exists(path):
        with open(path) as file:
            wanted = file.read()
        if wanted != known:
            known = wanted
            traced = [a for a in weaver.advices if a.source and a.source.plugin_name == "tracing"]
            weaver.set_enabled(traced, wanted == "on")
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(known)
        time.sleep(0.02)

def activate():
    threading.Thread(target=follow, daemon=True).start()
"""


class Switch:
    """A plugin in ``folder``; processes with ``environment`` have it. Begins with the hooks on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "switch"
        self._file.write_text("on")
        add_plugin(folder, "follow_switch", _PLUGIN)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.environment = {"PYTHONPATH": path, "SWITCH": str(self._file)}

    def turn(self, is_on: bool) -> None:
        """Switch, and return when every process has followed."""
        wanted = "on" if is_on else "off"
        self._file.write_text(wanted)
        deadline = time.monotonic() + 10
        while any(applied.read_text() != wanted for applied in self._applied()):
            if time.monotonic() > deadline:
                raise TimeoutError("not every process of the engine has followed the switch")
            time.sleep(0.005)

    def _applied(self) -> Iterator[Path]:
        """Yield the latest confirmations of the living processes."""
        for applied in self._file.parent.glob("switch.*"):
            if Path("/proc", applied.suffix[1:]).exists():
                yield applied
