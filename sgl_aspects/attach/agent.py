"""Runs in the process that was attached to, in a thread that ends: weaves, and undoes everything."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sgl_aspects as aspects
from sgl_aspects import config, env
from sgl_aspects.errors import AspectsError, AttachError
from sgl_aspects.run.collector import collector_state
from sgl_aspects.tracing import session as tracing
from sgl_aspects.weaving import in_pieces, unfrozen, weaver

_CHECK_SECONDS = 1.0
# The command starts the collector once a process has answered, maybe another one that is woven for a minute;
# it, or its guard, detaches where there is none.
_COLLECTOR_SECONDS = 120.0
_SWITCH_SECONDS = 0.0005


@dataclass
class _Attachment:
    """The attached state of this process."""

    session: tracing.TraceSession
    hooks: list[aspects.Advice] = field(default_factory=list)
    """Hooks of the configuration file alone."""
    next_check: float = 0.0
    begun: float = field(default_factory=time.monotonic)


_attachment: _Attachment | None = None
_lock = threading.RLock()  # held by the short-lived threads of attach; never by the engine's


def perform(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a request (``operation``: attach or detach), and return the result.

    Raises ``AttachError``; nothing is woven then.
    """
    if request["version"] != aspects.__version__:
        raise AttachError(
            f"sgl-aspects {aspects.__version__} is loaded there, and you run {request['version']}: "
            "attach with the version that is loaded"
        )
    with _lock, in_pieces() as pieces, _beside_the_engine():
        begin = time.perf_counter()
        answer = _attach(request) if request["operation"] == "attach" else _detach_run(request)
        seconds = time.perf_counter() - begin
    return {**answer, "seconds": seconds, "longest_piece_seconds": pieces.longest}


def _attach(request: Mapping[str, Any]) -> dict[str, Any]:
    global _attachment
    if _attachment is not None:
        _detach()  # the command that attached has ended without detaching
    if tracing.current() is not None:
        raise AttachError("it is traced already: change what is recorded with sgl-aspects control")
    _import_devices()
    before = set(weaver.advices)
    with env.reading_from(request["environment"]):
        attachment = _attachment = _Attachment(tracing.join_run(_end_without_collector))
        try:
            _weave_declared(attachment)
        except BaseException:
            _detach()
            raise
    advices = [advice for advice in weaver.advices if advice not in before]
    for advice in advices:
        advice.required = False  # a required hook whose target loads later must not end the engine's process
    hooks = [hook for advice, hook in zip(weaver.advices, aspects.report().hooks) if advice in advices]
    return {
        "woven": sorted({place for hook in hooks for place in hook.places}),
        "not_woven": sorted({f"{hook.target}: {hook.detail}" for hook in hooks if hook.state in _NOT_WOVEN}),
        "waiting": sum(hook.state is aspects.State.PENDING for hook in hooks),
        "stale": sorted({f"{one.target} is still held by {one.holder}" for one in aspects.report().stale}),
    }


def _import_devices() -> None:
    """Import the modules that the first traced step needs.

    Imported by the engine's thread, they would wait for the weaver's lock as long as this thread weaves.
    """
    if "torch" in sys.modules:
        from sgl_aspects.engines.device import platform_of

        platform_of("")  # a device of no platform: all of them are looked at


_NOT_WOVEN = (aspects.State.MISSING, aspects.State.FAILED)


def _weave_declared(attachment: _Attachment) -> None:
    """Weave the hooks of the configuration file; the session weaves its traced functions."""
    for declared in config.from_environment().hooks:
        source = aspects.HookSource(declared.where)
        advice = aspects.Advice(declared.target, declared.hook_type, declared.load(), declared.order, source)
        attachment.hooks.append(advice)
    weaver.add(attachment.hooks, strict=False)


def _detach_run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Detach, unless another run has taken over since: the guard of a killed command may be late."""
    run_folder = request["environment"]["SGL_ASPECTS_TRACE_RUN"]
    if _attachment is not None and _attachment.session.run_folder != run_folder:
        return {"restored": 0, "not_restored": []}
    return _detach()


def _detach() -> dict[str, Any]:
    """Remove every hook, say which originals could not be put back, and leave the run."""
    global _attachment
    attachment, _attachment = _attachment, None
    if attachment is None:
        return {"restored": 0, "not_restored": []}
    before = aspects.report()
    weaver.remove(attachment.hooks)
    attachment.session.detach()
    hooked = _places(before) - _places(aspects.report())  # the process's own hooks stay
    lost = hooked.intersection(before.displaced)
    attachment.session.close()
    return {"restored": len(hooked) - len(lost), "not_restored": sorted(lost)}


def _places(report: aspects.Report) -> set[str]:
    return {place for hook in report.hooks for place in hook.places}


def _end_without_collector(run_folder: str) -> None:
    """Detach if the run has no collector: called when the ring is full because it is not read."""
    attachment, now = _attachment, time.monotonic()
    if attachment is None or now < attachment.next_check:
        return
    attachment.next_check = now + _CHECK_SECONDS
    collector = collector_state(run_folder)
    is_late = now - attachment.begun > _COLLECTOR_SECONDS
    if is_late if collector is None else not collector.is_alive:
        threading.Thread(target=_detach_alone, daemon=True).start()


def _detach_alone() -> None:
    with _lock, in_pieces(), _beside_the_engine(), contextlib.suppress(AspectsError, OSError):
        _detach()


@contextlib.contextmanager
def _beside_the_engine() -> Iterator[None]:
    """Shorten the interpreter's switch interval, keep the garbage collector off, and the heap unfrozen."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with unfrozen():  # once for all hooks
            yield
    finally:
        if was_enabled:
            gc.enable()
        sys.setswitchinterval(interval)
