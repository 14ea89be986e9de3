"""SGLang clusters on one machine's CPU: prefill and decode servers, balancers, nodes of one engine, replicas.

Every server is started by an ``sgl-aspects run`` of its own, as on hosts of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.distributions import install_plugin
from tests.support.engine_server import wait_until_ready
from tests.support.processes import end, free_port
from tests.support.sglang_server import Server, serve

# KV caches travel over TCP: there is no RDMA device, and no host but this one.
LOOPBACK = {
    "MC_FORCE_TCP": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# To send a chunk of KV cache SGLang uses pinned memory and CUDA events, unless its sender overrides that.
SENDER_ON_CPU = """
import sgl_aspects as aspects

@aspects.after("sglang.srt.disaggregation.mooncake.conn:MooncakeKVSender.__init__")
def send_from_the_host(result, self, *args, **kwargs):
    self.supports_host_tensor_indices = False

def activate():
    aspects.weave(send_from_the_host)
"""
# Transfers of KV caches wait as long as the file $HOLD is there; $HOLD.waits shows that one does.
HELD_TRANSFERS = """
import os, time
import sgl_aspects as aspects

@aspects.before("sglang.srt.disaggregation.mooncake.conn:MooncakeKVManager.send_kvcache")
def wait(*args, **kwargs):
    hold = os.environ["HOLD"]
    while os.path.exists(hold):
        open(hold + ".waits", "a").close()
        time.sleep(0.05)

def activate():
    aspects.weave(wait)
"""
_BOOTSTRAP_HOST = "127.0.0.1"


@dataclass
class Disaggregated:
    """A prefill and a decode server, and the port at which their bootstrap server listens."""

    prefill: Server
    decode: Server
    bootstrap_port: int

    def post(self, body: dict[str, Any], room: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Like a balancer: the same request to both, and the decode server's answer."""
        requests = self.requests(body, room, headers=headers)
        with self.prefill.exchanging(requests), self.decode.exchanging(requests) as results:
            (found,) = results()
        return found

    def post_to_decode(self, body: dict[str, Any], room: int) -> dict[str, Any]:
        """Like a balancer while the prefill server is gone."""
        (found,) = self.decode.exchange(self.requests(body, room))
        return found

    @contextmanager
    def asking(self, body: dict[str, Any], room: int, *servers: Server) -> Iterator[None]:
        """The request to these servers (both), from a caller that hangs up at the end of the block."""
        (request,) = self.requests(body, room)
        with ExitStack() as stack:
            for server in servers or (self.prefill, self.decode):
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
                stack.callback(connection.close)
                headers = {"content-type": "application/json"}
                connection.request("POST", "/generate", json.dumps(request["body"]), headers)
            yield

    def leave(self, body: dict[str, Any], room: int) -> None:
        """``post`` by a caller that hangs up after the first part of the answer."""
        requests = self.requests(body, room)
        with self.prefill.exchanging(requests):
            self.decode.leave("/generate", requests[0]["body"], {})

    def requests(
        self, body: dict[str, Any], *rooms: int, headers: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """A request for each room, as ``EngineServer.exchange`` takes them."""
        meeting = {"bootstrap_host": _BOOTSTRAP_HOST, "bootstrap_port": self.bootstrap_port}
        bodies = [{**body, **meeting, "bootstrap_room": room} for room in rooms]
        return [{"path": "/generate", "headers": headers or {}, "body": each} for each in bodies]


def traced(endpoint: str, *options: str, level: int = 3) -> list[str]:
    """The prefix of a traced server's command."""
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", str(level), "--endpoint", endpoint]
    return [*command, *options, "--"]


@contextmanager
def disaggregated(
    model: Path,
    folder: Path,
    prefix: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
) -> Iterator[Disaggregated]:
    """A prefill and a decode server that transfer KV caches for real (mooncake, over loopback)."""
    plugin = folder / "plugin"
    plugin.mkdir()
    install_plugin(plugin, "kv_sender_on_cpu", SENDER_ON_CPU)
    bootstrap_port = free_port()
    common = ["--disaggregation-transfer-backend", "mooncake", "--disaggregation-mode"]
    prefill = [*common, "prefill", "--disaggregation-bootstrap-port", str(bootstrap_port)]
    decode = [*common, "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor"]
    given = environment or {}
    path = os.pathsep.join(filter(None, [str(plugin), given.get("PYTHONPATH")]))
    settings = {**LOOPBACK, **given, "PYTHONPATH": path}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                serve(
                    model,
                    folder / log,
                    prefix=prefix,
                    more=[*words, *more],
                    environment=settings,
                    waits=False,
                )
            )
            for log, words, more in (
                ("prefill.log", [*prefill, "--disable-radix-cache"], prefill_options),
                ("decode.log", decode, decode_options),
            )
        ]
        for server in servers:
            wait_until_ready(server)
        yield Disaggregated(servers[0], servers[1], bootstrap_port)


@contextmanager
def nodes(
    model: Path, folder: Path, prefix: Sequence[str], *, environment: dict[str, str] | None = None
) -> Iterator[list[Server]]:
    """Two nodes of one engine, each with a rank of its tensor parallelism and a run of its own."""
    address = f"127.0.0.1:{free_port()}"
    settings = {**LOOPBACK, "SGLANG_CPU_OMP_THREADS_BIND": "0|1", **(environment or {})}
    with ExitStack() as stack:
        servers: list[Server] = []
        for rank in (1, 0):
            words = ["--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank)]
            words += ["--dist-init-addr", address]
            server = serve(
                model,
                folder / f"node{rank}.log",
                prefix=prefix,
                more=words,
                environment=settings,
                waits=False,
            )
            servers.insert(0, stack.enter_context(server))
        wait_until_ready(servers[0])
        yield servers


@contextmanager
def replicas(model: Path, folder: Path, prefix: Sequence[str], count: int = 2) -> Iterator[list[Server]]:
    """Independent servers of the same model."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serve(model, folder / f"replica{number}.log", prefix=prefix, waits=False))
            for number in range(count)
        ]
        for server in servers:
            wait_until_ready(server)
        yield servers


@contextmanager
def balancer(log: Path, *words: str) -> Iterator[Server]:
    """SGLang's router with these options; ``--mini-lb`` makes it the small balancer in Python."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--prometheus-port", str(free_port()), *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    server = Server(port, process, log)
    try:
        wait_until_ready(server)
        _wait_until_routed(server)
        yield server
    finally:
        end(process)


def between(cluster: Disaggregated) -> list[str]:
    """The options of a balancer before a prefill and a decode server."""
    words = ["--pd-disaggregation", "--policy", "random"]
    words += ["--prefill", f"http://127.0.0.1:{cluster.prefill.port}", str(cluster.bootstrap_port)]
    return [*words, "--decode", f"http://127.0.0.1:{cluster.decode.port}"]


def _wait_until_routed(server: Server) -> None:
    """A router answers before its workers have registered."""
    deadline = time.monotonic() + 60
    body = {"text": "ready?", "sampling_params": {"max_new_tokens": 2}}
    while True:
        with contextlib.suppress(AssertionError, OSError, http.client.HTTPException):
            server.post("/generate", body)
            return
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        time.sleep(0.5)
