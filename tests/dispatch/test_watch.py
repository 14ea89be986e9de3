"""Shadow mode, and talking to live engines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_platform.platform import LoopbackPlatform
from torch import nn

from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import set_current_platform
from sgl_aspects.run.requests import prepare_from_environment
from sgl_aspects.runtime import Engine, SamplingParams, ServerArgs, dispatch
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl, OpManager, Token, live
from sgl_aspects.runtime.dispatch.shadow.watching import Watch, difference
from sgl_aspects.runtime.ops import Linear, RMSNorm, SiluAndMul
from tests.support.schedulers import run_in_process
from tests.support.tiny_models import make_llama

REFERENCE = Token.parse("reference", "test")
LAYERS, WRONG = 12, 7


def vendor(op: str, function: Any, **options: Any) -> OpImpl:
    return OpImpl(op, f"vendor.acme.{op}", ImplKind.VENDOR, function, vendor="acme", priority=500, **options)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(16, 1e-6, torch.float32)
        self.up = Linear(16, 64, bias=False, dtype=torch.float32)
        self.activation = SiluAndMul()
        self.down = Linear(32, 16, bias=False, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.activation(self.up(self.norm(x))))
        return x + down


class Model(nn.Module):
    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        torch.manual_seed(0)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wrong_in_layer_7(model: Model, by: float = 1.02) -> None:
    """A vendor's rms_norm that is right everywhere else."""
    weight = model.layers[WRONG].norm.weight

    def rms_norm(x: Any, w: Any, eps: float = 1e-6, residual: Any = None) -> Any:
        normed = torch.nn.functional.rms_norm(x, w.shape, w, eps)
        return normed * by if w is weight else normed

    def renamed(x: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
        return rms_norm(x, weight, eps, residual)

    dispatch.get_manager().registry.register(vendor("rms_norm", renamed))
    dispatch.get_manager().set_policy(dispatch.SelectionPolicy.of(prefer="vendor:acme"))


def watched(rate: float = 1.0) -> Watch:
    watch = Watch({"*": REFERENCE}, rate)
    dispatch.get_manager().set_watch(watch)
    return watch


def test_a_kernel_made_wrong_in_layer_7_of_12_is_named_with_its_layer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    wrong_in_layer_7(model)
    watch = watched()
    x = torch.randn(5, 16)
    with torch.inference_mode(), caplog.at_level("WARNING", logger="sgl_aspects.dispatch"):
        found = model(x)
        dispatch.get_manager().set_watch(None)
        torch.testing.assert_close(found, model(x), msg="the engine goes on with what it had")
    first = watch.first_difference()
    assert first is not None
    assert (first.layer, first.op, first.impl) == ("layers.7.norm", "rms_norm", "vendor.acme.rms_norm")
    assert first.worst == pytest.approx(0.02, rel=1e-3)
    differing = [each.layer for each in watch.comparisons() if each.differed]
    assert differing == ["layers.7.norm"], "those after it get the same inputs in both"
    assert [each.layer for each in watch.comparisons() if each.op == "rms_norm"] == [
        f"layers.{number}.norm" for number in range(LAYERS)
    ]
    assert "vendor.acme.rms_norm differs from reference.rms_norm by 0.02" in caplog.text
    assert "in layer layers.7.norm" in caplog.text


def test_every_layer_is_looked_at_within_a_hundred_steps_at_a_rate_of_a_hundredth() -> None:
    model = Model()
    wrong_in_layer_7(model)
    watch = watched(0.01)
    x = torch.randn(1, 16)
    with torch.inference_mode():
        for _ in range(100):
            model(x)
    norms = [each for each in watch.comparisons() if each.op == "rms_norm"]
    assert [each.compared for each in norms] == [1] * LAYERS
    first = watch.first_difference()
    assert first is not None
    assert first.layer == "layers.7.norm"


def test_nothing_is_left_when_the_watch_ends() -> None:
    layer = SiluAndMul()
    x = torch.randn(2, 8)
    layer(x)
    site = dispatch.get_manager().site("silu_and_mul")
    before = site.run
    hooks = dict(nn.modules.module._global_forward_pre_hooks)
    dispatch.get_manager().registry.register(vendor("silu_and_mul", lambda x: x[..., :4] * 0))
    watched()
    layer(x)
    assert site.run != before
    dispatch.get_manager().registry.unregister("silu_and_mul", "vendor.acme.silu_and_mul")
    dispatch.get_manager().set_watch(None)
    assert site.run == before
    assert dict(nn.modules.module._global_forward_pre_hooks) == hooks


def test_an_in_place_operator_is_compared_on_copies() -> None:
    manager = dispatch.get_manager()
    calls = []

    def recurrent(
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        state: Any,
        scale: Any = None,
        use_qk_l2norm: bool = False,
    ) -> Any:
        calls.append(1)
        state.add_(1)
        return value * 0

    manager.registry.register(vendor("fused_recurrent_gated_delta_rule", recurrent))
    manager.set_policy(dispatch.SelectionPolicy.of(prefer="vendor:acme"))
    watch = watched()
    q = torch.randn(1, 1, 2, 4)
    gate = torch.zeros(1, 1, 2)
    state = torch.zeros(1, 2, 4, 4)
    dispatch.fused_recurrent_gated_delta_rule(q, q, q, gate - 1, gate + 1, state)
    assert calls == [1]
    assert torch.equal(state, torch.ones(1, 2, 4, 4)), "the shadow's state is another one"
    first = watch.first_difference()
    assert first is not None
    assert first.op == "fused_recurrent_gated_delta_rule"


def test_a_shadow_that_fails_is_reported_without_effect() -> None:
    manager = dispatch.get_manager()
    manager.registry.register(vendor("silu_and_mul", lambda x: 1 / 0))
    watch = Watch({"silu_and_mul": Token.parse("vendor:acme", "")}, 1.0)
    manager.set_policy(dispatch.SelectionPolicy.of(prefer="reference"))
    manager.set_watch(watch)
    assert dispatch.silu_and_mul(torch.ones(1, 4)).shape == (1, 2)
    assert [each.error for each in watch.comparisons()] == ["ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_code_stays_one_graph_under_a_watch_and_is_not_compared(fullgraph: bool) -> None:
    model = Model()
    wrong_in_layer_7(model)
    watch = watched()
    torch.compiler.reset()
    x = torch.randn(3, 16)
    with torch.inference_mode():
        compiled = torch.compile(lambda x: model(x), fullgraph=fullgraph, backend="eager")
        found = compiled(x)
        assert watch.comparisons() == []
        torch.testing.assert_close(found, model(x))
    assert [each.layer for each in watch.comparisons() if each.differed] == ["layers.7.norm"]


def test_steps_that_a_graph_runs_are_counted_and_not_compared(tmp_path: Path) -> None:
    make_llama(tmp_path, num_hidden_layers=2)
    args = ServerArgs(tmp_path, max_total_tokens=256, max_running_requests=2)
    set_current_platform(LoopbackPlatform())
    try:
        wanted, _ = run_in_process(args, [[5, 6, 7]], 12)
        watch = watched()
        assert run_in_process(args, [[5, 6, 7]], 12)[0] == wanted
    finally:
        set_current_platform(None)
    assert watch.report()["replayed_steps"] == 11, "the prompt is a step without a graph"


def test_it_reports_what_was_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_aspects.cli.ops import _state_lines

    manager = dispatch.get_manager()
    manager.set_watch(Watch({"silu_and_mul": REFERENCE, "rms_norm": Token.parse("vendor:cuda", "")}, 1.0))

    def told() -> str:
        return "\n".join(_state_lines({**live.state(manager), "error": None}))

    dispatch.silu_and_mul(torch.ones(1, 4))
    assert "0 compared" in told()
    assert "silu_and_mul is not compared: reference.silu_and_mul serves it itself" in told()
    assert "rms_norm is not compared: no implementation may serve rms_norm" in told()
    assert "nothing was compared yet" in told()
    manager.watch.count_replay()  # type: ignore[union-attr]
    assert "1 replays of captured graphs: what a graph runs is not compared" in told()


def test_a_graph_that_is_being_captured_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_aspects.platforms import set_current_platform
    from sgl_aspects.platforms.cpu import CpuPlatform

    class Capturing(CpuPlatform):
        def is_capturing(self) -> bool:
            return True

    set_current_platform(Capturing())
    try:
        dispatch.get_manager().registry.register(vendor("silu_and_mul", lambda x: x[..., :2] * 0))
        watch = watched()
        dispatch.silu_and_mul(torch.ones(1, 4))
        assert watch.comparisons() == []
    finally:
        set_current_platform(None)


def test_differences() -> None:
    ones = torch.ones(4)
    assert difference(ones, ones) == 0
    assert difference(ones * 1.5, ones * 2) == 0.25
    assert difference(ones, torch.ones(5)) == float("inf")
    assert difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert difference(torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0])) == 0
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    assert difference(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.slow
def test_the_engines_own_model_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_llama(tmp_path, num_hidden_layers=LAYERS)
    monkeypatch.setenv("SGL_ASPECTS_OP_SHADOW", "*=reference")
    monkeypatch.setenv("SGL_ASPECTS_OP_SHADOW_RATE", "1")

    calls = 0

    def wrong_in_layer_7(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        output = torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
        return output + 0.1 * output.abs().max() if calls % LAYERS == WRONG + 1 else output

    dispatch.get_manager().registry.register(vendor("silu_and_mul", wrong_in_layer_7))
    run_in_process(ServerArgs(tmp_path, max_total_tokens=256), [[5, 6, 7]], 3)
    watch = dispatch.get_manager().watch
    assert watch is not None
    first = watch.first_difference()
    assert first is not None
    assert first.layer == "model.layers.7.mlp.activation"
    assert [each.layer for each in watch.comparisons() if each.differed] == [first.layer]
    linears = [each for each in watch.comparisons() if each.op == "linear"]
    assert len(linears) == 4 * LAYERS + 1, "oneDNN's products, against the plain ones"


# -- live ------------------------------------------------------------------------------------------------

#: A vendor whose kernel is wrong where the weight is layer 7's.
BROKEN_VENDOR = """
import os, torch
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl
def rms_norm(x, weight, eps=1e-6, residual=None):
    total = x if residual is None else x + residual
    normed = torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
    if abs(float(weight.double().sum()) - float(os.environ["WRONG_WEIGHT"])) < 1e-9:
        normed = normed * 1.05
    return normed if residual is None else (normed, total)
def register(registry):
    impl_id = "vendor.broken.rms_norm"
    registry.register(OpImpl("rms_norm", impl_id, ImplKind.VENDOR, rms_norm, vendor="broken"))
"""


def ops(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["ops", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.usefixtures("forked_scheduler")
def test_a_live_engine_is_watched_and_changed_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_llama(tmp_path / "model", num_hidden_layers=LAYERS)
    weight = model.model.layers[WRONG].post_attention_layernorm.weight
    (tmp_path / "vendors" / "broken").mkdir(parents=True)
    (tmp_path / "vendors" / "broken" / "__init__.py").write_text(BROKEN_VENDOR)
    monkeypatch.setenv("WRONG_WEIGHT", repr(float(weight.detach().double().sum())))
    monkeypatch.setenv("SGL_ASPECTS_OP_VENDOR_PATH", str(tmp_path / "vendors"))
    folder = tmp_path / "control"
    monkeypatch.setenv("SGL_ASPECTS_OP_CONTROL", str(folder))
    prepare_from_environment()  # spawned processes do that when they load their plugins; this one is forked
    with Engine(model_path=tmp_path / "model", max_total_tokens=512) as engine:

        def generate() -> list[int]:
            params = SamplingParams(max_new_tokens=4, ignore_eos=True)
            return engine.generate([5, 6, 7], params).output_ids

        assert len(generate()) == 4
        words = ("--control", str(folder))
        status, out, err = ops(capsys, *words, "--shadow", "rms_norm=reference", "--rate", "1")
        assert (status, err) == (0, "")
        assert "rms_norm → vendor.broken.rms_norm" in out
        assert "shadow rms_norm=reference at 1 of the calls" in out
        generate()
        status, out = _until_status(1, capsys, *words)
        assert "the first layer that differs: model.layers.7.post_attention_layernorm (rms_norm)" in out
        assert "vendor.broken.rms_norm against reference.rms_norm" in out
        assert "differ, by up to 0.05 of the largest value" in out
        # Take the vendor out, and look again.
        status, out, _ = ops(
            capsys, *words, "--set", "deny_vendors=broken", "--shadow", "rms_norm=reference",
            "--rate", "1", "--json",
        )  # fmt: skip
        assert status == 0
        assert json.loads(out)[0]["policy"] == "prefer=vendor deny_vendors=broken"
        generate()
        _until_status(
            0, capsys, *words, wanted="rms_norm is not compared: reference.rms_norm serves it itself"
        )
        status, out, err = ops(capsys, *words, "--shadow", "nope=reference")
        assert status == 2
        assert "--shadow: unknown operator 'nope'; choose from" in err
        status, out, _ = ops(capsys, *words, "--shadow", "off", "--json")
        assert status == 0
        assert json.loads(out)[0]["watch"] is None
    status, _, err = ops(capsys, *words, "--live")
    assert status == 2
    assert f"no live process follows {folder}: start an engine" in err


def _until_status(
    status: int, capsys: pytest.CaptureFixture[str], *words: str, wanted: str = ""
) -> tuple[int, str]:
    """A watch compares in a thread of its own."""
    deadline = time.monotonic() + 60
    while True:
        found, out, _ = ops(capsys, *words, "--live")
        if (found == status and wanted in out) or time.monotonic() > deadline:
            assert found == status, out
            assert wanted in out
            return found, out
        time.sleep(0.1)


def test_a_live_policy_is_changed_key_by_key_and_back_again() -> None:
    manager = dispatch.get_manager()

    def after(**said: str) -> str:
        live.apply({"set": said}, manager)
        return manager.policy.describe()

    assert (
        after(op_blacklist="topk,rms_norm", strict="yes")
        == "prefer=vendor strict=true op_blacklist=rms_norm,topk"
    )
    assert after(op_whitelist="topk") == "prefer=vendor strict=true op_whitelist=topk", (
        "they exclude each other"
    )
    with pytest.raises(ConfigError, match="--set op_whitelist: 'topk' and --set op_blacklist: 'linear' excl"):
        after(op_whitelist="topk", op_blacklist="linear")
    assert after(op_blacklist="linear") == "prefer=vendor strict=true op_blacklist=linear"
    assert after(op_blacklist="", strict="", prefer="") == "prefer=default"
    assert after(allow_vendors="cuda", deny_vendors="cpu") == (
        "prefer=default deny_vendors=cpu allow_vendors=cuda"
    )
    with pytest.raises(ConfigError, match="unknown vendor 'nobody'"):
        after(allow_vendors="", deny_vendors="nobody")
    assert manager.policy.allow_vendors == frozenset({"cuda"}), "all of a request or nothing"
    assert after(allow_vendors="", deny_vendors="") == "prefer=default"

    def watching() -> Any:
        return manager.watch and (manager.watch.shadow, manager.watch.rate)

    after(per_op_order="rms_norm=reference", shadow="topk=reference", shadow_rate="0.5")
    assert watching() == ({"topk": REFERENCE}, 0.5)
    live.apply({"rate": 0.25}, manager)
    assert watching() == ({"topk": REFERENCE}, 0.25)
    after(shadow="")
    assert watching() is None
    live.apply({"shadow": "topk=reference"}, manager)
    assert watching() == ({"topk": REFERENCE}, 0.01)
    live.apply({"shadow": ""}, manager)
    assert watching() is None
    before = manager.policy
    with pytest.raises(ConfigError, match="--rate: nothing is watched"):
        live.apply({"set": {"prefer": "reference"}, "rate": 0.5}, manager)
    assert manager.policy == before, "all of a request or nothing"


def test_broken_requests_are_refused() -> None:
    manager: OpManager = dispatch.get_manager()
    with pytest.raises(ConfigError, match="--set: unknown key 'preffer'"):
        live.apply({"set": {"preffer": "vendor"}}, manager)
    with pytest.raises(ConfigError, match="--rate: 7: write a share"):
        live.apply({"shadow": "rms_norm=reference", "rate": 7}, manager)
    with pytest.raises(ConfigError, match="--rate: nothing is watched: name operators with --shadow"):
        live.apply({"rate": 0.5}, manager)
    with pytest.raises(ConfigError, match="--set log: it is read at start only; choose from prefer"):
        live.apply({"set": {"log": "x"}}, manager)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check", "none.yaml"], "none.yaml cannot be read"),
        (["--set", "prefer"], "--set 'prefer': write KEY=VALUE"),
        (["--set", "prefer=vender"], "--set prefer: unknown token 'vender'"),
        (["rmsnorm"], "no operator is named 'rmsnorm'; choose from"),
    ],
)
def test_mistakes_on_the_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = ops(capsys, *words)
    assert status == 2
    assert message in err


def test_what_would_be_chosen_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = ops(capsys, "linear", "rms_norm", "--json", "--set", "per_op_order=rms_norm=default")
    report = json.loads(out)
    assert (status, report["platform"], report["dtype"]) == (0, "cpu", "bfloat16")
    assert report["policy"]["per_op_order"] == {"value": "rms_norm=default", "from": "--set per_op_order"}
    linear, norm = report["operators"]
    assert linear["implementation"] == "vendor.cpu.linear"
    assert norm["considered"][0] == {
        "implementation": "default.flaggems.rms_norm",
        "kind": "default",
        "reason": "not available: platform cpu declares no Triton",
    }
    status, out, _ = ops(capsys)
    assert "fused_moe → reference.fused_moe" in out
    file = tmp_path / "ops.yaml"
    file.write_text("prefer: reference")
    assert ops(capsys, "--check", str(file)) == (0, f"{file}: OK. prefer=reference\n", "")
