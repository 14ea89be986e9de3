"""A live run: the records in its rings, counted second by second, without disturbing a collector.

Requests come from the process that receives them, steps and phases from the scheduler's; only ids are joined.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_aspects.analysis.causes import Causes
from sgl_aspects.analysis.numbers import PHASES, STEP
from sgl_aspects.analysis.sources import load_run
from sgl_aspects.analysis.spans import stage_of, whole_of
from sgl_aspects.errors import ConfigError
from sgl_aspects.run import clock
from sgl_aspects.run.control import Control, read_control, write_control, write_run_control
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.rings import rings
from sgl_aspects.tracing.export.step_time import AddedTime
from sgl_aspects.tracing.record.codec import DamagedError
from sgl_aspects.tracing.record.format import SUFFIX
from sgl_aspects.tracing.records import (
    UNFINISHED,
    Latest,
    ProcessDescribed,
    Record,
    RequestBegin,
    RequestSeen,
    SpanBegin,
    SpanEnd,
)

IMAGE_PHASES = tuple(one.name for one in (schema.ENCODE, schema.DENOISE, schema.DECODE_LATENTS))
REQUEST_PHASES = ("queue", *IMAGE_PHASES, "prefill", "decode")
STEP_PARTS = tuple(
    one.name for one in (schema.SCHEDULE, schema.FORWARD, schema.SAMPLE, schema.PROCESS_RESULT)
)
# Cap on requests followed at once; the oldest are forgotten.
_MOST_REQUESTS = 20_000
# A ring without new records for this long is scanned: its collector may have let it be overwritten.
_SILENCE_SECONDS = 2.0


@dataclass
class Request:
    """A request; ``end_ns`` is 0 while it is open. Times in nanoseconds, durations in seconds."""

    id: str
    start_ns: int
    model: str = ""
    end_ns: int = 0
    #: What its caller saw of a streamed answer: see ``LiveRun.first_token``.
    time_to_first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    #: The response's, of a request that failed; 0: none.
    status: int = 0
    #: One of several answers to a request, which has them.
    is_answer: bool = False
    answers: list[Request] = field(default_factory=list)
    #: The name of its process's ring.
    ring: str = ""

    @property
    def outcome(self) -> str:
        """How it ended: "" with an answer, "left" by its caller, "refused" as its mistake, or "failed"."""
        if not self.error:
            return ""
        if self.error in schema.LEFT_ERRORS:
            return "left"
        return "refused" if 400 <= self.status < 500 else "failed"

    @property
    def is_error(self) -> bool:
        return self.outcome == "failed"

    def seconds(self, now_ns: int) -> float:
        return max(0, (self.end_ns or now_ns) - self.start_ns) / 1e9


@dataclass
class Phases:
    """The seconds of a request in each phase so far, and since when it is in the current one.

    ``key``: its scheduler's key of it. ``begin_ns``: of its first phase. ``first_ns``: when its decode phase
    began; 0: not yet.
    """

    key: int = 0
    begin_ns: int = 0
    first_ns: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""
    since_ns: int = 0

    def until(self, now_ns: int) -> dict[str, float]:
        found = dict(self.seconds)
        if self.current:
            found[self.current] = found.get(self.current, 0.0) + max(0, now_ns - self.since_ns) / 1e9
        return found


@dataclass
class Gauges:
    """The state of a scheduler after its last step, which ended at ``time_ns``."""

    time_ns: int = 0
    batch_size: int = 0
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0


@dataclass
class Second:
    """Counts of one second: steps (the seconds that each adds, by phase), parts, tokens, requests.

    ``fed_tokens``: those that were fed to the model, without rejected drafts.
    """

    steps: dict[str, list[float]] = field(default_factory=dict)
    step_tokens: dict[str, int] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    fed_tokens: int = 0
    prefilled_tokens: int = 0
    decodes_begun: int = 0
    finished: list[Request] = field(default_factory=list)
    gauges: dict[str, Gauges] = field(default_factory=dict)


class LiveRun:
    """Follows the rings of a run folder; call ``poll()`` now and then, and read the attributes.

    ``seconds``: the last ``window`` of them by Unix time. ``open``: requests without an end. ``phases``: by
    request id.
    """

    def __init__(self, folder: Path, window: int = 60) -> None:
        self.folder = folder
        self.window = window
        self.rings: dict[str, RingReader] = {}
        self.seconds: dict[int, Second] = {}
        self.open: dict[int, Request] = {}
        self.phases: dict[str, Phases] = {}
        self.gauges: dict[str, Gauges] = {}
        self.levels: dict[int, int] = {}
        self.model = ""
        self.finished_requests = 0
        self._added = AddedTime()
        # Of processes by name; and by a step's id and the name of a part.
        self._stages: dict[str, str] = {}
        self._passes: Latest[tuple[int, str], dict[tuple[str, str], float]] = Latest(_MOST_REQUESTS)
        # Names of the processes that write requests' phases, and of those that write steps: a rank that only
        # does the latter runs the batches of one that does both.
        self._answering: set[str] = set()
        self._stepping: set[str] = set()
        self._ids: dict[int, str] = {}  # of requests, by the scheduler's keys
        self._heard: dict[str, float] = {}
        self._gone: deque[str] = deque()
        self._clock_offset = clock.offset_of(folder)

    def now_ns(self) -> int:
        """Return Unix time now, as the run's processes would record it."""
        return time.monotonic_ns() + self._clock_offset

    def has_ended(self) -> bool:
        """Return whether there were processes and all of them are gone."""
        return bool(self._gone) and not self.rings

    @property
    def dropped(self) -> int:
        return sum(ring.dropped for ring in self.rings.values())

    def gauges_at(self, now_ns: int) -> list[Gauges]:
        """The state of each scheduler; one without a recent step and without requests is idle."""
        since_ns = now_ns - _SILENCE_SECONDS * 1e9
        return [
            gauge
            if gauge.time_ns > since_ns or (self.open and (gauge.running or gauge.waiting))
            else Gauges(kv_usage=gauge.kv_usage)
            for gauge in self.gauges.values()
        ]

    def poll(self) -> None:
        """Read what was written since the last call; add new processes and drop dead ones."""
        found = [*self._find()]
        alive = {name: ring.is_alive() for name, ring in self.rings.items()}
        found += [(name, self._read(name, ring, alive[name])) for name, ring in self.rings.items()]
        self._answering |= _writers(found, REQUEST_PHASES)
        self._stepping |= _writers(found, (STEP,))
        for name, records in found:
            self._take(name, records)
        for name in [name for name in self.rings if not alive[name]]:
            self._retire(name, self.rings[name])
        oldest = self.now_ns() // 1_000_000_000 - self.window
        for number in [number for number in self.seconds if number < oldest]:
            del self.seconds[number]
        _bound(self.phases)
        _bound(self.open)
        _bound(self._ids)

    def first_token(self, request: Request) -> float | None:
        """Return seconds until the first token: where no caller saw it by itself, the scheduler's."""
        known = filter(None, map(self.phases_of, (request, *request.answers)))
        firsts = [phases.first_ns for phases in known if phases.first_ns]
        if request.time_to_first_token is not None or request.error or not firsts:
            return request.time_to_first_token
        return max(0, min(firsts) - request.start_ns) / 1e9

    def phases_of(self, request: Request) -> Phases | None:
        """Return its phases; None if they are not known, or those of a later request with its id."""
        found = self.phases.get(request.id)
        return found if found and found.begin_ns <= (request.end_ns or found.begin_ns) else None

    def time_per_output_token(self, request: Request) -> float | None:
        first = self.first_token(request)
        if first is None or request.output_tokens < 2 or not request.end_ns:
            return None
        return max(0.0, request.seconds(request.end_ns) - first) / (request.output_tokens - 1)

    def controls(self) -> dict[int, Control]:
        """Return the control block of each process of the run, by process id."""
        found = {}
        for ring in self.rings.values():
            with contextlib.suppress(OSError, struct.error):  # the run has just ended
                found[ring.process_id] = read_control(ring.path)
        return found

    def change(self, how: Callable[[Control], Control]) -> None:
        """Change what every process of the run records from now on, and those that start later.

        Another user's run stays as it is.
        """
        changed = None
        with contextlib.suppress(ConfigError, FileNotFoundError, PermissionError):
            for ring in rings(str(self.folder)):
                path = ring.path
                ring.close()
                changed = how(read_control(path))
                write_control(path, changed)
            if changed is not None:
                write_run_control(self.folder, changed)

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
        self.rings.clear()

    def _find(self) -> Iterator[tuple[str, list[Record]]]:
        for path in sorted(self.folder.glob("*" + SUFFIX)):
            name = path.name.removesuffix(SUFFIX)
            if name in self.rings or name in self._gone:
                continue
            try:
                ring = RingReader(path, read_only=True)
            except (DamagedError, OSError):
                continue  # being created, or already gone
            ring.skip_to_newest()
            self.rings[name] = ring
            yield name, [*ring.history()]

    def _read(self, name: str, ring: RingReader, alive: bool) -> list[Record]:
        found: list[Record] = []
        has_more = True
        while has_more:
            records, has_more = ring.poll(alive)
            found += records
        now = time.monotonic()
        if found:
            self._heard[name] = now
        elif now - self._heard.setdefault(name, now) > _SILENCE_SECONDS:
            self._heard[name] = now
            ring.skip_to_newest()
        return found

    def _retire(self, name: str, ring: RingReader) -> None:
        was_detached = ring.was_detached
        ring.close()
        del self.rings[name]
        self.gauges.pop(name, None)
        self._added.forget(name)
        self._gone.append(name)
        for span_id in [one for one, request in self.open.items() if request.ring == name]:
            if was_detached:
                del self.open[span_id]
            else:
                self._finish(span_id, ring.last_ns, UNFINISHED)

    def _take(self, name: str, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, SpanEnd):
                self._span(name, record)
            elif isinstance(record, SpanBegin):
                self._begin(record)
            elif isinstance(record, RequestBegin):
                self.model = str(record.attributes.get(schema.REQUEST_MODEL, "")) or self.model
                request = Request(record.request_id, record.start_ns, self.model, ring=name)
                whole = None if record.remote else self.open.get(record.parent_id)
                if whole is not None and schema.OPERATION not in record.attributes:
                    request.is_answer = True
                    whole.answers.append(request)
                self.open[record.span_id] = request
            elif isinstance(record, RequestSeen):
                self._ids[record.key] = record.request_id
            elif isinstance(record, ProcessDescribed):
                self._stages[name] = stage_of(record.attributes.get(schema.RANK))

    def _begin(self, record: SpanBegin) -> None:
        phases = self._phases_of(record)
        if phases is not None:
            phases.current, phases.since_ns = record.type.name, record.start_ns
            if record.type.name == "decode":
                phases.first_ns = phases.first_ns or record.start_ns
                self._second(record.start_ns).decodes_begun += 1

    def _phases_of(self, record: SpanBegin | SpanEnd) -> Phases | None:
        """Return the request's phases, of the scheduler that has it: detokenizers have keys of it, too."""
        rid = self._ids.get(record.root_id)
        if rid is None or record.type.name not in REQUEST_PHASES:
            return None
        phases = self.phases.get(rid)
        if phases is None or phases.key != record.root_id:
            phases = self.phases[rid] = Phases(record.root_id, record.start_ns)
        return phases

    def _span(self, name: str, record: SpanEnd) -> None:
        kind = record.type.name
        seconds = max(0, record.end_ns - record.start_ns) / 1e9
        if kind in (STEP, *STEP_PARTS) and self._answering and name in self._stepping - self._answering:
            return
        if kind == STEP:
            self._step(name, record)
        elif kind in STEP_PARTS:
            parts, of_step = self._second(record.end_ns).parts, (record.root_id, kind)
            passes = self._passes.get(of_step) or {}
            before, own = whole_of(passes), (self._stages.get(name, ""), name)
            passes[own] = passes.get(own, 0.0) + seconds
            self._passes[of_step] = passes
            parts[kind] = parts.get(kind, 0.0) + whole_of(passes) - before
        elif record.root_id == record.span_id:
            self._end(record)
        elif kind in REQUEST_PHASES:
            phases = self._phases_of(record)
            if phases is not None:
                phases.seconds[kind] = phases.seconds.get(kind, 0.0) + seconds
                phases.current = "" if phases.current == kind else phases.current
                if kind == "decode":
                    phases.first_ns = phases.first_ns or record.start_ns
            if kind == "prefill":
                tokens = _number(_values(record).get(schema.PREFILL_TOKENS))
                self._second(record.end_ns).prefilled_tokens += int(tokens)

    def _step(self, name: str, record: SpanEnd) -> None:
        values = _values(record)
        mode = values.get(schema.MODE)
        seconds = self._added.of(name, record.start_ns, record.end_ns) / 1e9
        second = self._second(record.end_ns)
        if mode is not None:  # otherwise a scheduler reports that it is idle
            phase = PHASES.get(str(mode), "other")
            tokens = int(_number(values.get(schema.BATCH_TOKENS)))
            second.steps.setdefault(phase, []).append(seconds)
            second.step_tokens[phase] = second.step_tokens.get(phase, 0) + tokens
            drafts = schema.DRAFTED_TOKENS, schema.ACCEPTED_TOKENS
            drafted, accepted = (int(_number(values.get(name))) for name in drafts)
            second.fed_tokens += tokens - drafted + accepted
        self.gauges[name] = second.gauges[name] = Gauges(
            record.end_ns,
            int(_number(values.get(schema.BATCH_SIZE))),
            int(_number(values.get(schema.QUEUE_WAITING))),
            int(_number(values.get(schema.QUEUE_RUNNING))),
            _number(values.get(schema.KV_USAGE)),
        )

    def _end(self, record: SpanEnd) -> None:
        request = self._finish(record.span_id, record.end_ns, record.error)
        if request is None:
            return  # its start was overwritten
        values = _values(record)
        first = values.get(schema.TIME_TO_FIRST_TOKEN)
        request.time_to_first_token = float(first) if isinstance(first, (int, float)) else None
        request.prompt_tokens = int(_number(values.get(schema.INPUT_TOKENS)))
        request.cached_tokens = int(_number(values.get(schema.CACHED_TOKENS)))
        request.output_tokens = int(_number(values.get(schema.OUTPUT_TOKENS)))
        request.status = int(_number(values.get(schema.STATUS_CODE)))
        self.finished_requests += not request.is_answer

    def _finish(self, span_id: int, end_ns: int, error: str) -> Request | None:
        request = self.open.pop(span_id, None)
        if request is not None:
            request.end_ns, request.error = max(end_ns, request.start_ns), error
            self._second(request.end_ns).finished.append(request)
        return request

    def _second(self, time_ns: int) -> Second:
        return self.seconds.setdefault(time_ns // 1_000_000_000, Second())


def causes_of(folder: Path, request_id: str) -> list[tuple[str, float, list[str]]]:
    """Return a request's causes from the run's rings, the longest first: each with seconds, and the ids of
    the requests that delayed it. Empty if the rings do not hold the request and its steps.
    """
    causes = Causes(load_run(str(folder)).spans)
    found = [each for each in causes.by_id.values() if each.attributes.get(schema.REQUEST_ID) == request_id]
    if not found or not causes.has_steps(found[-1]):
        return []
    explained = causes.explain(found[-1])
    ids = {each.span_id: str(each.attributes.get(schema.REQUEST_ID, "")) for each in causes.by_id.values()}
    return [
        (cause.value, seconds, [ids[one] for one, _ in explained.worst(cause)])
        for cause, seconds in explained.ranked()
    ]


def _writers(found: Iterable[tuple[str, list[Record]]], names: Sequence[str]) -> set[str]:
    """Return the rings that have a span with one of these names."""
    return {
        name
        for name, records in found
        if any(isinstance(each, (SpanBegin, SpanEnd)) and each.type.name in names for each in records)
    }


def _values(record: SpanEnd) -> dict[str, Any]:
    return dict(zip(record.type.attributes, record.values))


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0


def _bound(found: dict[Any, Any]) -> None:
    """Remove the oldest entries of a dictionary that has grown too large."""
    for key in list(found)[: max(0, len(found) - _MOST_REQUESTS)]:
        del found[key]
