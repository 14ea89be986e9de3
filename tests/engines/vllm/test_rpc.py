"""Real vLLM's gRPC server, whose servicer is a package of its own: `pip install --no-deps --target FOLDER` of
smg-grpc-servicer, smg-grpc-proto, grpcio-health-checking and grpcio-reflection, and FOLDER in PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("smg_grpc_servicer")

from tests.support.callers import CALLER, by_trace, parent, trace_id
from tests.support.engine_server import START_SECONDS, EngineServer, start_server
from tests.support.phases import engine_receiver
from tests.support.processes import free_port, wait_until
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import ARGUMENTS, ENVIRONMENT, VLLM_SERVE, traced

grpc = pytest.importorskip("grpc")
proto = pytest.importorskip("smg_grpc_proto")
messages, services = proto.vllm_engine_pb2, proto.vllm_engine_pb2_grpc

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STREAMED, WHOLE, LONG, UNSERVED = range(4)


def test_requests_over_grpc_are_below_their_callers(tmp_path: Path) -> None:
    port = free_port()
    words = [*VLLM_SERVE, str(make_mini(tmp_path / "mini")), "--grpc", "--port", str(port), "--enforce-eager"]
    words += [word for pair in ARGUMENTS.items() for word in pair]
    with engine_receiver() as receiver:
        environment = {**ENVIRONMENT, **traced(receiver)}
        with (
            start_server(EngineServer, words, port, tmp_path / "log", environment, waits=False) as server,
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = services.VllmEngineStub(channel)

            def is_ready() -> bool:
                assert server.process.poll() is None, server.log.read_text()[-4000:]
                try:
                    stub.HealthCheck(messages.HealthCheckRequest(), timeout=2)
                except grpc.RpcError:
                    return False
                return True

            def call(number: int, length: int = 4) -> Any:
                """Return the status; a prompt of this many tokens."""
                request = (messages.EmbedRequest if number == UNSERVED else messages.GenerateRequest)(
                    request_id=str(number), tokenized=messages.TokenizedInput(input_ids=[5] * length)
                )
                metadata = [*parent(number).items()]
                try:
                    if number == UNSERVED:
                        stub.Embed(request, metadata=metadata)
                    else:
                        request.stream = number == STREAMED
                        request.sampling_params.max_tokens = 4
                        request.sampling_params.ignore_eos = True
                        assert [*stub.Generate(request, metadata=metadata)]
                except grpc.RpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            wait_until(is_ready, START_SECONDS)
            assert [call(number) for number in (STREAMED, WHOLE)] == [grpc.StatusCode.OK] * 2
            assert call(LONG, 3000) == call(UNSERVED) == grpc.StatusCode.INVALID_ARGUMENT
            receiver.wait_for(lambda spans: trace_id(UNSERVED) in {span.trace_id for span in spans})
    traces = by_trace(receiver.spans)
    roots = {}
    for number in (STREAMED, WHOLE, LONG, UNSERVED):
        (roots[number],) = (span for span in traces[trace_id(number)] if span.parent_id == CALLER)
    for number in (STREAMED, WHOLE):
        usage = [roots[number].attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output")]
        assert (roots[number].name, usage) == ("text_completion mini", [4, 4])
        assert {"queue", "prefill", "decode"} <= {span.name for span in traces[trace_id(number)]}
    assert [roots[number].name for number in (LONG, UNSERVED)] == ["text_completion", "embeddings"]
    for number in (LONG, UNSERVED):
        assert roots[number].attributes["http.response.status_code"] == 400
        assert not roots[number].is_error
