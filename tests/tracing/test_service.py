"""The service that a run's spans belong to: the served model and the server's role, unless it is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import EMBEDDED, SGLANG, TRANSFORMERS, VLLM, Engine
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.otlp_receiver import Receiver


def sglang_manager(mode: str) -> Any:
    server_args = SimpleNamespace(served_model_name="mini", disaggregation_mode=mode)
    return SimpleNamespace(served_model_name="mini", server_args=server_args)


def vllm_manager(role: str | None) -> Any:
    model = SimpleNamespace(served_model_name="mini")
    transfer = SimpleNamespace(kv_role=role, kv_connector="NixlConnector") if role else None
    settings = SimpleNamespace(
        model_config=model, kv_transfer_config=transfer, parallel_config=SimpleNamespace(nnodes=1)
    )
    return SimpleNamespace(model_config=model, vllm_config=settings)


@pytest.mark.parametrize(
    ("engine", "manager", "service"),
    [
        (EMBEDDED, SimpleNamespace(model="mini"), "mini"),
        (TRANSFORMERS, "mini", "mini"),
        (SGLANG, sglang_manager("null"), "mini"),
        (SGLANG, sglang_manager("decode"), "mini-decode"),
        (VLLM, vllm_manager(None), "mini"),
        (VLLM, vllm_manager("kv_producer"), "mini-prefill"),
        (Engine("hare", "hare", {}, {"manager.model": "model"}), SimpleNamespace(model="mini"), "mini"),
        (EMBEDDED, None, "sgl-aspects"),
    ],
)
def test_a_process_whose_start_was_not_seen_is_described_by_its_first_request(
    receiver: Receiver, engine: Engine, manager: Any, service: str
) -> None:
    """As after ``sgl-aspects attach``, and in engines without a function that describes them."""
    answer(receiver, engine, manager)
    (span,) = receiver.spans
    assert span.resource["service.name"] == service


def test_a_service_that_the_user_named_keeps_its_name(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=elsewhere")
    answer(receiver, SGLANG, sglang_manager("decode"))
    (span,) = receiver.spans
    names = ("service.name", "host.name", "sgl_aspects.disaggregation.mode")
    assert [span.resource[name] for name in names] == ["ours", "elsewhere", "decode"]


def answer(receiver: Receiver, engine: Engine, manager: Any) -> None:
    with attach(endpoint=receiver.endpoint, level=1) as session:
        calls = Trackers.of(engine, session.recorder, DEFAULTS).calls
        calls.end(calls.begin(SimpleNamespace(), manager, 1, rid="r", operation="chat"), "length")


def test_a_description_keeps_what_was_known_before(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint, level=1) as session:
        trackers = Trackers.of(EMBEDDED, session.recorder, DEFAULTS)
        trackers.process.describe({"service": "mini", "rank": "tp1"})
        trackers.process.describe({"service": "mini", "rank": None, "node_rank": 1})
        calls = trackers.calls
        calls.end(calls.begin(SimpleNamespace(), SimpleNamespace(model="other"), 1, rid="r"), "length")
    (span,) = receiver.spans
    found = [span.resource[name] for name in ("service.name", "sgl_aspects.rank", "sgl_aspects.node.rank")]
    assert found == ["mini", "tp1", 1]
