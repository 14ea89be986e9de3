"""Disturbances of a server, and what must then be found as the first cause of a request's latency.

A plugin in the server's processes makes some of them: it sleeps, so that each lasts as long on a busy
machine, and far longer than what the disturbed request does itself. A test file of an engine has a subclass
of ``Disturbances``, which says how to serve it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import psutil
import pytest

from sgl_aspects.analysis.causes import Cause, Causes
from sgl_aspects.analysis.spans import Span, read_spans
from tests.support.callers import CALLER, parent, trace_id
from tests.support.distributions import install_plugin
from tests.support.processes import wait_until
from tests.support.streams import Stream
from tests.support.tiny_models import make_llama, make_tokenizer

#: Seconds for which the plugin sleeps.
PAUSE = 4.0
#: For which a process is stopped at least, and in steps as they usually are: one that takes ten times as long
#: as usual was held up.
STOP, STOP_STEPS = 0.3, 15
#: What every server must have: tokens in its KV cache, requests in a batch, tokens of a prompt in a step.
ROOM, BATCH, CHUNK = 2560, 4, 2048
#: In texts, schemas and paths that are slow to handle.
SLOW = "slowly"
#: See ``Server``.
Pauses: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any], str]]

_PLUGIN = """
import gc, itertools, json, os, signal, time
from pathlib import Path
import sgl_aspects as aspects

FOLDER = Path(os.environ["DISTURBANCES"])
UNEVEN = itertools.cycle([*[0.04] * 19, 0.2])

def take(name):
    try:
        (FOLDER / name).rename(FOLDER / f"{name} taken")
    except FileNotFoundError:
        return False
    return True

def tokens_of(arguments):
    for one in arguments:
        if hasattr(one, "total_num_scheduled_tokens"):
            return one.total_num_scheduled_tokens
        if getattr(one, "input_ids", None) is not None:
            return len(one.input_ids)
    return 0

