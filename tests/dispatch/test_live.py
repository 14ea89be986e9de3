"""Talking to live engines, and `sgl-aspects ops`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sgl_aspects.cli.main import main
from sgl_aspects.conformance.operators import difference
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.requests import prepare_from_environment
from sgl_aspects.runtime import Engine, SamplingParams, dispatch
from sgl_aspects.runtime.dispatch import OpManager, process
from tests.support.tiny_models import make_llama


def test_differences() -> None:
    ones = torch.ones(4)
    assert difference(ones, ones) == 0
    assert difference(ones * 1.5, ones * 2) == 0.25
    assert difference(ones, torch.ones(5)) == float("inf")
    assert difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert difference(torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0])) == 0
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    assert difference(torch.empty(0), torch.empty(0)) == 0


def ops(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["ops", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.usefixtures("forked_scheduler")
def test_a_live_engine_is_changed_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_llama(tmp_path / "model", num_hidden_layers=2)
    folder = tmp_path / "control"
    monkeypatch.setenv("SGL_ASPECTS_OP_CONTROL", str(folder))
    prepare_from_environment()  # spawned processes do that when they load their plugins; this one is forked
    with Engine(model_path=tmp_path / "model", max_total_tokens=512) as engine:
        engine.generate([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
        words = ("--control", str(folder))
        status, out, err = ops(capsys, *words, "linear")
        assert (status, err) == (0, "")
        assert "linear → vendor.cpu.linear" in out
        assert "rms_norm" not in out, "only those that were named"
        status, out, _ = ops(capsys, *words, "--set", "per_op_order=linear=reference", "--json")
        assert status == 0
        (state,) = json.loads(out)
        assert "per_op_order=linear=reference" in state["policy"]
        assert {row[2] for row in state["resolved"] if row[0] == "linear"} == {"reference.linear"}
        status, _, err = ops(capsys, *words, "--set", "per_op_order=nope=reference")
        assert status == 2
        assert "--set per_op_order: unknown operator 'nope'; choose from" in err
    status, _, err = ops(capsys, *words, "--live")
    assert status == 2
    assert f"no live process follows {folder}: start an engine" in err


def test_a_live_policy_is_changed_key_by_key_and_back_again() -> None:
    manager = dispatch.get_manager()

    def after(**said: str) -> str:
        process.apply({"set": said}, manager)
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


def test_broken_requests_are_refused() -> None:
    manager: OpManager = dispatch.get_manager()
    with pytest.raises(ConfigError, match="--set: unknown key 'preffer'"):
        process.apply({"set": {"preffer": "vendor"}}, manager)
    with pytest.raises(ConfigError, match="--set log: it is read at start only; choose from prefer"):
        process.apply({"set": {"log": "x"}}, manager)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check", "none.yaml"], "none.yaml cannot be read"),
        (["--set", "prefer"], "--set 'prefer': write KEY=VALUE"),
        (["--set", "prefer=vender"], "--set prefer: unknown token 'vender'"),
        (["--set", "shadow=rms_norm=reference"], "--set: unknown key 'shadow'; choose from prefer"),
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
