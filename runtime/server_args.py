"""ServerArgs: everything that a user may choose about an engine."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sgl_aspects.errors import ConfigError, PlatformTypeError
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.answers import answer_of, name_of
from sgl_aspects.runtime.checks import check_integer, is_number, is_seed

DTYPES = ("auto", "float32", "bfloat16", "float16")

logger = logging.getLogger(__name__)


@dataclass
class ServerArgs:
    """The settings of one engine. A bad value is a ConfigError when the object is made.

    None means: decided when the model and the device are known. Lengths and sizes are in tokens.
    """

    #: A Hugging Face folder, a GGUF file, or a folder that holds exactly one GGUF file.
    model_path: str | os.PathLike[str]
    #: The model's name in requests and traces; by default the last part of the path.
    served_model_name: str | None = None
    #: "auto" is the checkpoint's own type; float32 for GGUF, whose tensors are of many types.
    dtype: str = "auto"
    #: Limit for prompt and output together; by default the model's.
    context_length: int | None = None
    #: Tokens in one page of the key-value cache.
    page_size: int = 16
    #: Tokens that the key-value cache holds; by default what ``mem_fraction`` of the free memory holds.
    max_total_tokens: int | None = None
    #: Share of the memory that is free after loading which the key-value cache may take.
    mem_fraction: float = 0.5
    #: Requests that are computed at the same time; more wait.
    max_running_requests: int = 32
    #: Requests that may wait beside them; one more is refused. None: any number.
    max_queued_requests: int | None = None
    #: Keep what requests have computed, for later ones that begin with the same tokens.
    prefix_cache: bool = True
    #: A request is added while this number of tokens stays free for each running request. With less, more run
    #: at once, and more are preempted and recomputed.
    decode_reserve: int = 64
    #: Prompt tokens computed in one step; longer prompts are cut into such chunks.
    chunked_prefill_size: int = 512
    #: Makes sampling without a seed of its own repeatable from one start to the next.
    random_seed: int | None = None
    attention_backend: str | None = None
    #: Devices that share the model: each has a part of every layer's weights, and a scheduler process.
    tp_size: int = 1
    #: True: no graphs, also where the platform has them. They cost seconds at the start, and some memory.
    disable_graphs: bool = False
    #: True: a step is scheduled when the previous one is done, even if the device could work meanwhile.
    disable_overlap: bool = False
    #: A method of the platform's for the weights of linears: see ``get_quantization_config``.
    quantization: str | None = None
    #: True: layers are compiled, where the platform can. The first steps take much longer.
    compile: bool = False
    #: Mode of the platform's compiler, in its own words: see ``get_compile_backend``.
    compile_mode: str | None = None
    #: Seconds to wait for the scheduler process to load the model.
    startup_timeout: float = 600.0

    #: The fields that were not given: the current platform may set them.
    open_fields: set[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, *values: Any, **named: Any) -> ServerArgs:
        made = super().__new__(cls)
        names = _names(cls)
        made.open_fields = {*names[len(values) :]} - named.keys()
        return made

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """ConfigError for a value that is bad in itself."""
        if not isinstance(self.model_path, (str, os.PathLike)) or not str(self.model_path):
            raise ConfigError(
                f"model_path={self.model_path!r}: give a Hugging Face folder or a GGUF file as a path"
            )
        self.model_path = str(self.model_path)
        if self.served_model_name is None:
            self.served_model_name = Path(os.path.expanduser(self.model_path)).resolve().name
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        for name in ("page_size", "max_running_requests", "chunked_prefill_size", "tp_size"):
            check_integer(ConfigError, self, name, 1)
        for name in ("context_length", "max_total_tokens", "max_queued_requests"):
            if getattr(self, name) is not None:
                check_integer(ConfigError, self, name, 1)
        check_integer(ConfigError, self, "decode_reserve", 0)
        for name in ("prefix_cache", "disable_graphs", "disable_overlap", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: write True or False")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"max_total_tokens={self.max_total_tokens} is less than one page of {self.page_size} tokens: "
                "raise it, or lower page_size"
            )
        if not is_number(self.mem_fraction) or not 0 < self.mem_fraction < 1:
            raise ConfigError(f"mem_fraction={self.mem_fraction!r}: write a share between 0 and 1")
        if not is_number(self.startup_timeout) or not self.startup_timeout > 0:
            raise ConfigError(f"startup_timeout={self.startup_timeout!r}: write a number of seconds above 0")
        if self.random_seed is not None and not is_seed(self.random_seed):
            raise ConfigError(f"random_seed={self.random_seed!r}: write a whole number of 64 bits, or None")


def with_platform_defaults(given: ServerArgs) -> ServerArgs:
    """Return a copy in which the current platform has set open fields.

    Made once, where an engine starts, and passed to each of its processes: all use the same values.
    ConfigError if the platform sets a field that was given to another value.
    """
    args = copy.copy(given)
    answer = answer_of(object, current_platform.apply_server_args_defaults, args)
    if answer is not None and answer is not args:
        raise PlatformTypeError(
            f"{name_of(current_platform.apply_server_args_defaults)} returned {answer!r}: it sets the "
            f"attributes of its argument, and returns None"
        )
    unknown = sorted(vars(args).keys() - vars(given).keys())
    if unknown:
        known, platform = ", ".join(_names(ServerArgs)), current_platform.device_name
        logger.warning(
            "platform %r set %s, which this engine does not have; it has %s", platform, unknown, known
        )
    for name in _names(ServerArgs):
        wanted, set_to = getattr(given, name), getattr(args, name)
        if set_to != wanted and name not in given.open_fields:
            raise ConfigError(
                f"{name}={wanted!r}: platform {current_platform.device_name!r} sets {name}={set_to!r} "
                f"({name_of(current_platform.apply_server_args_defaults)}): leave {name} out, or give that"
            )
    try:
        args.check()
    except ConfigError as error:
        raise ConfigError(f"{error} (set by platform {current_platform.device_name!r})") from error
    return args


def _names(cls: type[ServerArgs]) -> list[str]:
    return [each.name for each in fields(cls) if each.init]