def forward(original_fn, *args, **kwargs):
    tokens = tokens_of((*args[1:], *kwargs.values()))
    if tokens:
        time.sleep(next(UNEVEN) if (FOLDER / "uneven").exists() else 0.005)
    if tokens > 1900 and take("long prompt"):
        time.sleep(PAUSE)
    if 0 < tokens <= 8 and take("stop"):
        (FOLDER / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if 0 < tokens <= 8 and take("collect"):
        gc.callbacks.append(pause)
        gc.collect()
        gc.callbacks.remove(pause)
    return original_fn(*args, **kwargs)

def pause(phase, info):
    time.sleep(PAUSE / 2)

def slow(original_fn, *args, **kwargs):
    if "slowly" in str((args[1:], kwargs)):
        time.sleep(PAUSE)
    return original_fn(*args, **kwargs)

def activate():
    forwards, others = json.loads(os.environ["DISTURBED"])
    for targets, hook in ((forwards, forward), (others, slow)):
        for target in targets:
            aspects.HookRegistry.register(target, hook, aspects.HookType.AROUND)
"""


@dataclass
class Server:
    """A server under disturbances. ``model``: its name in requests; ``folder``: the plugin's.

    ``has_min_tokens``: it takes the least length of an answer; it keeps room for answers without an end.
    ``pauses``: by mode, the path and body that stop it, and the paths to go on, unless it does by itself.
    ``step``: seconds between two tokens of one request alone.
    """

    port: int
    folder: Path
    has_min_tokens: bool
    pauses: Pauses = field(default_factory=dict)
    model: str = "mini"
    step: float = 0.0
    numbers: dict[str, int] = field(default_factory=dict)

    def begin(
        self, name: str, prompt: list[int] | str | None, tokens: int, rest: float = 0.0, **more: Any
    ) -> Stream:
        """Send a streamed request; its spans are in a trace of its own, found by ``name``."""
        number = self.numbers[name] = len(self.numbers)
        path = "/v1/chat/completions" if prompt is None else "/v1/completions"
        body = {"model": self.model, "max_tokens": tokens, "temperature": 0.0, "stream": True, **more}
        if prompt is not None:
            body |= {"prompt": prompt}
            body |= {"min_tokens": tokens} if self.has_min_tokens else {"ignore_eos": True}
        return Stream(self.port, path, body, parent(number), rest)

    def ask(self, name: str, prompt: list[int] | str | None, tokens: int, **more: Any) -> Stream:
        stream = self.begin(name, prompt, tokens, **more)
        stream.read()
        return stream

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", path, json.dumps(dict(body)), {"content-type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()

    def mark(self, name: str) -> Path:
        """Ask the plugin for something; returns the file that is there once it does it."""
        (self.folder / name).touch()
        return self.folder / f"{name} taken"


def _prompt(number: int, tokens: int) -> list[int]:
    """Return a prompt of which no other one's beginning is cached."""
    return [50 + (number * 7 + place * (number + 3)) % 150 for place in range(tokens)]


def _long_prompt(server: Server) -> None:
    taken = server.mark("long prompt")
    long = server.begin("long prompt: culprit", _prompt(1, 2000), 1)
    wait_until(taken.exists, 120)
    server.ask("long prompt", _prompt(2, 8), 1)
    long.read()


def _full_pool(server: Server) -> None:
    holder = server.begin("full pool: culprit", _prompt(3, 1600), 400)
    holder.wait()
    server.ask("full pool", _prompt(4, 1200), 1)
    holder.read()


def _full_batch(server: Server) -> None:
    running = [server.begin(f"full batch: culprit {n}", _prompt(5 + n, 8), 300) for n in range(BATCH)]
    for stream in running:
        stream.wait()
    server.ask("full batch", _prompt(10, 8), 1)
    for stream in running:
        stream.read()


def _slow_grammar(server: Server) -> None:
    schema = {"type": "object", "properties": {SLOW: {"type": "boolean"}}, "required": [SLOW]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "tell me"}]
    server.ask("slow grammar", None, 8, messages=messages, response_format=form)


def _slow_tokenizer(server: Server) -> None:
    server.ask("slow tokenizer", f"the fox jumps {SLOW}", 1)


def _stopped(server: Server) -> None:
    server.mark("stop")
    stream = server.begin("stopped process", _prompt(12, 16), 4)
    pid = server.folder / "stopped"
    wait_until(lambda: pid.exists() and bool(pid.read_text()), 120)
    process = psutil.Process(int(pid.read_text()))
    try:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 60)
        time.sleep(max(STOP, STOP_STEPS * server.step))  # it does not run meanwhile
    finally:
        os.kill(process.pid, signal.SIGCONT)
    stream.read()


def _garbage(server: Server) -> None:
    server.mark("collect")
    server.ask("garbage collection", _prompt(13, 16), 4)


def _retraction(server: Server) -> None:
    """The second one is retracted when both have grown, until the first one ends."""
    first = server.begin("retraction: culprit", _prompt(14, 1100), 900)
    first.wait()
    server.ask("retraction", _prompt(15, 1100), 220)
    first.read()


def _abort_storm(server: Server) -> None:
    storm = [server.begin(f"abort storm: culprit {n}", _prompt(20 + n, 64), 400) for n in range(12)]
    wait_until(lambda: sum(bool(one.stamps) for one in storm) >= BATCH, 120)
    victim = server.begin("abort storm", _prompt(40, 8), 1)
    wait_until(lambda: sum(len(one.stamps) for one in storm) >= 600, 240)
    for stream in storm:
        stream.leave()
    victim.read()


def _slow_client(server: Server) -> None:
    """It reads on long after the answer has been made, of which the buffers hold a part."""
    began = time.monotonic()
    server.ask("quick client", _prompt(41, 8), 400, logprobs=20)
    server.ask("slow client", _prompt(42, 8), 400, logprobs=20, rest=3 * (time.monotonic() - began))


