"""Failures between a prefill and a decode server of real SGLang end the spans with the reason on both."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("sglang")
pytest.importorskip("sglang_router")

from tests.support.distributions import install_plugin
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.processes import wait_until
from tests.support.sglang_cluster import (
    HELD_TRANSFERS,
    Disaggregated,
    balancer,
    between,
    disaggregated,
    traced,
)
from tests.support.sglang_models import make_mini

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

BODY: dict[str, Any] = {
    "text": "the quick brown fox jumps over the lazy dog",
    "stream": True,
    "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0},
}
LONG = {**BODY, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
TIMEOUT_SECONDS = 20
UNTIL_PREFILLED = ["bootstrap", "queue", "prefill", "kv_transfer"]
UNTIL_RECEIVED = ["bootstrap", "kv_transfer"]
#: By what happens: the server, its phases, how the last one ended (``error.type``, or else finish reason).
ENDS = {
    "no decode server comes": ("prefill", ["bootstrap"], "bootstrap_failed"),
    "left in bootstrap": ("prefill", ["bootstrap"], "abort"),
    "transfer times out": ("decode", UNTIL_RECEIVED, "kv_transfer_failed"),
    "transfer times out, at the sender": ("prefill", UNTIL_PREFILLED, "kv_transfer_failed"),
    "left in transfer": ("decode", UNTIL_RECEIVED, "abort"),
    "left in transfer, at the sender": ("prefill", UNTIL_PREFILLED, "abort"),
    "router dies": ("decode", UNTIL_RECEIVED, "abort"),
    "router dies, at the sender": ("prefill", UNTIL_PREFILLED, "abort"),
    "decode scheduler dies": ("decode", UNTIL_RECEIVED, "unfinished"),
    "decode scheduler dies, at the sender": ("prefill", UNTIL_PREFILLED, "kv_transfer_failed"),
    "prefill server dies": ("decode", UNTIL_RECEIVED, "kv_transfer_failed"),
    "prefill server dies, at the sender": ("prefill", UNTIL_PREFILLED, "unfinished"),
}
#: The gauges when the remaining servers were idle.
IDLE: list[float] = []
FULL = [0x1234567890ABCD00, 0x1234567890ABCD01]
ROOMS = {name.partition(",")[0]: 0x1234567890AB0000 + number for number, name in enumerate(ENDS)}
#: The trace of the request whose room its router chooses.
ROUTED = f"{0xABCDEF:032x}"


@dataclass
class Cluster:
    servers: Disaggregated
    receiver: Receiver
    hold: Path

    @contextmanager
    def transferring(self, name: str) -> Iterator[None]:
        """A request of which the prefill server is about to send the keys and values."""
        with self.holding() as wait_for_transfer, self.servers.asking(BODY, ROOMS[name]):
            wait_for_transfer()
            yield

    @contextmanager
    def holding(self) -> Iterator[Callable[[], None]]:
        """Nothing is sent meanwhile; what it gives returns when something is about to be."""

        def wait_for_transfer() -> None:
            wait_until(waits.exists, 120)
            time.sleep(1)  # the decode server is notified at the same time

        self.hold.touch()
        waits = Path(f"{self.hold}.waits")
        waits.unlink(missing_ok=True)
        yield wait_for_transfer
        self.hold.unlink(missing_ok=True)

    def let_the_router_die(self, log: Path) -> None:
        """A router that is killed while it waits for both servers."""
        with balancer(log, *between(self.servers)) as router, self.holding() as wait_for_transfer:
            connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=240)
            headers = {"content-type": "application/json", "traceparent": f"00-{ROUTED}-{7:016x}-01"}
            connection.request("POST", "/generate", json.dumps(BODY), headers)
            wait_for_transfer()
            router.process.kill()
            connection.close()
            self.receiver.wait_for(lambda spans: len(roots_of_trace(spans)) == 2, 120)
        ROOMS["router dies"] = roots_of_trace(self.receiver.spans)[0].attributes["sgl_aspects.bootstrap_room"]

    def roots(self, name: str) -> list[Span]:
        room = ROOMS[name]
        found = [s for s in self.receiver.spans if s.attributes.get("sgl_aspects.bootstrap_room") == room]
        return [span for span in found if span.kind == 2]

    def wait_for_ends(self, name: str, count: int) -> None:
        self.receiver.wait_for(lambda spans: len(self.roots(name)) >= count, 120)


@contextmanager
def cluster(folder: Path, receiver: Receiver) -> Iterator[Cluster]:
    hold, plugins = folder / "hold", folder / "held"
    plugins.mkdir(parents=True)
    install_plugin(plugins, "held_transfers", HELD_TRANSFERS)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")]),
        "HOLD": str(hold),
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(TIMEOUT_SECONDS),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(TIMEOUT_SECONDS),
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    }
    model = make_mini(folder / "mini")
    one_at_a_time = ["--max-running-requests", "1"]
    with disaggregated(
        model, folder, traced(receiver.endpoint), environment=environment, decode_options=one_at_a_time
    ) as servers:
        yield Cluster(servers, receiver, hold)


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    folder = tmp_path_factory.mktemp("run")
    with engine_receiver() as receiver, ExitStack() as stack:
        with cluster(folder / "first", receiver) as first:
            requests = first.servers.requests(LONG, *FULL)
            with first.servers.prefill.exchanging(requests):
                first.servers.decode.exchange(requests)
            with first.servers.asking(BODY, ROOMS["left in bootstrap"], first.servers.prefill):
                time.sleep(5)
            with first.servers.asking(BODY, ROOMS["no decode server comes"], first.servers.prefill):
                first.wait_for_ends("no decode server comes", 1)
            with first.transferring("transfer times out"):
                first.wait_for_ends("transfer times out", 2)
            with first.holding() as wait_for_transfer:
                with first.servers.asking(BODY, ROOMS["left in transfer"]):
                    wait_for_transfer()
                first.wait_for_ends("left in transfer", 2)  # else it could fail before its sender is notified
            first.let_the_router_die(folder / "router.log")
            with first.transferring("decode scheduler dies"):
                scheduler_of(first.servers.decode.process.pid).kill()
                first.hold.unlink()
                first.wait_for_ends("decode scheduler dies", 2)
            time.sleep(3)  # idle: the gauges show it
            IDLE.extend(point.value for point in receiver.points("sgl_aspects.batch.size"))
        with cluster(folder / "second", receiver) as second, second.transferring("prefill server dies"):
            os.killpg(second.servers.prefill.process.pid, signal.SIGKILL)
            second.wait_for_ends("prefill server dies", 2)
        stack.close()
        yield receiver


def roots_of_trace(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.trace_id == ROUTED and span.kind == 2]


def scheduler_of(process_id: int) -> psutil.Process:
    descendants = psutil.Process(process_id).children(recursive=True)
    (found,) = [process for process in descendants if "sglang::scheduler" in " ".join(process.cmdline())]
    return found


@pytest.mark.parametrize("name", list(ENDS))
def test_each_end_has_its_reason(receiver: Receiver, name: str) -> None:
    mode, phases, why = ENDS[name]
    room = ROOMS[name.partition(",")[0]]
    spans = [
        span
        for span in receiver.spans
        if span.attributes.get("sgl_aspects.bootstrap_room") == room
        and span.resource["sgl_aspects.disaggregation.mode"] == mode
    ]
    (root,) = [span for span in spans if span.kind == 2]
    assert root.is_error
    below = sorted((span for span in spans if span.name in UNTIL_PREFILLED), key=lambda span: span.start)
    assert [span.name for span in below] == phases
    last = below[-1]
    if last.is_error and (mode, why) == ("prefill", "abort"):
        why = "kv_transfer_failed"  # the decode server's notice came before the caller's
    assert why in (last.attributes.get("error.type"), last.attributes.get("sgl_aspects.finish_reason"))
    assert last.is_error is (why != "abort")
    assert not any(span.is_error for span in below[:-1])
    assert last.end <= root.end


def test_a_decode_server_that_is_full_is_waited_for(receiver: Receiver) -> None:
    mode = "sgl_aspects.disaggregation.mode"
    of_decode = [span for span in receiver.spans if span.resource[mode] == "decode"]
    both = [span for span in of_decode if span.attributes.get("sgl_aspects.bootstrap_room") in FULL]
    decodes = [span for span in both if span.name == "decode"]
    first, second = sorted(decodes, key=lambda span: span.start)
    assert first.end <= second.start
    of_second = [span for span in both if span.parent_id == second.parent_id]
    waits = [span for span in of_second if span.name in ("bootstrap", "queue")]
    assert any(span.start < first.end <= span.end for span in waits)


def test_the_gauges_of_who_is_left_fall(receiver: Receiver) -> None:
    assert set(IDLE) == {0}
