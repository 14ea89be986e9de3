"""The configurations of docs/cluster.md: what their parts name is there. Nothing here starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "cluster"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("name", ["node-collector.yaml", "gateway.yaml"])
def test_pipelines_name_what_is_configured(name: str) -> None:
    configured = read(name)
    used: dict[str, set[str]] = {"receivers": set(), "processors": set(), "exporters": set()}
    for pipeline in configured["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(configured[kind])
            used[kind] |= set(names)
        assert pipeline["processors"][0] == "memory_limiter"
        assert pipeline["processors"][-1] == "batch"
    assert {kind: set(configured[kind]) for kind in used} == used


def test_a_whole_trace_is_kept_for_the_reasons_on_the_page() -> None:
    """The keys as the Collector's contrib distribution documents them: a wrong one ends it as it starts."""
    configured = read("gateway.yaml")["processors"]["tail_sampling"]
    policies = configured.pop("policies")
    assert set(configured) == {"decision_wait", "num_traces"}
    assert [policy.pop("name") for policy in policies] == ["failed", "slow", "share"]
    assert policies == [
        {"type": "status_code", "status_code": {"status_codes": ["ERROR"]}},
        {"type": "latency", "latency": {"threshold_ms": 10_000}},
        {"type": "probabilistic", "probabilistic": {"sampling_percentage": 5}},
    ]
    assert set(read("node-collector.yaml")["exporters"]["loadbalancing"]) == {
        "routing_key",
        "protocol",
        "resolver",
    }


def test_whole_traces_reach_one_gateway() -> None:
    exporter = read("node-collector.yaml")["exporters"]["loadbalancing"]
    assert exporter["routing_key"] == "traceID"
    port = exporter["resolver"]["dns"]["port"]
    assert read("gateway.yaml")["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{port}")
