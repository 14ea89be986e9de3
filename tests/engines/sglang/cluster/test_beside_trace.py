"""Prefill and decode servers with SGLang's own ``--enable-trace`` and ours: the same requests in both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.support.otlp_receiver import Span
from tests.support.phases import engine_receiver
from tests.support.sglang_cluster import disaggregated, traced
from tests.support.sglang_models import make_mini

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

#: Its span; the server, and our span of the same time or of more. The table in docs/sglang.md.
SPANS = {
    "prefill_bootstrap": ("prefill", "bootstrap"),
    "prefill_waiting": ("prefill", "queue"),
    "prefill_forward": ("prefill", "prefill"),
    "prefill_transfer_kv_cache": ("prefill", "kv_transfer"),
    "decode_prepare": ("decode", "bootstrap"),
    "decode_bootstrap": ("decode", "bootstrap"),
    "decode_transferred": ("decode", "kv_transfer"),
    "decode_waiting": ("decode", "queue"),
    "decode_forward": ("decode", "decode"),
}
#: Of the same name here; between two of ours; a step here; the threads of a transfer, inside ``kv_transfer``.
OTHERS = {
    *("tokenize", "api_server_dispatch", "request_process", "prefill_prepare"),
    *("decode_loop", "chunked_prefill", "fake_output"),
}
TRANSFERS = {
    *("mooncake_send", "mooncake_recv"),
    *("mooncake_worker_send", "mooncake_worker_send_session", "mooncake_worker_recv"),
}
# Both read clocks within a few lines of code; on a busy machine a process may be interrupted between them.
NEAR_NS = 60_000_000
#: The first one's spans are not compared: between the two readings of clocks a server does for the first time
#: what takes it a tenth of a second.
FIRST, *CALLERS = [f"{number + 1:032x}" for number in range(4)]
BODY = {
    "text": "the quick brown fox jumps over the lazy dog",
    "stream": True,
    "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0},
}


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Span]]:
    folder: Path = tmp_path_factory.mktemp("run")
    model = make_mini(folder / "mini")
    with engine_receiver() as receiver:
        options = ["--enable-trace", "--otlp-traces-endpoint", f"{receiver.endpoint}/v1/traces"]
        environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        with disaggregated(
            model,
            folder,
            traced(receiver.endpoint),
            environment=environment,
            prefill_options=options,
            decode_options=options,
        ) as servers:
            for number, trace in enumerate((FIRST, *CALLERS)):
                headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
                servers.post(BODY, 0x1234567890ABCD10 + number, headers)
            receiver.wait_for(lambda spans: {"decode_forward", "decode"} <= {span.name for span in spans})
        yield receiver.spans


def test_all_that_it_shows_of_a_request_is_in_our_spans(spans: list[Span]) -> None:
    mode, far, seen = "sgl_aspects.disaggregation.mode", [], set()
    for trace in CALLERS:
        of_trace = [span for span in spans if span.trace_id == trace]
        ours = {(span.resource[mode], span.name): span for span in of_trace if mode in span.resource}
        for theirs in of_trace:
            if mode in theirs.resource or theirs.name not in SPANS:
                continue
            seen.add(theirs.name)
            span = ours[SPANS[theirs.name]]
            before, after = max(0, span.start - theirs.start), max(0, theirs.end - span.end)
            if max(before, after) > NEAR_NS:
                far.append((theirs.name, before / 1e6, after / 1e6))
    assert not far
    assert seen == set(SPANS)


def test_every_kind_of_its_spans_is_in_the_table(spans: list[Span]) -> None:
    theirs = {span.name for span in spans if "sgl_aspects.disaggregation.mode" not in span.resource}
    phases = {name for name in theirs if name.islower() and " " not in name and "(" not in name}
    assert phases <= set(SPANS) | OTHERS | TRANSFERS
