"""The names of roles, arguments and attributes: all are read, and there are no others."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import sgl_aspects as aspects
from sgl_aspects.engines import BUILT_IN, VLLM, Engine, Role
from sgl_aspects.engines.base import AttributeReader, CallReader
from sgl_aspects.engines.contract import ATTRIBUTES, ROLES, Observation
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import observers
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.schema import DETAILS
from tests.support.memory_recorder import Memory
from tests.support.stepping import Loop
from tests.support.vllm_messages import batch

ALL_ROLES = {name: Role((f"hare:Hare.{name}",), arguments) for name, arguments in ROLES.items()}
ALL_ATTRIBUTES = {f"{kind}.{name}" for kind, names in ATTRIBUTES.items() for name in names}


class Watched(Engine):
    """An engine that has everything, and notes what is read."""

    read: set[str]

    def call_reader(self, role: str, argument: str) -> CallReader:
        self.read.add(f"{role}({argument})")
        return super().call_reader(role, argument)

    def reader(self, name: str) -> AttributeReader:
        self.read.add(name)
        return super().reader(name)


def test_observers_read_every_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: set[str] = set()
    monkeypatch.setattr(Watched, "read", read, raising=False)
    attributes: dict[str, str | AttributeReader] = dict.fromkeys(ALL_ATTRIBUTES, "name")
    fewer = {n: role for n, role in ALL_ROLES.items() if n not in ("finish_request", "graph_launch")}
    engines = [Watched("hare", "hare", ALL_ROLES, attributes), Watched("tame", "tame", fewer, attributes)]
    monkeypatch.setattr(observers, "find_engines", lambda: engines)
    recorder = RingRecorder(str(tmp_path), level=4)
    recorder.open()
    undo = observers.weave_observers(recorder)
    woven = {hook.target for hook in aspects.report().hooks}
    for step in reversed(undo):
        step()
    recorder.close()
    assert {target for role in ALL_ROLES.values() for target in role.targets} - woven == set()
    arguments = {f"{role}({argument})" for role, names in ROLES.items() for argument in names}
    assert (arguments | ALL_ATTRIBUTES) - read == set()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"roles": {"run_bach": Role(("hare:run",))}},
            "'run_bach' is not a known role; did you mean 'run_batch'",
        ),
        (
            {"roles": {"run_batch": Role(("hare:run",), ("_", "bach"))}},
            "'bach' is not a known argument of the role 'run_batch'; did you mean 'batch'",
        ),
        (
            {"roles": {"run_batch": Role(("hare:run",), reads={"reqs": lambda *call: ()})}},
            "'reqs' is not a known argument of the role 'run_batch'; choose from: batch",
        ),
        (
            {"attributes": {"batch.moed": "mode"}},
            "'moed' is not a known attribute of 'batch'; did you mean 'mode'",
        ),
        ({"attributes": {"bunny.mode": "mode"}}, "'bunny' is not a known kind of object; choose from"),
        (
            {"own_roles": {"run_batch": Role(("hare:run",))}},
            "'run_batch' is a role that other engines have, too",
        ),
        ({"own_roles": {"hop": None}}, r"role 'hop' is None: write Role"),
        (
            {"roles": {"receive_request": Role(("hare:accept",), ("request",))}},
            "receive_request: requests are told apart by 'request.rids': add it to the attributes",
        ),
    ],
)
def test_a_misspelt_name_is_an_error_at_import(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"engine 'hare': .*{message}"):
        Engine("hare", "hare", **{"roles": {}, **given})


def test_an_observer_cannot_read_a_name_that_does_not_exist() -> None:
    engine = Engine("hare", "hare", {}, own_roles={"hop": Role(("hare:hop",), ("_", "height"))})
    assert engine.call_reader("hop", "height")((0, 3), {}) == 3
    for read in (
        lambda: engine.call_reader("hop", "width"),
        lambda: engine.call_reader("run_batch", "bach"),
        lambda: engine.reader("batch.moed"),
        lambda: engine.values_reader("batch", ("mode", "moed")),
        lambda: engine.has("batch.moed"),
    ):
        with pytest.raises(ConfigError, match="is not a known"):
            read()


def test_arguments_of_a_detail_are_the_attributes_of_its_span() -> None:
    """In the same order: by the last word of the attribute's name."""
    words = {"operator": "name"}
    for role, span in DETAILS.items():
        names = [name.rpartition(".")[2] for name in span.attributes]
        assert names == [words.get(argument, argument) for argument in ROLES[role]], role


