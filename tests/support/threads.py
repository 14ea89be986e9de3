"""Functions that run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_threads(*functions: Callable[[], object], seconds: float = 60) -> Iterator[list[threading.Thread]]:
    """Run each beside the block. They end within ``seconds`` after it, and what one raised is raised."""
    failures: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as failure:  # noqa: BLE001  it is raised in the main thread
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    for failure in failures:
        raise failure
