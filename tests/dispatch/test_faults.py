"""What dispatch does where an implementation fails; known faults of its peers, none of which it has."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sgl_aspects.errors import OperatorError, UnsupportedCallError
from sgl_aspects.platforms import DeviceCapability, set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.runtime.dispatch import (
    ImplKind,
    OperatorSpec,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
)
from sgl_aspects.runtime.dispatch.process import new_registry
from tests.support.threads import in_threads

X = torch.ones(3)


def reference(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def manager_of(
    *vendors: Callable[..., Any], strict: bool = False, base: Callable[..., Any] = reference, **options: Any
) -> OpManager:
    """An operator with its reference and vendors' implementations, best first."""
    registry = OpRegistry()
    registry.define(OperatorSpec("op", base, **options))
    for number, function in enumerate(vendors):
        name = f"v{number}"
        registry.register(
            OpImpl("op", f"vendor.{name}", ImplKind.VENDOR, function, vendor=name, priority=100 - number)
        )
    return OpManager(registry, SelectionPolicy.of(prefer="vendor", strict=strict))


def failing(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image")


# -- strict means strict -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"prefer": "vendor"}, {"per_op_order": {"op": ["vendor", "reference"]}}])
def test_strict_forbids_the_fallback_and_its_absence_allows_it(options: dict[str, Any]) -> None:
    manager = manager_of(failing)
    manager.set_policy(SelectionPolicy.of(**options, strict=True))
    with pytest.raises(RuntimeError, match="no kernel image"):
        manager.call_op("op", X)
    manager.set_policy(SelectionPolicy.of(**options))
    assert torch.equal(manager.call_op("op", X), X + 1)


def test_strict_requires_what_the_order_names() -> None:
    registry = new_registry()
    strict = SelectionPolicy.of(prefer="default", strict=True)
    manager = OpManager(registry, strict)
    with pytest.raises(
        OperatorError, match=r"no implementation may serve rms_norm.*default.flaggems.rms_norm"
    ):
        manager.call_op("rms_norm", X, X)
    assert (
        OpManager(registry).select("rms_norm", torch.float32, X.device).impl.impl_id == "reference.rms_norm"
    )
    # Operators that FlagGems does not have are not affected.
    assert manager.select("linear").impl == OpManager(registry).select("linear").impl


# -- what is declared is checked -----------------------------------------------------------------------


def test_types_are_checked_at_selection() -> None:
    manager = manager_of()
    supported = frozenset({torch.float32})
    manager.registry.register(
        OpImpl("op", "vendor.a", ImplKind.VENDOR, lambda x: x * 0, vendor="a", supported_dtypes=supported)
    )
    assert not manager.call_op("op", X).any()
    assert torch.equal(manager.call_op("op", X.bfloat16()), X.bfloat16() + 1)
    selection = manager.select("op", torch.bfloat16, X.device)
    assert selection.considered[0].reason == "supports torch.float32, not torch.bfloat16"


class Numbered(CpuPlatform):
    """A CPU with a compute capability."""

    def __init__(self, *capability: int) -> None:
        self.capability = DeviceCapability(*capability)

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return self.capability


def test_architectures_and_devices_are_checked_at_selection() -> None:
    manager = manager_of()
    for name, options in {"new": {"min_arch": (9, 0)}, "other": {"device_types": frozenset({"npu"})}}.items():
        manager.registry.register(
            OpImpl("op", f"vendor.{name}", ImplKind.VENDOR, failing, vendor=name, **options)  # type: ignore[arg-type]
        )
    reasons = {c.impl.impl_id: c.reason for c in manager.select("op", torch.float32, X.device).considered}
    assert reasons["vendor.new"] == "needs compute capability 9.0, and cpu has no such number"
    assert reasons["vendor.other"] == "runs on npu, not on cpu"
    for capability, chosen in (((8, 0), "reference.op"), ((9, 0), "vendor.new")):
        set_current_platform(Numbered(*capability))
        assert manager.select("op", torch.float32, X.device).impl.impl_id == chosen


# -- failing later than at the first call --------------------------------------------------------------


class FailsLater:
    """A kernel that does some shapes and not others."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 3:
            raise RuntimeError("no configuration for this shape")
        return x + 1


def test_what_fails_later_than_at_its_first_call_has_a_fallback_too() -> None:
    manager, long = manager_of(FailsLater()), torch.ones(5)
    for x in (X, X, long, X, long):
        assert torch.equal(manager.call_op("op", x), x + 1)
    assert manager.failures() == {("op", "vendor.v0"): 2}
    assert manager.select("op", torch.float32, X.device).impl.impl_id == "vendor.v0"


def test_calls_that_fail_at_once_are_all_served() -> None:
    """The third failure sets the implementation aside while the others' calls are still in it."""
    together = threading.Barrier(6)

    def fails_together(x: torch.Tensor) -> torch.Tensor:
        together.wait(60)
        raise RuntimeError("no kernel image")

    manager = manager_of(fails_together)
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(manager.call_op("op", X))
        except RuntimeError as error:
            found.append(error)

    with in_threads(*[call] * 6):
        pass
    assert [torch.is_tensor(each) and torch.equal(each, X + 1) for each in found] == [True] * 6
    assert manager.failures() == {("op", "vendor.v0"): 6}


# -- nothing is applied twice --------------------------------------------------------------------------


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def half_done(x: torch.Tensor) -> torch.Tensor:
    x[:2] += 1
    raise RuntimeError("out of registers")


def test_an_in_place_operator_that_ran_half_is_not_run_again() -> None:
    manager = manager_of(half_done, base=add_in_place, mutates=("x",))
    with pytest.raises(OperatorError, match=r"vendor.v0 failed .*may have written to x before"):
        manager.call_op("op", torch.zeros(3))


def test_an_implementation_that_declares_writes_is_not_repeated_either() -> None:
    manager = manager_of()
    manager.registry.register(
        OpImpl("op", "vendor.a", ImplKind.VENDOR, half_done, vendor="a", mutates=("x",))
    )
    with pytest.raises(OperatorError, match="may have written to x"):
        manager.call_op("op", torch.zeros(3))
    with pytest.raises(OperatorError, match=r"mutates='y'; op has the arguments x"):
        manager.registry.register(OpImpl("op", "b", ImplKind.DEFAULT, half_done, mutates=("y",)))


def test_an_in_place_operator_that_refuses_before_it_writes_falls_back() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise UnsupportedCallError("too small")

    x = torch.zeros(3)
    manager_of(refuses, base=add_in_place, mutates=("x",)).call_op("op", x)
    assert torch.equal(x, torch.ones(3))


# -- a failure is isolated ------------------------------------------------------------------------


class FailsUntilRepaired:
    def __init__(self) -> None:
        self.broken = True
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.broken:
            raise RuntimeError("driver restarts")
        return x + 1


def test_what_failed_under_one_policy_is_tried_under_another() -> None:
    function = FailsUntilRepaired()
    manager = manager_of(function)
    for _ in range(5):
        assert torch.equal(manager.call_op("op", X), X + 1)
    assert function.calls == 3, "three failures, and it is left alone under that policy"
    function.broken = False
    manager.set_policy(SelectionPolicy.of(prefer="vendor:v0"))
    assert torch.equal(manager.call_op("op", X), X + 1)
    assert function.calls == 4


def test_what_refuses_a_call_is_not_set_aside() -> None:
    calls = []

    def choosy(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if len(x) > 1:
            raise UnsupportedCallError("one row at a time")
        return x + 1

    manager = manager_of(choosy)
    for _ in range(5):
        assert torch.equal(manager.call_op("op", torch.zeros(2)), torch.ones(2))
    assert manager.failures() == {}
    assert torch.equal(manager.call_op("op", torch.zeros(1)), torch.ones(1))
    assert calls == [2] * 5 + [1]


@pytest.mark.parametrize("error", [RuntimeError, UnsupportedCallError])
def test_an_errors_message_is_reported_unchanged(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def full(x: torch.Tensor) -> torch.Tensor:
        raise error("memory is 100% full, %d bytes")

    with caplog.at_level("INFO", logger="sgl_aspects.dispatch"):
        assert torch.equal(manager_of(full).call_op("op", X), X + 1)
    assert "memory is 100% full, %d bytes); reference.op served" in caplog.text


def test_what_was_set_aside_is_tried_again_when_failures_are_cleared() -> None:
    function = FailsUntilRepaired()
    manager = manager_of(function)
    for _ in range(5):
        manager.call_op("op", X)
    assert manager.select("op", X.dtype, X.device).impl.impl_id == "reference.op"
    manager.clear_failures()
    assert manager.select("op", X.dtype, X.device).impl.impl_id == "vendor.v0"


# -- fork ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_registers_nothing_again_and_does_not_hang() -> None:
    manager = manager_of(FailsLater())
    manager.call_op("op", X)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        scope = manager.policy_context(SelectionPolicy.of(prefer="vendor:v0"))
        with scope, manager.lock, manager.registry.lock:
            held.set()
            done.wait(60)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        manager.set_policy(SelectionPolicy.of(prefer="reference"))
        manager.call_op("op", X)
        # A scope that another thread had open is not open here: calls are resolved permanently.
        theirs.send((len(manager.registry.impls("op")), manager.is_scoped))

    threading.Thread(target=hold, daemon=True).start()
    held.wait(60)
    process = context.Process(target=child)
    try:
        process.start()
        assert ours.poll(60), "the child hangs"
        assert ours.recv() == (2, False)
    finally:
        done.set()
        process.join(60)
        process.kill()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import logging

    logger = logging.getLogger("sgl_aspects.dispatch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
