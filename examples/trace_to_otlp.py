"""An engine whose spans go to an OpenTelemetry backend, below the caller's span.

    python examples/trace_to_otlp.py path/to/model http://localhost:4318

Any OTLP backend will do, such as Jaeger: docker run -p 16686:16686 -p 4318:4318 jaegertracing/jaeger
"""

import sys

from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def main(model: str, endpoint: str) -> None:
    session = attach(level=2, endpoint=endpoint, service_name="my-engine")
    with session, Engine(model_path=model) as engine:
        handle = engine.submit(
            "The sky is",
            SamplingParams(max_new_tokens=8, temperature=0.0),
            external_trace_header={"traceparent": CALLER},
        )
        print(repr("".join(chunk.text for chunk in handle)))
    print(session.summary)


if __name__ == "__main__":
    main(*sys.argv[1:])