@pytest.mark.parametrize("engine", BUILT_IN, ids=lambda engine: engine.name)
def test_own_roles_are_observed(engine: Engine) -> None:
    trackers = Trackers.of(engine, Memory(), DEFAULTS)
    observed = {one.role for one in engine.observers(trackers)} if engine.observers else set()
    assert engine.own_roles.keys() <= observed <= engine.every_role.keys()


def test_a_librarys_function_is_hooked_only_where_its_engine_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang replays graphs by the same function of PyTorch's as vLLM, at each step."""
    graph = torch.cuda.graphs.CUDAGraph
    original = graph.replay
    for package, is_same in (("nobodys", True), ("json", False)):
        launch = dataclasses.replace(VLLM.roles["graph_launch"], package=package)
        engine = dataclasses.replace(VLLM, roles={**VLLM.roles, "graph_launch": launch})
        monkeypatch.setattr(observers, "find_engines", lambda found=engine: [found])
        undo = observers.weave_observers(Memory())
        try:
            assert (graph.replay is original) is is_same
        finally:
            for step in reversed(undo):
                step()
    assert graph.replay is original


def test_a_replay_is_seen_of_an_engine_that_came_on_the_path_after_the_weaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = dataclasses.replace(VLLM.roles["graph_launch"], package="late_engine")
    engine = dataclasses.replace(VLLM, roles={**VLLM.roles, "graph_launch": launch})
    recorder, graph = Memory(), torch.cuda.graphs.CUDAGraph
    trackers = Trackers.of(engine, recorder, DEFAULTS)
    forward = ForwardObserver(trackers)
    loop, original = Loop(forward.observations()), graph.replay
    trackers.steps.on_level = (woven := observers.WovenLevels(engine, forward.observations())).set_level
    woven.set_level(3)
    try:
        assert graph.replay is original
        (tmp_path / "late_engine.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        message = batch(cached={"a": (5, 1)})
        runner: Any = SimpleNamespace(device="meta")
        with loop.call("forward", runner, message), contextlib.suppress(Exception):  # of no device
            graph.replay(runner)
    finally:
        woven.remove()
    assert graph.replay is original
    forward.worker.flush()
    (span,) = recorder.named("forward")
    assert span.values[-1] == "replayed"


def test_a_pass_that_begins_while_another_thread_weaves_does_not_weave_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    faults: list[str] = []

    class Watching(Observation):
        def bound_to(self, function: Callable[..., Any]) -> Observation:
            """Called as it is woven, when the engine's thread goes on."""
            threads.append(threading.Thread(target=woven.set_level, args=(3, True)))
            threads[-1].start()
            threads[-1].join(timeout=1)  # one that waits for the weaver does not end before
            return self

    engine = dataclasses.replace(VLLM, roles={"forward": Role(("hare_now:run",))})
    woven = observers.WovenLevels(engine, [Watching("forward", lambda args, kwargs: None)])
    module = ModuleType("hare_now")
    module.run = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hare_now", module)
    monkeypatch.setattr(threading, "excepthook", lambda args: faults.append(str(args.exc_value)))
    try:
        woven.set_level(3)
        for thread in threads:
            thread.join()
        assert len(threads) == 1
        assert faults == []
    finally:
        woven.remove()
