"""Checks in processes of their own: a fresh one to measure, two to communicate."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from sgl_aspects.isolated import safe_path
from sgl_aspects.plugins import load_plugins

_SECONDS = 180.0


def call_in_processes(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Run ``function(*arguments[i])`` in spawned process ``i``; answers in order. An error of one is raised.

    Such a process runs the platform that SGLANG_PLATFORM chooses. RuntimeError: one died.
    """
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(len(arguments), multiprocessing.get_context("spawn"), load_plugins)
    try:
        with safe_path():  # it starts a process for each
            calls = [pool.submit(function, *words) for words in arguments]
        return [call.result(_SECONDS) for call in calls]
    except BrokenProcessPool:
        raise RuntimeError("a process of the check died; its output is above") from None
    finally:
        pool.shutdown(wait=False)
        for process in multiprocessing.active_children():
            if process not in others:  # where one failed, the others may wait for it endlessly
                process.kill()
