"""A made-up run of an engine, of any size, in the form of the OTLP-JSON file.

One scheduler, continuous batching, chunked prefill. In the middle a prompt of many chunks arrives:
requests that decode meanwhile wait for mixed steps. The same seed gives the same run.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Texts that a page must show and not run.
HOSTILE = [
    "</script><script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "<!--<script>",
    "{{script}}{{data}}",
    "\u2028\u2029\x00\x1b[31m\ud800",
    "__proto__",
    "constructor",
]

MS = 1_000_000
_BEGIN_NS = 1_790_000_000 * 1_000_000_000
_CHUNK = 512
#: Recorded step by step from the embedded engine on a CPU, in thousandths of the usual time.
_NOISE = Path(__file__).with_name("step_noise.json")


@dataclass
class _Request:
    id: str
    trace_id: str
    span_id: str
    arrival: int
    prompt: int
    cached: int
    output: int
    fed: int = 0
    made: int = 0
    first_ns: int = 0
    decode_ns: int = 0
    chunks: int = 0
    steps: list[str] = field(default_factory=list)


class SimulatedRun:
    """``requests`` requests, ``rate`` a second; ``name`` is the model's, ``prefix`` begins their ids.

    ``slower``: factors of parts, such as ``{"forward, decode": 1.03}``. ``noise``: a seed, with which
    parts take as long as in a real run of the embedded engine, block by block. ``has_operators``: level 4.
    """

    def __init__(
        self,
        requests: int,
        *,
        rate: float = 20.0,
        seed: int = 1,
        name: str = "example-8b",
        prefix: str = "request-",
        most_running: int = 48,
        slower: Mapping[str, float] = MappingProxyType({}),
        noise: int | None = None,
        has_operators: bool = False,
    ) -> None:
        self._slower = slower
        self._noise = None if noise is None else _Noise(noise)
        self._has_operators = has_operators
        self._random = random.Random(seed)
        self._ids = itertools.count(1)
        self._name = name
        self._most_running = most_running
        self.spans: list[tuple[int, dict[str, Any]]] = []
        at = 0.0
        self._arrivals = []
        for number in range(requests):
            at += self._random.expovariate(rate)
            is_long = number == requests // 2
            prompt = 9000 if is_long else int(self._random.lognormvariate(5.5, 0.8)) + 8
            self._arrivals.append(
                _Request(
                    f"{prefix}{number}",
                    f"{self._random.getrandbits(128):032x}",
                    self._id(),
                    int(at * 1e9),
                    prompt,
                    0 if self._random.random() < 0.5 else prompt // 2,
                    int(self._random.lognormvariate(3.6, 0.7)) + 2,
                )
            )
        self._simulate()

    def write(self, path: Path, lines_of: int = 512) -> Path:
        with path.open("w", encoding="utf-8") as file:
            for start in range(0, len(self.spans), lines_of):
                file.write(json.dumps(self._message(self.spans[start : start + lines_of])) + "\n")
        return path

    def _message(self, spans: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        by_process: dict[int, list[dict[str, Any]]] = {}
        for process, span in spans:
            by_process.setdefault(process, []).append(span)
        return {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes({"process.pid": process})},
                    "scopeSpans": [{"scope": {"name": "sgl_aspects"}, "spans": found}],
                }
                for process, found in by_process.items()
            ]
        }

    def _simulate(self) -> None:
        now, number = 0, 0
        coming = list(self._arrivals)
        waiting: list[_Request] = []
        running: list[_Request] = []
        while coming or waiting or running:
            while coming and coming[0].arrival <= now:
                waiting.append(coming.pop(0))
            if not waiting and not running:
                now = coming[0].arrival
                continue
            number += 1
            prefilled, budget = [], _CHUNK
            for request in waiting:
                if budget <= 0 or len(running) >= self._most_running:
                    break
                tokens = min(budget, request.prompt - request.cached - request.fed)
                budget -= tokens
                prefilled.append((request, tokens))
            now = self._step(number, now, prefilled, running, len(waiting))
            for request, _ in prefilled:
                if request.fed == request.prompt - request.cached:
                    waiting.remove(request)
                    running.append(request)
                    request.first_ns = request.decode_ns = now
                    request.made = 1
            for request in [request for request in running if request.made >= request.output]:
                running.remove(request)
                self._finish(request, now)

    def _step(
        self,
        number: int,
        now: int,
        prefilled: list[tuple[_Request, int]],
        running: list[_Request],
        waiting: int,
    ) -> int:
        mode = "decode" if not prefilled else "mixed" if running else "extend"
        fed = sum(tokens for _, tokens in prefilled)
        device = int((8 + 0.09 * len(running) + 0.11 * fed) * MS * self._random.uniform(0.95, 1.1))
        if self._random.random() < 0.002:
            device *= 6
        overhead = self._random.uniform(0.3, 0.9) * MS
        phase = "prefill" if mode == "extend" else mode
        operators = {}
        if self._has_operators:
            operators = {"attention": self._time("attention", phase, 0.3 * device)}
            operators["operator"] = self._time("operator linear", phase, 0.5 * device)
            device = int(0.2 * device)
        device = self._time("forward", phase, device + sum(operators.values()), bool(operators))
        schedule, sample, result = (
            self._time(part, phase, overhead) for part in ("schedule", "sample", "process_result")
        )
        start, end = now, now + schedule + device + sample + result
        batch = [request for request, _ in prefilled] + running
        identity = self._id()
        trace = f"{number:032x}"
        run_batch = self._id()
        scheduled = start + schedule
        self._add(
            2,
            "scheduler.step",
            trace,
            identity,
            "",
            start,
            end,
            links=[(request.trace_id, request.span_id) for request in batch],
            attributes={
                "sgl_aspects.step.id": number,
                "sgl_aspects.forward.mode": mode,
                "sgl_aspects.batch.size": len(batch),
                "sgl_aspects.batch.tokens": fed + len(running),
                "sgl_aspects.queue.waiting": waiting - len(prefilled),
                "sgl_aspects.queue.running": len(batch),
                "sgl_aspects.kv.usage": min(1.0, sum(r.prompt + r.made for r in batch) / 24000),
            },
        )
        self._add(2, "schedule", trace, self._id(), identity, start, scheduled)
        self._add(2, "run_batch", trace, run_batch, identity, scheduled, end - result)
        forward, sampled = self._id(), scheduled + device
        self._add(
            2,
            "forward",
            trace,
            forward,
            run_batch,
            scheduled,
            sampled,
            attributes={
                "sgl_aspects.forward.mode": mode,
                "sgl_aspects.device.name": "example",
                "sgl_aspects.forward.device_time": device * 0.97 / 1e9,
            },
        )
        for name, time in operators.items():
            kind: dict[str, Any] = {"sgl_aspects.operator.name": "linear"} if name == "operator" else {}
            self._add(2, name, trace, self._id(), forward, scheduled, scheduled + time, attributes=kind)
        self._add(2, "sample", trace, self._id(), run_batch, sampled, sampled + sample)
        self._add(2, "process_result", trace, self._id(), identity, end - result, end)
        for request in running:
            request.made += 1
        for request, tokens in prefilled:
            if not request.chunks:
                self._below(request, 2, "queue", request.arrival + MS, scheduled)
            attributes = {"sgl_aspects.prefill.tokens": tokens, "sgl_aspects.prefill.chunk": request.chunks}
            self._below(request, 2, "prefill", scheduled, end - result, attributes)
            request.chunks += 1
            request.fed += tokens
        return end

    def _finish(self, request: _Request, now: int) -> None:
        tokenize = self._time("tokenize", "", MS // 2)
        self._below(request, 1, "tokenize", request.arrival, request.arrival + tokenize)
        self._below(request, 2, "decode", request.decode_ns, now)
        self._below(
            request,
            1,
            "detokenize",
            request.first_ns,
            now,
            attributes={"sgl_aspects.detokenize.busy_time": self._time("detokenize", "", 0.0004 * 1e9) / 1e9},
        )
        is_aborted = self._random.random() < 0.01
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": self._name,
            "gen_ai.request.id": request.id,
            "gen_ai.response.finish_reasons": ["abort" if is_aborted else "stop"],
            "gen_ai.usage.input_tokens": request.prompt,
            "gen_ai.usage.cache_read.input_tokens": request.cached,
            "gen_ai.usage.output_tokens": request.made,
            "gen_ai.latency.time_to_first_token": (request.first_ns - request.arrival) / 1e9,
            "gen_ai.latency.e2e": (now - request.arrival) / 1e9,
        }
        if is_aborted:
            attributes["error.type"] = "abort"
        self._add(
            1, f"chat {self._name}", request.trace_id, request.span_id, "", request.arrival, now + MS // 2,
            kind=2, is_error=is_aborted, attributes=attributes,
        )  # fmt: skip

    def _below(
        self,
        request: _Request,
        process: int,
        name: str,
        start: int,
        end: int,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        self._add(
            process,
            name,
            request.trace_id,
            self._id(),
            request.span_id,
            start,
            max(start, end),
            attributes=attributes,
        )

    def _add(
        self,
        process: int,
        name: str,
        trace_id: str,
        span_id: str,
        parent_id: str,
        start: int,
        end: int,
        *,
        kind: int = 1,
        is_error: bool = False,
        links: list[tuple[str, str]] | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        span: dict[str, Any] = {
            "traceId": trace_id,
            "spanId": span_id,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(_BEGIN_NS + start),
            "endTimeUnixNano": str(_BEGIN_NS + end),
            "attributes": _attributes(attributes or {}),
        }
        if parent_id:
            span["parentSpanId"] = parent_id
        if links:
            span["links"] = [{"traceId": trace, "spanId": span} for trace, span in links]
        if is_error:
            span["status"] = {"code": 2}
        self.spans.append((4000 + process, span))

    def _time(self, part: str, phase: str, usual: float, has_noise: bool = False) -> int:
        """Return the time of a part in this run; ``usual`` ``has_noise`` already."""
        factor = self._slower.get(f"{part}, {phase}" if phase else part, 1.0)
        return int(usual * factor * (self._noise.next(part) if self._noise and not has_noise else 1.0))

    def _id(self) -> str:
        return f"{next(self._ids):016x}"


class _Noise:
    """Ratios of a real engine's times to the usual ones, in blocks that are drawn anew for each run."""

    _BLOCK = 50

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._recorded: dict[str, list[int]] = json.loads(_NOISE.read_text())
        self._coming: dict[str, list[int]] = {}

    def next(self, part: str) -> float:
        coming = self._coming.setdefault(part, [])
        if not coming:
            of_device = part in ("forward", "attention", "operator linear")
            recorded = self._recorded[
                "forward" if of_device else part if part == "schedule" else "process_result"
            ]
            length = 1 if part.endswith("tokenize") else self._BLOCK
            begin = self._random.randrange(len(recorded) - length)
            coming += recorded[begin : begin + length]
        return coming.pop() / 1000


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value}
