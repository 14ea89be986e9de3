"""The methods of a vendor's package that the embedded engine calls, and the use of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_aspects.errors import (
    ConfigError,
    InvalidRequestError,
    OperatorError,
    OperatorSignatureError,
    PlatformError,
    SchedulerDiedError,
)
from sgl_aspects.platforms import set_current_platform
from sgl_aspects.runtime import Engine, SamplingParams, dispatch
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from sgl_aspects.runtime.ops import Operator, RMSNorm, SiluAndMul
from sgl_aspects.runtime.server_args import ServerArgs, with_platform_defaults
from tests.support.acme import AcmePlatform
from tests.support.answers import clear_answers
from tests.support.schedulers import run_in_process
from tests.support.tiny_models import make_llama, make_model

pytestmark = pytest.mark.usefixtures("forked_schedulers")

NEW_TOKENS = 10


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The platform is chosen in all processes; what of it was used is written here."""
    choose(monkeypatch, "AcmePlatform")
    path = tmp_path / "used"
    path.touch()
    monkeypatch.setenv("ACME_USED", str(path))
    return path


def choose(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_current_platform(None)
    monkeypatch.setenv("SGLANG_PLATFORM", f"acme=tests.support.acme:{name}")


COMMON = {"allocator", "rms_norm", "linear"}
GATED = {"silu_and_mul"}
EXPERTS = GATED | {"fused_moe"}


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        pytest.param(
            "llama",
            {"compile": True, "compile_mode": "fast"},
            GATED | {"mha pool", "compile mode fast"},
            id="compiled",
        ),
        pytest.param("llama", {"tp_size": 2}, GATED | {"mha pool", "all_reduce"}, id="heads"),
        pytest.param(
            "deepseek v3",
            {"tp_size": 2},
            EXPERTS | {"mla pool", "all_reduce"},
            id="mla",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepseek v3.2", {"tp_size": 2}, EXPERTS | {"dsa pool", "mla pool", "all_reduce"}, id="dsa"
        ),
    ],
)
def test_a_vendor_whose_everything_is_its_own_answers_as_transformers(
    family: str, fields: dict[str, Any], expected: set[str], used: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model = make_model(folder, family)
    prompts, answers = clear_answers(model, NEW_TOKENS)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with Engine(model_path=folder, chunked_prefill_size=32, max_total_tokens=2048, **fields) as engine:
        found = [result.output_ids for result in engine.generate(prompts, params)]
    assert found == answers
    assert set(used.read_text().splitlines()) == COMMON | expected


def test_what_a_platform_sets_holds_in_the_callers_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llama(tmp_path)
    choose(monkeypatch, "ShortAcmePlatform")
    with Engine(model_path=tmp_path) as engine:
        assert engine.context_length == engine.server_args.context_length == 40
        with pytest.raises(InvalidRequestError, match="context length of 40"):
            engine.generate(list(range(3, 103)), SamplingParams(max_new_tokens=4))
        assert (
            len(engine.generate([3, 4, 5], SamplingParams(max_new_tokens=4, ignore_eos=True)).output_ids) == 4
        )


def test_a_platform_sets_what_the_user_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that was given is not open, even with the value that it has by default."""
    choose(monkeypatch, "FixedAcmePlatform")
    left, given = (
        with_platform_defaults(ServerArgs("m")),
        ServerArgs("m", page_size=8, chunked_prefill_size=512),
    )
    assert (left.page_size, left.chunked_prefill_size) == (8, 48)
    assert with_platform_defaults(given).chunked_prefill_size == 512


def test_a_value_that_a_platform_cannot_serve_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "FixedAcmePlatform")
    with pytest.raises(
        ConfigError, match=r"page_size=16: platform 'acme' sets page_size=8.*leave page_size out"
    ):
        with_platform_defaults(ServerArgs("m", page_size=16))


def test_what_a_platform_sets_is_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_llama(tmp_path)
    choose(monkeypatch, "WrongAcmePlatform")
    with pytest.raises(ConfigError, match=r"page_size=0.*set by platform 'acme'"):
        Engine(model_path=tmp_path)


def test_a_dead_scheduler_names_the_request_that_killed_it_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llama(tmp_path)
    choose(monkeypatch, "DyingAcmePlatform")
    with Engine(model_path=tmp_path) as engine:
        params = SamplingParams(max_new_tokens=4)
        engine.generate([3, 4, 5], params, rid="harmless")
        message = (
            r"no more than 30 tokens.* at work on request 'too-long'\. Platform 'acme' is a vendor's: "
            r"`sgl-aspects conformance` checks its methods\. Start a new Engine\."
        )
        with pytest.raises(SchedulerDiedError, match=message):
            engine.generate(list(range(3, 60)), params, rid="too-long")


# -- operators ----------------------------------------------------------------------------------------


def sevens(x: torch.Tensor) -> torch.Tensor:
    return torch.full((3, 4), 7.0)


def eights(x: torch.Tensor) -> torch.Tensor:
    return torch.full((3, 4), 8.0)


@pytest.fixture
def fresh_manager() -> Any:
    """The registry without what platforms of other tests have registered."""
    dispatch.reset_manager()
    yield
    dispatch.reset_manager()


@pytest.mark.usefixtures("fresh_manager")
def test_a_registered_forward_is_an_implementation_that_policies_can_choose() -> None:
    set_current_platform(AcmePlatform())
    layer, x = SiluAndMul(), torch.randn(3, 8)
    plain = layer(x)
    Operator.register_oot_forward(SiluAndMul, sevens, "acme")
    assert layer(x).eq(7).all()  # from the next call on
    assert "silu_and_mul → oot.acme.silu_and_mul" in dispatch.get_manager().explain("silu_and_mul")
    with dispatch.with_preference("reference"):
        assert layer(x).equal(plain)
    Operator.register_oot_forward("silu_and_mul", eights, "acme")
    Operator.register_oot_forward(SiluAndMul, sevens, "other")  # of another dispatch key
    assert layer(x).eq(8).all()


@pytest.mark.usefixtures("fresh_manager")
def test_a_forward_of_a_layers_arguments_is_refused_with_those_of_its_operator() -> None:
    def normalized(layer: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return x * layer.weight

    with pytest.raises(OperatorSignatureError, match=r"oot\.acme\.rms_norm.* \(x.*, weight.*, eps.*residual"):
        Operator.register_oot_forward(RMSNorm, normalized, "acme")
    with pytest.raises(OperatorError, match=r"not a layer with an operator; choose one, or .* silu_and_mul"):
        Operator.register_oot_forward("silu", sevens, "acme")


def test_a_method_that_no_layer_calls_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's layers call forward_<key>; layers here call operators."""
    make_llama(tmp_path)
    set_current_platform(AcmePlatform())
    monkeypatch.setattr(SiluAndMul, "forward_acme", lambda self, x: x, raising=False)
    with pytest.raises(PlatformError, match=r"SiluAndMul.forward_acme is never called.*register_oot_forward"):
        ModelRunner(ServerArgs(tmp_path))


# -- quantization -------------------------------------------------------------------------------------


def test_a_platform_names_its_own_quantization(used: Path, tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    args = ServerArgs(tmp_path / "model", max_total_tokens=1024, quantization="acme4")
    run_in_process(args, [[3, 4, 5]], 2)
    assert "quantization acme4" in used.read_text().splitlines()


def test_a_method_that_the_device_cannot_run_is_refused(tmp_path: Path) -> None:
    set_current_platform(AcmePlatform())
    make_llama(tmp_path)
    for method, why in (("gptq", "AcmePlatform.*declares acme4, none4"), ("none4", "names no class for it")):
        with pytest.raises(ConfigError, match=f"quantization='{method}'.*{why}"):
            ModelRunner(ServerArgs(tmp_path, quantization=method))
