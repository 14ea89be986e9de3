"""Wrong platform classes: each is one error that names the class, the method and what is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError, EngineError, PlatformError, PlatformTypeError
from sgl_aspects.platforms import PlatformCapabilities, current_platform, set_current_platform
from sgl_aspects.runtime import Engine
from sgl_aspects.runtime.attention.torch_native import TorchNativeBackend
from sgl_aspects.runtime.communicator import make_communicator
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl, get_manager, reset_manager
from sgl_aspects.runtime.dispatch.configuration import find_platform_file
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from sgl_aspects.runtime.server_args import ServerArgs, with_platform_defaults
from tests.support.acme import AcmePlatform, HighPagesFirst, MHATokenToKVPool
from tests.support.tiny_models import llama_fixture

pytestmark = pytest.mark.usefixtures("forked_schedulers")


class PanicException(BaseException):
    """As extensions written in Rust raise."""


def panics(self: Any, *args: Any) -> Any:
    raise PanicException("the driver is gone")


def exits(self: Any, *args: Any) -> Any:
    sys.exit(3)


class Hostile(AcmePlatform):
    """Replaced by each test with a class that has one fault."""


class HalfPool:
    def set_kv_buffer(self) -> None: ...


class FlatPool(MHATokenToKVPool):
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return super().get_key_buffer(layer_id).flatten(1)


class NoBuffers(MHATokenToKVPool):
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise AttributeError("k_buffers")


class Pages:
    """An allocator of pages, made with two arguments."""

    def __init__(self, size: int, page_size: int) -> None: ...

    available_size = alloc = free = clear = __init__


class PageList(HighPagesFirst):
    def alloc(self, need_size: int) -> Any:
        return [1]


class PaddingFirst(HighPagesFirst):
    def alloc(self, need_size: int) -> torch.Tensor | None:
        return torch.arange(need_size)


class Leaks(HighPagesFirst):
    def free(self, free_index: torch.Tensor) -> None: ...


class Backend(TorchNativeBackend):
    capturable = True


model = llama_fixture()


def choose(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    for name, member in members.items():
        if callable(member) and not isinstance(member, type):
            member.__name__ = name
    monkeypatch.setitem(globals(), "Hostile", type("Hostile", (AcmePlatform,), members))
    Hostile.__module__ = __name__
    monkeypatch.setenv("SGLANG_PLATFORM", f"acme={__name__}:Hostile")
    set_current_platform(None)


@pytest.mark.parametrize(
    ("members", "part"),
    [
        ({"get_device": 5}, "get_device = 5, and a method is needed"),
        ({"get_device": lambda self: None}, r"get_device\(\) cannot be called as engines do: too many"),
        ({"post_load_model": lambda self, a, b: None}, r"post_load_model\(a, b\) cannot .*argument: 'b'"),
        (
            {"get_kv_pool_cls": lambda self: dict},
            r"argument 'kind'. Write it as get_kv_pool_cls\(self, kind:",
        ),
        ({"device_name": "acme\x1b[31m"}, r"device_name = 'acme\\x1b\[31m', and a name that can be printed"),
        ({"device_name": " "}, "device_name = ' ', and a name that can be printed"),
        ({"__init__": panics}, "failed while it was created: PanicException: the driver is gone"),
    ],
)
def test_a_class_of_the_wrong_shape_is_refused_when_it_is_chosen(
    members: dict[str, Any], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, **members)
    with pytest.raises(PlatformError, match=f"test_hostile:Hostile of SGLANG_PLATFORM=acme=.*{part}"):
        current_platform.is_cuda()


def test_more_arguments_than_engines_give_are_allowed_with_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, get_device=lambda self, local_rank, of=None: torch.device("cpu"), post=3)
    assert current_platform.get_device(0).type == "cpu"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("apply_worker_patches", "init_backend"),
        ("initialize_device", "init_backend"),
        ("create_kv_pool", "get_kv_pool_cls"),
        ("get_device_communicator_cls", "get_communicator_class"),
        ("get_dispatch_key", "get_dispatch_key_name"),
        ("get_kv_pool", "get_kv_pool_cls"),
        ("support_cuda_graphs", "support_cuda_graph"),
        ("visible_device_variable", "visible_devices_variable"),
    ],
)
def test_what_no_engine_calls_is_reported_with_the_right_name(
    name: str, right: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(monkeypatch, **{name: lambda self: None, "helper_of_acme": lambda self: None})
    assert current_platform.device_name == "acme"
    assert f"Hostile of SGLANG_PLATFORM=acme={__name__}:Hostile: no engine calls {name}: write {right}" in (
        caplog.text
    )
    assert "helper_of_acme" not in caplog.text


def test_the_newer_methods_of_sglang_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(
        monkeypatch,
        get_default_speculative_draft_attention_backend=lambda self, algorithm: "acme",
        support_mamba_cache_extra_buffer=lambda self: True,
        get_full_graph_backend_cls=lambda self: None,
        is_sail=lambda self: True,
        get_speculative_graph_runner_cls=lambda self, algorithm, phase: None,
    )
    assert current_platform.support_mamba_cache_extra_buffer()
    assert caplog.text == ""


def test_a_compiled_method_without_a_signature_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hostile, "is_cuda_alike", int)  # a class of C, whose signature is unknown
    monkeypatch.setenv("SGLANG_PLATFORM", f"acme={__name__}:Hostile")
    set_current_platform(None)
    assert current_platform.device_name


@pytest.mark.parametrize(
    ("method", "answer", "part"),
    [
        ("get_device", "cpu", "returned 'cpu', and torch.device is needed"),
        ("get_available_memory", 10**9, "returned 1000000000, and tuple or list is needed"),
        ("get_default_attention_backend", None, "returned None, and str is needed"),
        ("get_default_attention_backend", "flashy", "='flashy': choose one of torch_native, triton"),
        ("get_attention_backends", ["acme"], r"returned \['acme'\], and collections.abc.Mapping is needed"),
        ("get_attention_backends", {"torch_native": 5}, ": 5 is neither a class nor a qualified class name"),
        (
            "get_attention_backends",
            {"torch_native": dict},
            "names builtins:dict, which has no init_forward_metadata, forward",
        ),
        (
            "get_attention_backends",
            {"torch_native": type("Undone", (Backend,), {"forward": None})},
            "which has no forward: such a class has init_forward_metadata, forward",
        ),
        ("get_kv_pool_cls", None, ": None is neither a class nor a qualified class name"),
        ("get_kv_pool_cls", "acme:Pool", ": 'acme:Pool' cannot be loaded: ModuleNotFoundError"),
        (
            "get_kv_pool_cls",
            HalfPool,
            "HalfPool, which has no get_key_buffer, get_value_buffer: such a class",
        ),
        ("get_paged_allocator_cls", dict, "names builtins:dict, which has no available_size, alloc, free"),
        (
            "get_paged_allocator_cls",
            Pages,
            "Pages, which cannot be made as engines do, with int, page_size, ",
        ),
        ("get_paged_allocator_cls", PageList, r"PageList, whose alloc\(16\) returned \[1\], and a tensor of"),
        ("get_paged_allocator_cls", PaddingFirst, r"PaddingFirst, whose alloc\(16\) returned slots \[0, 1, "),
        ("get_paged_allocator_cls", Leaks, r"Leaks, whose available_size\(\) returned 496 after free"),
        ("get_kv_pool_cls", FlatPool, r"FlatPool, whose get_key_buffer\(0\) is \(528, \d+\), .* needed"),
        ("get_kv_pool_cls", NoBuffers, r"NoBuffers, whose get_key_buffer\(0\) failed: AttributeError"),
        ("get_dispatch_key_name", None, "returned None, and str is needed"),
        ("get_dispatch_key_name", "my key", "returned 'my key', which names implementations of operators"),
        ("get_graph_runner_cls", dict, "names builtins:dict, which has no capture, can_run, replay"),
    ],
)
def test_a_wrong_answer_names_the_method_before_the_first_request(
    method: str, answer: Any, part: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {
        "capabilities": PlatformCapabilities(graph_capture=True),
        "get_attention_backends": lambda self: {"torch_native": Backend},
        method: lambda self, *args, **kwargs: answer,
    }
    choose(monkeypatch, **members)
    with pytest.raises((PlatformError, ConfigError), match=rf"test_hostile\.Hostile\.{method}\(\).*{part}"):
        ModelRunner(ServerArgs(model, max_total_tokens=512))


@pytest.mark.parametrize("fails", [panics, exits])
@pytest.mark.parametrize("method", ["init_backend", "get_device", "set_device", "post_load_model"])
def test_a_method_that_ends_the_process_is_an_error_that_names_it(
    method: str, fails: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, **{method: fails})
    with pytest.raises(PlatformError, match=rf"Hostile\.{method}\(\) failed: (PanicException|SystemExit): "):
        ModelRunner(ServerArgs(model, max_total_tokens=512))


def test_it_is_named_too_while_operators_are_chosen_anew_by_their_tensors(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = get_manager()

    def register(self: Any) -> None:
        manager.site("linear")
        impl = OpImpl(
            "linear", "of.float", ImplKind.DEFAULT, F.linear, supported_dtypes=frozenset({torch.float32})
        )
        manager.registry.register(impl, replace=True)

    choose(monkeypatch, init_backend=register, get_device=exits)
    with pytest.raises(PlatformError, match=r"Hostile\.get_device\(\) failed: SystemExit: 3"):
        ModelRunner(ServerArgs(model, max_total_tokens=512))
    reset_manager()


def test_events_and_communicators_are_checked_before_they_are_needed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, is_asynchronous=lambda self: True, create_event=lambda self: 5)
    with pytest.raises(PlatformTypeError, match=r"Hostile\.create_event\(\) returned 5, and .*DeviceEvent"):
        ModelRunner(ServerArgs(model, max_total_tokens=512))
    choose(monkeypatch, get_communicator_class=lambda self: dict)
    with pytest.raises(PlatformTypeError, match=r"Hostile\.get_communicator_class\(\).* has no all_reduce"):
        make_communicator(0, 2, "")


def test_a_configuration_that_is_not_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, get_operator_config=lambda self: 5)
    with pytest.raises(
        PlatformTypeError, match=r"get_operator_config\(\) returned 5, and str or os.PathLike"
    ):
        find_platform_file()


def test_settings_that_a_platform_returns_instead_of_setting_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, apply_server_args_defaults=lambda self, args: ServerArgs("other"))
    with pytest.raises(
        PlatformTypeError, match=r"returned ServerArgs.*: it sets the attributes of its argument"
    ):
        with_platform_defaults(ServerArgs(model))
    choose(monkeypatch, apply_server_args_defaults=exits)
    with pytest.raises(PlatformError, match=r"apply_server_args_defaults.* failed: SystemExit: 3"):
        Engine(model_path=model)


def test_the_kit_and_the_list_of_platforms_name_what_ends_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, get_device_name=exits, get_device_uuid=panics)
    assert main(["conformance", "--only", "identity"]) == 1
    shown = capsys.readouterr().out
    assert "unknown, sgl-aspects" in shown
    assert "SystemExit: 3 (test_hostile.py:" in shown
    assert "PanicException: the driver is gone (test_hostile.py:" in shown
    assert "5 passed, 2 failed" in shown
    assert main(["platforms"]) == 0
    assert "devices     failed: SystemExit: 3" in capsys.readouterr().out


def test_settings_that_an_engine_does_not_have_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(monkeypatch, apply_server_args_defaults=lambda self, args: setattr(args, "page_sise", 16))
    with_platform_defaults(ServerArgs(model))
    assert "platform 'acme' set ['page_sise'], which this engine does not have; it has model" in caplog.text


class Exits(AcmePlatform):
    """Ends the scheduler where nothing is expected to."""

    def inference_mode(self) -> Any:
        sys.exit(3)


def test_a_scheduler_that_a_platform_ends_says_where(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", f"acme={__name__}:Exits")
    set_current_platform(None)
    with pytest.raises(EngineError, match=r"SystemExit: 3 \(test_hostile.py:\d+, in inference_mode\)"):
        Engine(model_path=model, max_total_tokens=512)


class Fails(AcmePlatform):
    """Its driver is absent where a worker starts."""

    def init_backend(self) -> None:
        raise OSError("driver lost")


def test_the_lines_of_a_method_that_fails_are_logged(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", f"acme={__name__}:Fails")
    set_current_platform(None)
    with pytest.raises(PlatformError, match=r"Fails\.init_backend\(\) failed: OSError: driver lost"):
        Engine(model_path=model, max_total_tokens=512)
    assert 'raise OSError("driver lost")' in caplog.text