def _pause(server: Server, mode: str) -> None:
    """One request is under way, another comes while nothing runs, if that can be."""
    interrupted = server.begin(f"{mode}: interrupted", _prompt(46, 16), 60)
    interrupted.wait()
    path, body, go_on = server.pauses[mode]
    server.post(path, body)
    if go_on:
        late = server.begin(f"{mode}: late", _prompt(47, 16), 1)
        paths = go_on.split()
        for path in paths:
            time.sleep(PAUSE / 2 / len(paths))
            server.post(path, {})
        late.read()
    interrupted.read()


@dataclass(frozen=True)
class Disturbance:
    """``first``: the causes one of which comes first; ``has_culprit``: because of another request."""

    name: str
    disturb: Callable[[Server], None]
    first: tuple[Cause, ...]
    has_culprit: bool = False


_IN_FRONT = (Cause.QUEUED_PREFILL, Cause.QUEUED_BATCH_FULL, Cause.QUEUED_KV_ROOM)
DISTURBANCES = [
    Disturbance("long prompt", _long_prompt, (Cause.QUEUED_PREFILL,), True),
    Disturbance("full pool", _full_pool, (Cause.QUEUED_KV_ROOM,), True),
    Disturbance("full batch", _full_batch, (Cause.QUEUED_BATCH_FULL,), True),
    Disturbance("slow grammar", _slow_grammar, (Cause.GRAMMAR,)),
    Disturbance("slow tokenizer", _slow_tokenizer, (Cause.TOKENIZE,)),
    Disturbance("stopped process", _stopped, (Cause.HOST,)),
    Disturbance("slow client", _slow_client, (Cause.CALLER,)),
    Disturbance("retraction", _retraction, (Cause.PREEMPTED,), True),
    Disturbance("garbage collection", _garbage, (Cause.HOST,)),
    Disturbance("abort storm", _abort_storm, _IN_FRONT, True),
]


@dataclass
class Found:
    """What was found of the disturbed requests, by name. ``seen``: clients' times between chunks."""

    causes: Causes
    numbers: Mapping[str, int]
    problems: Mapping[str, str]
    seen: Mapping[str, Sequence[float]]

    def request(self, name: str) -> Span:
        (request,) = self.causes.find(trace_id(self.numbers[name]))
        return request


