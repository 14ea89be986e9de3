"""SGLang's settings after those of a platform, against fakes of SGLang's classes."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.cpu import CpuPlatform
from tests.support.sglang_interfaces import NEW, bridge
from tests.support.stand_ins import Engine

SERVER_ARGS = """
    import dataclasses
    @dataclasses.dataclass
    class ServerArgs:
        attention_backend: str | None = None
        page_size: int | None = None
        chunked_prefill_size: int = 512
        hooks: list = dataclasses.field(default_factory=list)
    """


class Acme(CpuPlatform):
    device_name = "acme"


def test_a_vendors_attention_comes_before_the_one_that_sglang_chooses_for_cpus(engine: Engine) -> None:
    class Own(Acme):
        def get_default_attention_backend(self) -> str:
            return "acme"

    def chosen(platform: type[SRTPlatform], given: str | None, present: str | None) -> object:
        return defaults(engine, platform, {"attention_backend": given}, attention_backend=present)[
            "attention_backend"
        ]

    assert chosen(Own, None, "intel_amx") == chosen(Own, None, None) == "acme"
    assert chosen(Own, "torch_native", "torch_native") == "torch_native", "the user's choice"
    assert chosen(CpuPlatform, None, "intel_amx") == "intel_amx"
    old = defaults(engine, Own, None, attention_backend="intel_amx")
    assert old["attention_backend"] == "acme", "versions that keep no record of what the user gave"


def defaults(
    engine: Engine, platform: type[SRTPlatform], given: dict[str, Any] | None, **present: Any
) -> dict[str, Any]:
    """SGLang's settings after the platform's; ``given`` by the user, ``present`` by SGLang."""
    engine.write("sglang/srt/server_args.py", SERVER_ARGS)
    cls = engine.load("sglang.srt.server_args").ServerArgs
    args = cls(**{**(given or {}), **present})
    if given is not None:
        args._raw_input = vars(cls(**given)).copy()
    bridge(engine, NEW, platform).apply_server_args_defaults(args)
    return {name: value for name, value in vars(args).items() if name != "_raw_input"}


class Pages32(Acme):
    """Serves pages of 32 tokens alone, and prefers short chunks and a hook of its own."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.page_size = 32
        for name, value in (("chunked_prefill_size", 48), ("hooks", ["acme"])):
            if name in server_args.open_fields:
                setattr(server_args, name, value)


def test_a_platform_sets_what_the_user_left_open(engine: Engine) -> None:
    preferred = {"page_size": 32, "chunked_prefill_size": 48, "hooks": ["acme"], "attention_backend": None}
    assert defaults(engine, Pages32, {}) == preferred
    own = {"page_size": 32, "chunked_prefill_size": 256, "hooks": ["mine"]}
    assert defaults(engine, Pages32, own) == {**own, "attention_backend": None}
    decided = defaults(engine, Pages32, {}, page_size=1)
    assert decided["page_size"] == 32, "what SGLang has decided is open"


def test_a_setting_that_a_platform_cannot_serve_is_an_error_with_both_names(engine: Engine) -> None:
    wanted = r"^page_size=16: platform 'acme' sets page_size=32 \(.*Pages32\.apply_server_args_defaults"
    with pytest.raises(ConfigError, match=rf"{wanted}\(\)\): leave --page-size out, or give that"):
        defaults(engine, Pages32, {"page_size": 16})


def test_a_setting_that_sglang_does_not_have_is_named(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Misspelt(Acme):
        def apply_server_args_defaults(self, server_args: Any) -> None:
            server_args.page_sise = 32

    defaults(engine, Misspelt, {})
    assert "platform 'acme' set 'page_sise', which SGLang's ServerArgs does not have" in caplog.text
