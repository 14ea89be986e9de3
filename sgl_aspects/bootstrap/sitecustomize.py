"""Runs at the start of every interpreter below `sgl-aspects run`: the hooks first, then the program.

Another `sitecustomize` further down the path runs as usual.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import signal
import sys


def _run_the_other_one() -> None:
    here = os.path.dirname(__file__)
    # Remove this folder from the program's path; its children get it through PYTHONPATH.
    sys.path[:] = [path for path in sys.path if path != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _is_helper_of_multiprocessing() -> bool:
    """Return whether this is the resource tracker, which runs no engine code: hooks would slow its start."""
    return any("multiprocessing.resource_tracker" in word for word in sys.orig_argv)


def _prepare_to_be_attached_to() -> None:
    """Load the module by its file: importing the package would import wrapt, too."""
    spec = importlib.util.spec_from_file_location(
        "sgl_aspects_prepared", os.path.join(os.path.dirname(__file__), os.pardir, "run", "prepared.py")
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.prepare_or_say()


def _say(text: str) -> None:
    """Write a line as `sgl_aspects.terminal.say`, where that cannot be imported."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


try:
    if os.environ.get("ASPECTS_DORMANT"):
        if not _is_helper_of_multiprocessing():
            _prepare_to_be_attached_to()
    elif os.environ.get("ASPECTS_RUN") and not _is_helper_of_multiprocessing():
        from sgl_aspects.plugins import load_plugins

        load_plugins()
except ModuleNotFoundError as error:
    if error.name != "sgl_aspects":
        raise
    # another interpreter, as of a script's virtual environment: its program is not to fail
    remedy = "install it there, or run a Python that has it"
    _say(f"sgl-aspects: {sys.executable} runs untraced: {error}; {remedy}")
except SystemExit as stop:
    # A required hook is missing. At this point of its start Python would print a long traceback.
    _say(str(stop))
    os._exit(1)
except KeyboardInterrupt:
    # Here Python would print a fatal error of its own: the program ends as Ctrl-C ends any other, later on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
finally:
    _run_the_other_one()
