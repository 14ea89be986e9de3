"""A real SGLang server on the CPU, and a client for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.engine_server import Answer, EngineServer, start_server
from tests.support.processes import free_port

__all__ = ["Answer", "EngineServer", "Server", "serve"]

ARGUMENTS = {
    "--dtype": "float32",
    "--host": "127.0.0.1",
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--max-total-tokens": "16384",
    "--max-running-requests": "32",
    "--context-length": "1024",
    "--log-level": "warning",
}
SWITCHES: tuple[str, ...] = ("--disable-cuda-graph", "--enable-cache-report")
LAUNCH = (sys.executable, "-m", "sglang.launch_server", "--model-path")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


class Server(EngineServer):
    """SGLang's own requests: ``/generate``, and an abort by its id."""

    def leave_generation(self, text: str, headers: dict[str, str]) -> None:
        """Request a long answer, and hang up after its first part."""
        body = {"text": text, "sampling_params": {"max_new_tokens": 800, "ignore_eos": True}}
        self.leave("/generate", body, headers)

    def abort(self, path: str, headers: dict[str, str], rid: str) -> None:
        """Request a long streamed answer, and abort it by its id after its first part."""
        sampling = {"max_new_tokens": 800, "ignore_eos": True}
        body = {"text": "abort", "rid": rid, "sampling_params": sampling}
        with self.streaming(path, body, headers) as answer:
            self.tell("/abort_request", {"rid": rid})
            assert b"abort" in answer.read()


@contextmanager
def serve(
    model: Path,
    log: Path,
    *,
    prefix: Sequence[str] = (),
    command: Sequence[str] = LAUNCH,
    more: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    without: Sequence[str] = (),
    waits: bool = True,
) -> Iterator[Server]:
    """SGLang, unmodified, with ``prefix`` before its command; all of its processes are gone afterwards.

    Without ``waits`` it may not answer yet (``wait_until_ready``).

    :param command: up to the model's path; the options of every server come after it, then ``more``.
    :param without: options of every server that this one does not get.
    """
    port = free_port()
    words = [*prefix, *command, str(model), "--served-model-name", "mini", "--port", str(port), *SWITCHES]
    words += [word for pair in ARGUMENTS.items() if pair[0] not in without for word in pair] + list(more)
    settings = {"SGLANG_PLATFORM": "sgl_aspects_cpu", **(environment or {})}
    with start_server(Server, words, port, log, settings, waits=waits) as server:
        yield server
