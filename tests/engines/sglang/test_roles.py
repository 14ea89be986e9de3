"""Readers of SGLang's room, on fakes of its objects: needs no SGLang."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import SGLANG
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.memory_recorder import Memory
from tests.support.stepping import Loop


def test_an_embedding_has_no_limit_of_tokens() -> None:
    """SGLang sets 0 tokens for an embedding, which is not a parameter of the request."""
    read = SGLANG.reader("request.max_tokens")
    embedding = SimpleNamespace(sampling_params={"max_new_tokens": 0}, is_cross_encoder_request=False)
    assert read(embedding) is None
    assert read(SimpleNamespace(sampling_params={"max_new_tokens": 0})) == 0
    assert read(SimpleNamespace(sampling_params=[{"max_new_tokens": 7}])) == 7


@pytest.mark.parametrize(
    ("path", "adapter"),
    [
        ("pirate", "pirate"),
        (["pirate"] * 3, "pirate"),
        (["pirate", None], None),
        ([None], None),
        (None, None),
    ],
)
def test_an_adapter_of_all_answers_is_the_requests(path: Any, adapter: str | None) -> None:
    assert SGLANG.reader("request.model")(SimpleNamespace(lora_path=path)) == adapter


def test_a_prompt_of_embeddings_has_a_length() -> None:
    for name in ("tokenized.count", "message.prompt_tokens"):
        read = SGLANG.reader(name)
        assert read(SimpleNamespace(input_ids=[5, 6], input_embeds=None)) == 2
        assert read(SimpleNamespace(input_ids=None, input_embeds=[[0.1], [0.2], [0.3]])) == 3


@pytest.mark.parametrize(
    ("placement", "rank"),
    [
        ({"tp_rank": 1, "pp_rank": 0, "moe_ep_rank": 1}, "tp1 pp0 ep1"),
        ({"tp_rank": 0, "pp_rank": 0, "dp_rank": 1}, "tp0 pp0 dp1"),
        ({"tp_rank": 1, "dp_rank": None, "attn_dp_size": 2, "attn_dp_rank": 1}, "tp1 dp1"),
        ({"tp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0}, "tp0"),
    ],
)
def test_a_scheduler_reports_its_rank(placement: dict[str, Any], rank: str) -> None:
    """With data parallelism of the attention alone the rank is another of SGLang's."""
    describe = SGLANG.call_reader("describe_scheduler", "description")
    server_args = SimpleNamespace(served_model_name="mini", nnodes=1)
    assert describe((SimpleNamespace(**placement), server_args), {}) == {"service": "mini", "rank": rank}


def test_details_are_read_of_older_and_newer_calls() -> None:
    """The parameters of some, and what they return, have moved between versions."""
    cache, result = object(), SimpleNamespace(device_prefix_len=2)
    newer, older = SimpleNamespace(key=[1, 2, 3]), [1, 2, 3]
    for args in ((cache, newer), (cache, older)):
        assert SGLANG.call_reader("cache_match", "tokens")(args, {}, result) == 3
    hit = SGLANG.call_reader("cache_match", "hit_tokens")
    assert [hit((), {}, each) for each in (result, SimpleNamespace(device_indices=[7, 8]), None)] == [
        2,
        2,
        None,
    ]
    evicted = SGLANG.call_reader("cache_evict", "tokens")
    assert evicted((cache, SimpleNamespace(num_tokens=5)), {}) == evicted((cache, 5), {}) == 5
    batch = SimpleNamespace(reqs=[0, 0], extend_num_tokens=9)
    assert SGLANG.call_reader("kv_alloc_decode", "tokens")((batch,), {"token_per_req": 3}) == 6
    assert SGLANG.call_reader("kv_alloc_prefill", "tokens")((), {"batch": batch}) == 9
    layer = SimpleNamespace(layer_id=4, op="norm.rms_norm", _forward_method=len)
    assert SGLANG.call_reader("attention", "layer")((layer,), {}) == 4
    shape = SGLANG.call_reader("attention", "shape")
    assert shape((layer, SimpleNamespace(shape=(2, 64))), {}) == "2x64"
    assert SGLANG.call_reader("operator", "operator")((layer,), {}) == "norm.rms_norm"
    assert SGLANG.call_reader("operator", "implementation")((layer,), {}) == "len"


