"""Dispatch: what the policy chooses, where it is read from, and that every place that calls follows it."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_aspects.errors import ConfigError, OperatorError, OperatorSignatureError
from sgl_aspects.platforms import set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.dispatch import (
    ImplKind,
    OperatorSpec,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    Token,
)
from sgl_aspects.runtime.dispatch.configuration import (
    KEYS,
    PLATFORM_FILES,
    Settings,
    load_settings,
    merged,
    read_file,
)
from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.process import new_registry
from sgl_aspects.runtime.ops import Linear, RMSNorm, SiluAndMul
from tests.support.distributions import install
from tests.support.operator_cases import cases, flat, in_type
from tests.support.threads import in_threads

X = torch.randn(4, 8)
CPU = torch.device("cpu")


def plus(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + number

    return function


def small_registry() -> OpRegistry:
    """An operator that adds: 1 the reference, 2 the default, 3 and 4 two vendors."""
    registry = OpRegistry()
    registry.define(OperatorSpec("op", plus(1)))
    registry.register(OpImpl("op", "default.op", ImplKind.DEFAULT, plus(2)))
    registry.register(OpImpl("op", "vendor.a.op", ImplKind.VENDOR, plus(3), vendor="a"))
    registry.register(OpImpl("op", "vendor.b.op", ImplKind.VENDOR, plus(4), vendor="b", priority=120))
    return registry


def register(function: Any, impl_id: str = "vendor.a", **fields: Any) -> OpManager:
    """Register a vendor's silu_and_mul, or the operator named; return the process's manager."""
    manager = dispatch.get_manager()
    given = {"op_name": "silu_and_mul", "vendor": "a", **fields}
    manager.registry.register(OpImpl(impl_id=impl_id, kind=ImplKind.VENDOR, fn=function, **given))
    return manager


def added(policy: SelectionPolicy) -> int:
    manager = OpManager(small_registry(), policy)
    return int(manager.call_op("op", torch.zeros(())))


# -- policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2),
        ({"prefer": "flagos"}, 2),
        ({"prefer": "vendor"}, 4),
        ({"prefer": "reference"}, 1),
        ({"prefer": "vendor:a"}, 3),
        ({"prefer": "impl:reference.op"}, 1),
        ({"per_op_order": {"op": ["vendor:nobody", "vendor:a"]}}, 3),
        ({"per_op_order": {"other": ["reference"]}}, 2),
        ({"prefer": "vendor", "deny_vendors": ["b"]}, 3),
        ({"prefer": "vendor", "allow_vendors": ["a"]}, 3),
        ({"prefer": "vendor", "allow_vendors": []}, 2),
        ({"prefer": "vendor", "deny_vendors": ["a", "b"]}, 2),
        ({"op_whitelist": ["other"]}, 1),
        ({"op_whitelist": ["op"]}, 2),
        ({"op_blacklist": ["op"]}, 1),
        ({"prefer": "vendor:a", "strict": True}, 3),
    ],
)
def test_what_a_policy_chooses(options: dict[str, Any], expected: int) -> None:
    assert added(SelectionPolicy.of(**options)) == expected


def test_strict_with_every_vendor_denied_is_an_error() -> None:
    with pytest.raises(
        OperatorError, match=r"vendor a is denied.*not in the order, and the policy is strict"
    ):
        added(SelectionPolicy.of(prefer="vendor", strict=True, deny_vendors=["a", "b"]))


@pytest.mark.parametrize("tokens", [["vendor:nobody"], ["vendor:nobody", "impl:none"], "vendor:nobody"])
def test_strict_with_an_order_without_implementations_is_an_error(tokens: Any) -> None:
    with pytest.raises(OperatorError, match=r"reference.op: not in the order, and the policy is strict"):
        added(SelectionPolicy.of(per_op_order={"op": tokens}, strict=True))
    assert added(SelectionPolicy.of(per_op_order={"op": tokens})) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefer": "vendor:nobody"}, "prefer: unknown vendor 'nobody'; choose from a, b"),
        ({"prefer": "impl:nope"}, "prefer: unknown implementation 'nope'; choose from default.op"),
        ({"per_op_order": {"no": "vendor"}}, "per_op_order: unknown operator 'no'; choose from op"),
        ({"per_op_order": {"op": "default|impl:x"}}, "per_op_order: op: unknown implementation 'x'"),
        ({"deny_vendors": "a,nobody"}, "deny_vendors: unknown vendor 'nobody'"),
        ({"allow_vendors": ["nobody"]}, "allow_vendors: unknown vendor 'nobody'"),
        ({"op_whitelist": "no"}, "op_whitelist: unknown operator 'no'"),
        ({"op_blacklist": ["op", "no"]}, "op_blacklist: unknown operator 'no'"),
        (None, "give a SelectionPolicy"),
    ],
)
def test_a_policy_that_names_what_is_not_there_is_refused_and_changes_nothing(
    options: Any, message: str
) -> None:
    manager = OpManager(small_registry())
    before = manager.policy
    policy: Any = None if options is None else SelectionPolicy.of(**options)
    with pytest.raises(ConfigError, match=message):
        manager.set_policy(policy)
    with pytest.raises(ConfigError, match=message), manager.policy_context(policy):
        pass
    assert manager.policy == before
    assert int(manager.call_op("op", torch.zeros(()))) == 2


def test_a_policy_is_read_as_a_file_is() -> None:
    written = {
        "strict": "no",
        "per_op_order": "op=vendor:a|reference",
        "op_blacklist": "x,y",
        "prefer": "flagos",
    }
    plain = {
        "per_op_order": {"op": ["vendor:a", "reference"]},
        "op_blacklist": {"x", "y"},
        "allow_vendors": None,
    }
    assert SelectionPolicy.of(**written) == SelectionPolicy.of(**plain)
    for key, value in (("strict", "maybe"), ("deny_vendors", 5), ("stricter", True)):
        with pytest.raises(ConfigError, match=f"{key}.*(choose|write)"):
            SelectionPolicy.of(**{key: value})


def test_arguments_may_have_names_however_a_call_is_resolved() -> None:
    manager = OpManager(small_registry())
    layer = SiluAndMul()
    for _ in range(2):
        assert int(manager.call_op("op", x=torch.zeros(()))) == 2
        assert layer(x=X).shape == (4, 4)
        with manager.policy_context(SelectionPolicy.of(prefer="vendor:a")):
            assert int(manager.call_op("op", x=torch.zeros(()))) == 3
        refusing = OpImpl(
            "op", "no", ImplKind.DEFAULT, lambda x: 1 // 0, priority=999, supported_dtypes={torch.float32}  # type: ignore[arg-type]
        )  # fmt: skip
        manager.registry.register(refusing)
        assert int(manager.call_op("op", x=torch.zeros(()))) == 2
        manager.registry.unregister("op", "no")
    with pytest.raises(TypeError, match="x"):
        manager.call_op("op")


def test_omitted_arguments_have_the_operators_defaults() -> None:
    def others(x: Any, weight: Any, eps: float = 1.0, residual: Any = 7) -> Any:
        return eps, residual

    def none(x: Any, weight: Any, eps: float, residual: Any) -> Any:
        return eps, residual

    for number, function in enumerate((others, none, lambda *args: args[2:])):
        impl_id = f"vendor.a.{number}"
        manager = register(function, impl_id, op_name="rms_norm", priority=900 + number)
        assert manager.call_op("rms_norm", X, X) == (1e-6, None), impl_id
        assert dispatch.rms_norm(X, X, residual=X)[0] == 1e-6


def test_what_was_resolved_while_the_registry_changed_is_not_kept() -> None:
    registry = OpRegistry()
    registry.define(OperatorSpec("op", plus(1)))
    manager = OpManager(registry)
    site = manager.site("op")
    better = OpImpl("op", "better", ImplKind.DEFAULT, plus(9), priority=999)
    asked: list[int] = []

    def available() -> bool:
        asked.append(1)
        if len(asked) == 1:
            thread = threading.Thread(target=lambda: registry.register(better))
            thread.start()
            thread.join(60)
        return True

    # Resolved at the call: nothing is chosen before, as the policy is one of a scope.
    with manager.policy_context(SelectionPolicy.of(prefer="default")):
        registry._impls["op"] += (OpImpl("op", "slow", ImplKind.DEFAULT, plus(5), is_available=available),)
        assert int(site.run(torch.zeros(()))) in (5, 9)
        assert int(site.run(torch.zeros(()))) == 9
    assert int(site.run(torch.zeros(()))) == 9


def test_every_implementation_has_a_reason() -> None:
    manager = OpManager(small_registry(), SelectionPolicy.of(prefer="vendor:a"))
    assert manager.explain("op", torch.float32, CPU).splitlines() == [
        "op → vendor.a.op   (prefer=vendor:a)",
        "  vendor.a.op: chosen",
        "  default.op: comes after vendor.a.op",
        "  vendor.b.op: comes after vendor.a.op",
        "  reference.op: comes after vendor.a.op",
    ]


def test_a_library_that_does_not_load_is_a_reason_and_no_crash() -> None:
    def broken() -> bool:
        raise OSError("libvendor.so: undefined symbol")

    registry = small_registry()
    registry.register(OpImpl("op", "c", ImplKind.DEFAULT, plus(9), priority=999, is_available=broken))
    text = OpManager(registry).explain("op")
    assert "c: not available: OSError: libvendor.so: undefined symbol" in text
    assert text.startswith("op → default.op")


def test_policies_in_a_scope_hold_in_their_thread_only() -> None:
    manager = OpManager(small_registry())
    zero = torch.zeros(())
    inside, outside = threading.Event(), threading.Event()
    seen: list[int] = []

    def other_thread() -> None:
        inside.wait(60)
        seen.append(int(manager.call_op("op", zero)))
        outside.set()

    thread = threading.Thread(target=other_thread)
    thread.start()
    with manager.policy_context(SelectionPolicy.of(prefer="reference")):
        assert int(manager.call_op("op", zero)) == 1
        with manager.policy_context(SelectionPolicy.of(prefer="vendor:a")):
            assert int(manager.call_op("op", zero)) == 3
            inside.set()
            outside.wait(60)
        assert int(manager.call_op("op", zero)) == 1
    thread.join()
    assert seen == [2]
    assert int(manager.call_op("op", zero)) == 2


def test_a_task_that_outlives_its_scope_has_the_processes_policy_and_changes_no_other() -> None:
    registry = small_registry()
    registry.register(
        OpImpl("op", "x", ImplKind.DEFAULT, plus(9), priority=999, supported_dtypes=frozenset({torch.int8}))
    )
    manager = OpManager(registry)

    async def call(began: asyncio.Event, ended: asyncio.Event) -> int:
        began.set()
        await ended.wait()
        return int(manager.call_op("op", torch.zeros((), dtype=torch.int32)))

    async def work() -> int:
        began, ended = asyncio.Event(), asyncio.Event()
        with manager.policy_context(SelectionPolicy.of(prefer="reference")):
            task = asyncio.create_task(call(began, ended))
            await began.wait()
        ended.set()
        return await task

    assert asyncio.run(work()) == 2
    assert int(manager.call_op("op", torch.zeros((), dtype=torch.int8))) == 9


def test_scopes_by_name() -> None:
    register(lambda x: x * 0)
    x = torch.ones(2, 4)
    assert not dispatch.silu_and_mul(x).any()
    with dispatch.with_preference("reference"):
        assert dispatch.silu_and_mul(x).any()
    with dispatch.with_denied_vendors(["a"]):
        assert dispatch.silu_and_mul(x).any()
        with dispatch.with_denied_vendors(["cpu"]):
            assert dispatch.get_manager().policy.deny_vendors == {"a", "cpu"}
    with dispatch.with_allowed_vendors(["cpu"]):
        assert dispatch.silu_and_mul(x).any()
    with dispatch.with_strict_mode():
        assert dispatch.get_manager().policy.strict
    assert not dispatch.get_manager().policy.strict
    assert not dispatch.silu_and_mul(x).any()


# -- places that call ----------------------------------------------------------------------------------


def marked(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x[..., : x.shape[-1] // 2], 7)


def test_functions_and_layers_follow_a_changed_policy_at_once_wherever_they_are_held() -> None:
    manager = register(marked, supported_dtypes=frozenset({torch.float32}))
    held, layer = dispatch.silu_and_mul, SiluAndMul()
    resolved = manager.resolve_op("silu_and_mul", X.dtype, X.device)
    wanted = torch.nn.functional.silu(X[:, :4]) * X[:, 4:]
    half = X.bfloat16()
    for _ in range(2):
        for call in (held, layer, lambda x: manager.call_op("silu_and_mul", x)):
            manager.set_policy(SelectionPolicy.of(prefer="vendor"))
            assert bool((call(X) == 7).all())
            assert not bool((call(half) == 7).any()), "it is for float32"
            manager.set_policy(SelectionPolicy.of(prefer="reference"))
            torch.testing.assert_close(call(X), wanted)
    assert resolved is marked


def test_a_resolved_call_is_the_implementation_itself() -> None:
    layer = RMSNorm(8, 1e-6, torch.float32)
    layer(X)
    site = dispatch.get_manager().site("rms_norm")
    assert site.run is dispatch.get_manager().registry.spec("rms_norm").reference


def test_many_threads_while_the_policy_changes() -> None:
    manager = OpManager(small_registry())
    stop = threading.Event()
    wrong: list[Any] = []

    def call() -> None:
        zero = torch.zeros(())
        while not stop.is_set():
            found = int(manager.call_op("op", zero))
            if found not in (1, 2, 3, 4):
                wrong.append(found)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with in_threads(*[call] * 6):
        try:
            for prefer, expected in (("reference", 1), ("vendor:a", 3), ("default", 2)) * 100:
                manager.set_policy(SelectionPolicy.of(prefer=prefer))
                assert int(manager.call_op("op", torch.zeros(()))) == expected
        finally:
            stop.set()
            sys.setswitchinterval(interval)
    assert not wrong


def test_layers_can_be_copied_and_pickled() -> None:
    layer = RMSNorm(8, 1e-6, torch.float32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(X), layer(X))
        other.weight.data.mul_(2)
        torch.testing.assert_close(other(X), 2 * layer(X))


def test_a_packed_weight_serves_the_reference_when_the_policy_changes() -> None:
    linear = Linear(8, 6, bias=True, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.data.normal_()
    with torch.inference_mode():
        wanted = torch.nn.functional.linear(X, linear.weight, linear.bias)
        linear.prepare_weights()
        torch.testing.assert_close(linear(X), wanted, rtol=1e-4, atol=1e-5)
        dispatch.get_manager().set_policy(SelectionPolicy.of(prefer="reference"))
        assert linear.weight.numel() == 0
        torch.testing.assert_close(linear(X), wanted, rtol=1e-4, atol=1e-5)


def test_an_implementation_may_be_registered_by_name_and_is_imported_when_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_kernels.py").write_text(
        "def silu_and_mul(x): return x[..., :4] * 0\ndef other(y): return y\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with dispatch.with_preference("reference"):
        register("late_kernels:silu_and_mul", priority=500)
        dispatch.silu_and_mul(X)
        assert "late_kernels" not in sys.modules
    assert not dispatch.silu_and_mul(X).any()
    register("late_kernels:other", "vendor.a.other", priority=900)
    with pytest.raises(OperatorSignatureError, match=r"vendor.a.other is late_kernels.other\(y\)"):
        dispatch.silu_and_mul(X)
    with pytest.raises(OperatorError, match=r"fn='late_kernels': write a function, or 'pkg.mod:function'"):
        OpImpl("silu_and_mul", "x", ImplKind.DEFAULT, "late_kernels")


def test_an_operator_that_a_package_defines_is_dispatched_like_the_others() -> None:
    source = "def tripled_for_test(x, by=3):\n    'x times by.'\n    return x * by\n"
    module: dict[str, Any] = {"__name__": "a_package"}
    exec(source, module)
    try:
        tripled = dispatch.operator()(module["tripled_for_test"])
        assert torch.equal(tripled(X), X * 3)
        dispatch.get_manager().registry.register(
            OpImpl("tripled_for_test", "fast", ImplKind.DEFAULT, lambda x, by=3: x * 0, priority=999)
        )
        assert not tripled(X).any()
        assert tripled.__doc__ == "x times by."
        with dispatch.with_preference("reference"):
            assert torch.equal(tripled(X, by=2), X * 2)
    finally:
        del OPERATORS["tripled_for_test"]
        dispatch.reset_manager()


# -- registering ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: OpImpl("op", "default.op", ImplKind.DEFAULT, plus(1)),
            OperatorError,
            "'default.op' is registered for op already",
        ),
        (lambda: OpImpl("no", "x", ImplKind.DEFAULT, plus(1)), OperatorError, "no operator .* 'no'; .* op"),
        (lambda: OpImpl("op", "x", ImplKind.VENDOR, plus(1)), OperatorError, "vendor=None"),
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, plus(1), vendor="a"), OperatorError, "vendor='a'"),
        (lambda: OpImpl("op", "x", "default", plus(1)), OperatorError, "choose one of ImplKind.DEFAULT"),  # type: ignore[arg-type]
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, 5), OperatorError, "fn=5: write a function"),  # type: ignore[arg-type]
        (lambda: OpImpl("op", "", ImplKind.DEFAULT, plus(1)), OperatorError, "impl_id=''"),
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, lambda: 0), OperatorSignatureError, r"called with \(x"),
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, lambda y: 0), OperatorSignatureError, "take these"),
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, lambda x, y: 0), OperatorSignatureError, "a default"),
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, lambda *, x: 0), OperatorSignatureError, "take these"),
        (lambda: OpImpl("op", "x", ImplKind.DEFAULT, partial(divmod)), OperatorSignatureError, "x is func"),
        (lambda: plus(1), OperatorError, "give an OpImpl"),
    ],
)  # fmt: skip
def test_what_cannot_be_registered(make: Callable[[], OpImpl], error: type[Exception], message: str) -> None:
    registry = small_registry()
    with pytest.raises(error, match=message):
        registry.register(make())
    assert len(registry.impls("op")) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": ImplKind.VENDOR, "vendor": ""}, "vendor='': an implementation of kind vendor names its"),
        ({"priority": "high"}, "priority='high': write a whole number"),
        ({"min_arch": 8}, r"min_arch=8: write \(major, minor\)"),
        ({"min_arch": (8,)}, r"min_arch=\(8,\): write \(major, minor\)"),
        ({"supported_dtypes": {"float32"}}, "write types such as torch.bfloat16"),
        ({"is_available": True}, "is_available=True: write a function"),
        ({"mutates": "y"}, "mutates='y'; op has the arguments x"),
    ],
)
def test_wrong_declarations_of_an_implementation(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        small_registry().register(OpImpl(**{"op_name": "op", "impl_id": "x", "kind": ImplKind.DEFAULT,
                                            "fn": plus(1), **fields}))  # fmt: skip
    one: Any = torch.half
    assert OpImpl("op", "x", ImplKind.DEFAULT, plus(1), supported_dtypes=one).supported_dtypes == frozenset(
        {one}
    )


def test_more_arguments_with_defaults_are_well_and_the_reference_stays() -> None:
    registry = small_registry()
    registry.register(OpImpl("op", "x", ImplKind.DEFAULT, lambda x, fast=True: x))
    registry.register(OpImpl("op", "y", ImplKind.DEFAULT, lambda *args, **kwargs: args[0]))
    registry.unregister("op", "x")
    with pytest.raises(OperatorError, match="it stays"):
        registry.unregister("op", "reference.op")
    with pytest.raises(OperatorError, match="'x' is not an implementation of op"):
        registry.unregister("op", "x")
    with pytest.raises(OperatorError, match="defined already"):
        registry.define(OperatorSpec("op", plus(1)))


VENDOR_FOLDER = """
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl
def silu_and_mul({arguments}):
    return x[..., : x.shape[-1] // 2] * 0
def register(registry):
    registry.register(OpImpl("silu_and_mul", "vendor.acme.s", ImplKind.VENDOR, silu_and_mul, vendor="acme"))
"""


def test_vendors_are_found_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "notes").mkdir()  # no package
    (tmp_path / "acme" / "__init__.py").write_text(VENDOR_FOLDER.format(arguments="x"))
    monkeypatch.setenv("SGL_ASPECTS_OP_VENDOR_PATH", str(tmp_path))
    assert {"acme", "cuda", "ascend"} <= new_registry().vendors()
    monkeypatch.setenv("SGL_ASPECTS_OP_PREFER", "vendor:acme")
    assert not dispatch.silu_and_mul(X).any()


def test_a_vendor_with_the_wrong_signature_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "__init__.py").write_text(VENDOR_FOLDER.format(arguments="gate, up"))
    monkeypatch.setenv("SGL_ASPECTS_OP_VENDOR_PATH", str(tmp_path))
    with pytest.raises(
        OperatorSignatureError, match=rf"vendor folder {tmp_path / 'acme'}: vendor.acme.s is .*\(gate, up\)"
    ):
        dispatch.get_manager()
    (tmp_path / "acme" / "__init__.py").write_text("raise ValueError('no driver')")
    with pytest.raises(OperatorError, match=r"acme failed while it registered.*no driver"):
        dispatch.get_manager()
    monkeypatch.setenv("SGL_ASPECTS_OP_VENDOR_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"SGL_ASPECTS_OP_VENDOR_PATH: .*nowhere' is not a folder"):
        dispatch.get_manager()


def test_vendors_are_found_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_kernels.py").write_text(VENDOR_FOLDER.format(arguments="x"))
    entry_points = install(
        tmp_path, "acme-kernels", "[sgl_aspects.operators]\nacme = acme_kernels:register\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "acme" in new_registry().vendors()
    entry_points.write_text("[sgl_aspects.operators]\nacme = acme_kernels:nothing\n")
    with pytest.raises(OperatorError, match=r"entry point 'acme' of acme-kernels 1.0"):
        new_registry()


# -- configuration -------------------------------------------------------------------------------------


def settings_of(text: str, tmp_path: Path) -> Settings:
    file = tmp_path / "ops.yaml"
    file.write_text(text)
    return merged([read_file(file)], new_registry())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preffer: vendor", "unknown key 'preffer'; choose from prefer, per_op_order, strict"),
        ("prefer: vender", "prefer: unknown token 'vender'; choose from default, flagos, vendor, ref"),
        ("prefer: 5", "prefer: unknown token 5"),
        ("prefer: 'vendor:'", "unknown token 'vendor:'"),
        ("prefer: vendor:nvidia", "prefer: unknown vendor 'nvidia'; choose from ascend, cpu, cuda"),
        ("prefer: impl:nope", "unknown implementation 'nope'; choose from "),
        ("per_op_order: {rmsnorm: vendor}", "per_op_order: unknown operator 'rmsnorm'; choose from c"),
        ("per_op_order: {rms_norm: [vendor, refrence]}", "per_op_order: rms_norm: unknown token 'refrence'"),
        ("per_op_order: {rms_norm: ' | '}", "per_op_order: rms_norm: ' | ': write one token or a list"),
        ("deny_vendors: ','", "deny_vendors: ',': write a list of names"),
        ("per_op_order: {rms_norm: []}", "per_op_order: rms_norm: [[]]: write one token or a list"),
        ("per_op_order: [rms_norm]", "per_op_order: .*write one line 'operator: tokens' each"),
        ("per_op_order: rms_norm", "per_op_order: 'rms_norm': write operator=token"),
        ("per_op_order: {rms_norm: 'impl:reference.topk'}", "choose from default.flaggems.rms_norm, "),
        ("strict: maybe", "strict: 'maybe': choose true or false"),
        ("deny_vendors: [amd]", "deny_vendors: unknown vendor 'amd'; choose from"),
        ("allow_vendors: 5", "allow_vendors: 5: write a list of names"),
        ("op_whitelist: [nope]", "op_whitelist: unknown operator 'nope'"),
        ("op_whitelist: [topk]\nop_blacklist: [rms_norm]", "whitelist: .*blacklist: .* exclude each"),
        ("shadow_rate: 0.5", "ops.yaml: unknown key 'shadow_rate'; choose from prefer"),
        ("log: 7", "log: 7: write a path"),
        ("- prefer", "holds a list: write 'key: value' lines"),
        ("prefer: [", "is not YAML"),
    ],
)  # fmt: skip
def test_an_error_in_a_file_names_file_key_value_and_choices(text: str, message: str, tmp_path: Path) -> None:
    message = message.replace("[[]]", r"\[\]")
    with pytest.raises(ConfigError, match=message) as caught:
        settings_of(text, tmp_path)
    assert str(tmp_path / "ops.yaml") in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_OP_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read .*name a YAML file that exists"):
        dispatch.get_manager()
    monkeypatch.setenv("SGL_ASPECTS_OP_CONFIG", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        dispatch.silu_and_mul(X)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SGL_ASPECTS_OP_PREFER", "vender", "SGL_ASPECTS_OP_PREFER: unknown token 'vender'"),
        ("SGL_ASPECTS_OP_PER_OP_ORDER", "rms_norm=a|b", "PER_OP_ORDER: rms_norm: unknown token 'a'"),
        ("SGL_ASPECTS_OP_STRICT", "2", "SGL_ASPECTS_OP_STRICT: '2': choose true or false"),
        ("SGL_ASPECTS_OP_PLATFORM", "nv", "unknown platform file 'nv'; choose from amd, ascend, cpu"),
        ("SGL_ASPECTS_OP_PREFERS", "vendor", "unknown variable .*PREFERS'; choose from SGL_ASPECTS_OP_PRE"),
        ("SGL_ASPECTS_OP_LOG", "/nowhere/log", "SGL_ASPECTS_OP_LOG: '/nowhere/log' cannot be opened"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_an_error_at_start(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        dispatch.get_manager()


def test_variables_come_before_the_file_and_the_file_before_the_platforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = new_registry()
    settings = load_settings(registry)
    assert settings.policy.prefer.text == "vendor", "cpu.yaml"
    assert settings.origin("prefer").endswith("cpu.yaml: prefer")
    file = tmp_path / "mine.yaml"
    file.write_text("prefer: reference\nstrict: true\nop_blacklist: [topk]\n")
    monkeypatch.setenv("SGL_ASPECTS_OP_CONFIG", str(file))
    settings = load_settings(registry)
    assert (settings.policy.prefer.text, settings.policy.strict) == ("reference", True)
    monkeypatch.setenv("SGL_ASPECTS_OP_PREFER", "flagos")
    monkeypatch.setenv("SGL_ASPECTS_OP_WHITELIST", "rms_norm")
    monkeypatch.setenv("SGL_ASPECTS_OP_PER_OP_ORDER", "rms_norm=vendor:cuda|default;topk=reference")
    settings = load_settings(registry)
    assert settings.policy.describe() == (
        "prefer=default per_op_order=rms_norm=vendor:cuda|default;topk=reference strict=true "
        "op_whitelist=rms_norm"
    )
    assert SelectionPolicy.of(allow_vendors=[]).describe() == "prefer=default allow_vendors="
    assert settings.origin("strict") == f"{file}: strict"
    assert settings.origin("prefer") == "SGL_ASPECTS_OP_PREFER"
    monkeypatch.setenv("SGL_ASPECTS_OP_PLATFORM", "none")
    monkeypatch.delenv("SGL_ASPECTS_OP_CONFIG")
    assert load_settings(registry).files == ()


def test_a_platform_brings_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "acme.yaml"
    file.write_text("prefer: reference")

    class Acme(CpuPlatform):
        def get_operator_config(self) -> str | None:
            return str(file)

    set_current_platform(Acme())
    assert load_settings(new_registry()).origin("prefer") == f"{file}: prefer"


def test_the_sample_has_every_key_and_all_built_in_files_are_valid() -> None:
    registry = new_registry()
    for file in PLATFORM_FILES.glob("*.yaml"):
        merged([read_file(file)], registry)
    sample = (PLATFORM_FILES / "sample.yaml").read_text()
    for key in KEYS:
        assert f"\n{key}:" in sample or f"\n# {key}:" in sample, key


def test_the_log_names_what_each_operator_resolved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    file = tmp_path / "ops.log"
    monkeypatch.setenv("SGL_ASPECTS_OP_LOG", str(file))
    logger = logging.getLogger("sgl_aspects.dispatch")
    handlers, level = list(logger.handlers), logger.level
    try:
        dispatch.silu_and_mul(X)
        dispatch.silu_and_mul(X)
        lines = [line for line in file.read_text().splitlines() if "silu_and_mul" in line]
        assert len(lines) == 1
        assert "silu_and_mul resolves to reference.silu_and_mul" in lines[0]
    finally:
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)


def test_tokens() -> None:
    assert Token.parse(" flagos ", "x") == Token.parse("default", "x")
    assert Token.parse("vendor: cuda", "x").vendor == "cuda"


# -- compilers -----------------------------------------------------------------------------------------


def compiled(function: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
def test_compiled_code_goes_through_dispatch_in_one_graph_and_follows_the_policy(
    guarded: bool, called_before: bool
) -> None:
    manager = register(marked, supported_dtypes={torch.float32, torch.bfloat16} if guarded else None)
    layer, norm = SiluAndMul(), RMSNorm(8, 1e-6, torch.float32)

    def work(x: torch.Tensor) -> torch.Tensor:
        normed, _ = norm(x, x)
        output: torch.Tensor = layer(normed) + dispatch.silu_and_mul(normed)
        return output

    if called_before:
        work(X)
    with torch.inference_mode():
        once = compiled(work)
        assert bool((once(X) == 14).all())
        manager.set_policy(SelectionPolicy.of(prefer="reference"))
        torch.testing.assert_close(once(X), work(X))
        assert not bool((once(X) == 14).any())


@pytest.mark.parametrize(
    ("guarded", "dtype", "names"),
    [
        (False, torch.float32, None),
        (True, torch.float64, {"rms_norm", "rotary_embedding", "topk"}),
        pytest.param(True, torch.float64, None, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_every_operator_is_one_graph(guarded: bool, dtype: torch.dtype, names: set[str] | None) -> None:
    manager = dispatch.get_manager()
    for name in manager.registry.op_names() if guarded else ():
        reference = manager.registry.spec(name).reference
        types = frozenset({torch.float32, torch.bfloat16})
        register(reference, f"vendor.a.{name}", op_name=name, priority=999, supported_dtypes=types)
    for op_name, inputs in dict(cases().values()).items():
        if names is not None and op_name not in names:
            continue
        once, again = in_type(inputs, dtype), in_type(inputs, dtype)
        function = getattr(dispatch, op_name)
        with torch.inference_mode():
            found = compiled(lambda given, function=function: function(**given))(once)
            for one, other in zip(flat(found), flat(function(**again))):
                torch.testing.assert_close(one, other)


def test_a_platform_in_the_making_chooses_at_the_first_call() -> None:
    class Unfinished(CpuPlatform):
        def device_count(self) -> int:
            raise NotImplementedError("device_count")

    set_current_platform(Unfinished())
    manager = OpManager(small_registry())
    manager.registry.register(
        OpImpl("op", "x", ImplKind.DEFAULT, plus(9), priority=999, device_types=frozenset({"cpu"}))
    )
    assert int(manager.call_op("op", torch.zeros(()))) == 9