class Disturbances(ABC):
    """Tests of an engine's server.

    ``targets``: functions that are disturbed: forward passes; and what handles texts, schemas, and the like.
    ``options``: its command's, with ``ROOM``, ``BATCH`` and ``CHUNK``. ``model``: the model's configuration.
    """

    targets: ClassVar[tuple[str, ...]]
    options: ClassVar[Mapping[str, object]]
    model: ClassVar[Mapping[str, Any]] = {}
    has_min_tokens: ClassVar[bool] = False
    pauses: ClassVar[Pauses] = {}

    @classmethod
    @abstractmethod
    def serve(
        cls, model: Path, log: Path, prefix: tuple[str, ...], words: list[str], environment: dict[str, str]
    ) -> AbstractContextManager[Any]:
        """Serve ``model``; yields what has the ``port``."""

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory: pytest.TempPathFactory) -> Found:
        folder = tmp_path_factory.mktemp("disturbed")
        make_llama(folder / "mini", max_position_embeddings=4096, **cls.model)
        install_plugin(folder, "disturbing", _PLUGIN.replace("PAUSE", str(PAUSE)))
        forward, *others = cls.targets
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", "")))),
            "DISTURBANCES": str(folder),
            "DISTURBED": json.dumps([[forward], others]),
        }
        file = folder / "spans.jsonl"
        prefix = (sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", str(file), "--")
        words = [str(word) for pair in cls.options.items() for word in pair]
        with cls.serve(folder / "mini", folder / "log", prefix, words, environment) as running:
            server = Server(running.port, folder, cls.has_min_tokens, cls.pauses)
            problems, seen = _disturb(server)
        return _found_in(file, server, problems, seen)

    @pytest.mark.parametrize("disturbance", DISTURBANCES, ids=lambda one: one.name)
    def test_its_cause_comes_first(self, found: Found, disturbance: Disturbance) -> None:
        """With its culprit, and the causes add up."""
        name = disturbance.name
        assert name not in found.problems, found.problems[name]
        request = found.request(name)
        explained = found.causes.explain(request)
        cause = explained.ranked()[0][0]
        assert cause in disturbance.first, explained.ranked()
        assert abs(sum(explained.seconds.values()) - request.seconds) < 0.01 * request.seconds
        if disturbance.has_culprit:
            shares = explained.culprits[cause]
            guilty = found.causes.by_id[max(shares, key=lambda one: shares[one])]
            names = {trace_id(number): name for name, number in found.numbers.items()}
            assert names[guilty.trace_id].startswith(f"{name}: culprit")

    def test_what_stopped_the_server_comes_first(self, found: Found) -> None:
        for mode, (_, _, go_on) in self.pauses.items():
            for name in ("interrupted", "late") if go_on else ("interrupted",):
                ranked = found.causes.explain(found.request(f"{mode}: {name}")).ranked()
                assert ranked[0][0] is Cause.STOPPED, (mode, name, ranked)
                # The server is stopped a little longer than asked for: until it has done what ends the stop.
                assert -0.2 < ranked[0][1] - (PAUSE / 2 if go_on else PAUSE) < 0.7, (mode, name, ranked)

    def test_a_client_that_rests_while_buffers_have_room_is_not_named(self, found: Found) -> None:
        assert Cause.CALLER not in found.causes.explain(found.request("short answer")).seconds

    def test_times_between_tokens_are_those_that_a_client_stamps(self, found: Found) -> None:
        """Median and 99th percentile within 2 %; in the quietest of some answers: others may be at work."""
        off = {}
        for name, seen in found.seen.items():
            gaps = [gap.seconds for gap in found.causes.gaps(found.request(name))]
            told, stamped = (statistics.quantiles(each, n=100) for each in (gaps, seen))
            off[name] = max(abs(told[at] / stamped[at] - 1) for at in (49, 98))
        assert min(off.values()) < 0.02, off


def _disturb(server: Server) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Do all to the server; returns what went wrong, and times between chunks of undisturbed answers."""
    server.ask("first calls are slow", _prompt(0, 64), 4)
    server.step = statistics.median(server.ask("alone", _prompt(43, 64), 40).gaps)
    problems = {}
    for disturbance in DISTURBANCES:
        try:
            disturbance.disturb(server)
        except AssertionError as error:
            problems[disturbance.name] = str(error)
    for mode in server.pauses:
        _pause(server, mode)
    server.ask("short answer", _prompt(44, 8), 8, rest=1.0)
    (server.folder / "uneven").touch()
    letter = make_tokenizer().token_to_id("a")  # a part of a character would bring no chunk
    seen = {}
    for name in [f"uneven {number}" for number in range(1, 9)]:
        seen[name] = server.ask(name, _prompt(45, 8), 150, logit_bias={str(letter): 100}).gaps
    return problems, seen


def _found_in(
    file: Path, server: Server, problems: Mapping[str, str], seen: Mapping[str, Sequence[float]]
) -> Found:
    """Read the spans of a server that has ended, once the collector has written all."""
    wanted = {trace_id(number) for number in server.numbers.values()}

    def are_all() -> bool:
        with contextlib.suppress(OSError):
            roots = {span.trace_id for span in read_spans(file) if span.parent_id == CALLER}
            return roots >= wanted
        return False

    wait_until(are_all, 60)
    return Found(Causes(read_spans(file)), server.numbers, problems, seen)