def test_cached_tokens_are_told_by_where_they_came_from() -> None:
    """As in SGLang's messages, of one request in each; those of older versions do not have them."""
    read = SGLANG.reader("outputs.tiers")
    details = [{"device": 8, "host": 4}, None, {"device": 0, "host": 0, "storage": 16}]
    message = SimpleNamespace(cached_tokens_details=details)
    assert [read((message, index)) for index in range(3)] == [(4, None), None, (0, 16)]
    assert read((SimpleNamespace(), 0)) is None


@pytest.mark.parametrize(
    ("histogram", "accepted_at"), [([3], []), ([1, 2], [2]), ([0, 2, 0, 1], [3, 1, 1]), ([], [])]
)
def test_acceptance_by_position_is_read_of_how_many_were_right(
    histogram: list[int], accepted_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_spec=lambda: SimpleNamespace(speculative_num_draft_tokens=4))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    read = SGLANG.reader("req.drafts")
    req = SimpleNamespace(spec_verify_ct=3, spec_correct_drafts_histogram=histogram)
    assert read(req) == (9, accepted_at)
    assert read(SimpleNamespace(spec_verify_ct=0)) is None


@pytest.mark.parametrize(
    ("mode", "server", "is_seen"),
    [
        ({}, None, False),
        ({"smg_grpc_mode": False, "grpc_mode": False}, None, False),
        ({"smg_grpc_mode": True}, None, True),
        ({"grpc_mode": True}, None, True),  # of earlier versions
        ({}, object(), True),
    ],
)
def test_requests_that_no_tokenizer_manager_receives_are_seen_by_their_scheduler(
    mode: dict[str, bool], server: Any, is_seen: bool
) -> None:
    """A router over gRPC tokenizes and detokenizes itself, as the front end in Rust does."""
    server_args = SimpleNamespace(served_model_name="mini", **mode)
    scheduler = SimpleNamespace(server_args=server_args, rust_server=server)
    front_end = SGLANG.reader("scheduler.front_end")(scheduler)
    assert (front_end is not None and SGLANG.reader("manager.model")(front_end) == "mini") is is_seen


@pytest.mark.parametrize("has_context", [True, False])
def test_the_context_of_a_call_over_grpc_travels_with_the_request_to_its_scheduler(has_context: bool) -> None:
    """Nothing else of the call's metadata does, and without a context the message stays as it is."""
    assert SGLANG.observers is not None
    loop = Loop(SGLANG.observers(Trackers.of(SGLANG, Memory(), DEFAULTS)))
    context = {"traceparent": f"00-{5:032x}-{7:016x}-01", "tracestate": "a=1"} if has_context else {}
    call = SimpleNamespace(invocation_metadata=lambda: [*context.items(), ("authorization", "secret")])
    stats, message = SimpleNamespace(), SimpleNamespace(rid="a", time_stats=None)
    manager = SimpleNamespace(rid_to_state={"a": SimpleNamespace(time_stats=stats)})
    with loop.call("receive_rpc", manager, message, call):
        pass
    assert message.time_stats is (stats if has_context else None)
    state: dict[str, Any] = {"disagg_mode": "null"}
    with loop.call("pack_request", stats, result=state):
        pass
    arrived = SimpleNamespace(time_stats=SimpleNamespace(**state))
    assert (SGLANG.reader("request.headers")(arrived) or {}) == context
    given = {"traceparent": "of a program"}
    assert SGLANG.reader("request.headers")(SimpleNamespace(external_trace_header=given)) == given
