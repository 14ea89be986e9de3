"""Makes docs/contracts/README.md: the classes that a platform names, as the code declares them.

python docs/make_contracts.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from sgl_aspects.cli.dataclass_flags import comments_of
from sgl_aspects.platforms import (
    ClockEvent,
    DeviceEvent,
    DeviceGraph,
    DeviceMixin,
    MMPlatform,
    PlatformCapabilities,
    SRTPlatform,
)
from sgl_aspects.runtime.attention.base import Attention, AttentionBackend
from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.core import ForwardBatch
from sgl_aspects.runtime.execution.graph_runner import GraphRunner
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from sgl_aspects.runtime.kv_cache import MHATokenPool, NSATokenPool, PagedAllocator
from sgl_aspects.runtime.ops.quantization import LinearMethod, QuantizationConfig
from sgl_aspects.runtime.server_args import ServerArgs

PAGE = Path(__file__).parent / "contracts" / "README.md"
HEAD = """# Contracts

The classes that [a platform](../platforms.md) names, as the code declares them. `docs/make_contracts.py`
makes this page.
"""
BOTH, EMBEDDED, SGLANG = "both engines", "the embedded engine", "SGLang"
#: The methods of SRTPlatform that only SGLang calls.
ONLY_SGLANG = re.compile("speculative|full_graph|piecewise|mamba|support_device_graph")

#: What a vendor's device sets, in the order of docs/platforms.md.
DEVICE_ATTRIBUTES = (
    "_enum",
    "device_name",
    "device_type",
    "visible_devices_variable",
    "supported_quantization",
)

RUNNER = """`model_runner` has `req_to_token_pool.req_to_token`, int32 [rows, tokens], the slot of each
token of a request, `token_to_kv_pool`, `device`, `dtype` and `page_size`. A class in these names alone runs
in both engines. Batches of mixed steps are extended: a decoding request has one token. SGLang does not call
`forward`. `kinds` are the kinds of pool that the class reads, by default `frozenset({"mha"})`. With "mla"
among them, `q` has `tp_q_head_num` rows of `qk_head_dim = kv_lora_rank + qk_rope_head_dim` for each token,
`k` the one row that the pool keeps and `v` its first `kv_lora_rank` numbers, in both engines and in prompts
too: SGLang, which expands keys and values of prompts for every head, is told to leave them as they are.

For the embedded engine alone: `capturable = True` where a decode step can be captured: what changes from step
to step is read on the device only then (`req_pool_indices`, `seq_lens`); `reads_unwritten_slots = False`
where it never reads a slot before a token is written there, so that pages are not cleared for it.
"""
POOL = """It has `dtype`. `row` is `head_num, head_dim` (kind mha), `kv_lora_rank, qk_rope_head_dim` (mla),
or those with `index_head_dim, kv_cache_dim` (dsa); `end_layer` is the last layer. It has `size + page_size`
slots: the first page is padding. Compressed rows (mla, dsa) are keys of one head, whose first
`kv_lora_rank` numbers are the values. A pool without `clear` begins with zeros. `loc` is int64.

Kind `dsa` has these, too, in the embedded engine; for SGLang derive it from SGLang's `DSATokenToKVPool`:
"""
ALLOCATOR = """The embedded engine passes `device="cpu"`: its scheduler decides on the host. SGLang passes
the pool's device, frees a request's slots without the unused ones of its last page, and uses a platform's
allocator where `--page-size` is more than 1.
"""
GRAPHS = """Called only where the platform's `support_cuda_graph()` is True, the attention backend is
`capturable` and the user did not set `disable_graphs`. The engine's own, for platforms with `create_graph`,
is `sgl_aspects.runtime.execution.graph_runner:GraphRunner`. `batch.forward_mode` is as above. The conformance
kit fails a runner whose `replay` calls the model, or is never called. `model_runner` has `platform`,
`server_args.max_running_requests`, and:
"""
GRAPH_RUNNER = """from functools import partial


class AcmeGraphRunner:
    def __init__(self, model_runner):
        self.runner, self.platform = model_runner, model_runner.platform

    def capture(self):
        self.captured = {}
        for size in range(1, self.runner.server_args.max_running_requests + 1):
            inputs, graph = self.runner.decode_inputs(size), self.platform.create_graph()
            with self.platform.inference_mode():
                self.runner.decode(inputs)  # once before: libraries set themselves up outside the capture
                self.platform.synchronize()
                logits = graph.capture(partial(self.runner.decode, inputs))
            self.captured[size] = inputs, graph, logits

    def can_run(self, batch):
        return batch.forward_mode.is_decode() and batch.batch_size in self.captured

    def replay(self, batch):
        inputs, graph, logits = self.captured[batch.batch_size]
        self.runner.write_decode_inputs(batch, inputs)
        graph.replay()
        return logits
"""


def tables() -> str:
    """Return a section for each class."""
    parts = [
        _table("Attention backend", "get_attention_backends", BOTH, AttentionBackend, made="model_runner"),
        RUNNER,
        _attributes(
            "`layer`",
            Attention(0, 1, 1, 1),
            "tp_q_head_num tp_k_head_num tp_v_head_num head_dim qk_head_dim v_head_dim scaling layer_id",
        ),
        _batch(),
        _table(
            "Key-value pool",
            "get_kv_pool_cls",
            BOTH,
            MHATokenPool,
            "set_kv_buffer get_key_buffer get_value_buffer",
            made=_pool_arguments(),
        ),
        POOL,
        _rows(NSATokenPool, "set_index_key_buffer get_index_key_buffer"),
        "\nOptional, for the embedded engine:\n",
        _rows(MHATokenPool, "clear get_page_buffer split_pages"),
        _table(
            "Allocator",
            "get_paged_allocator_cls",
            BOTH,
            PagedAllocator,
            made="size, page_size, dtype, device, kvcache, need_sort",
        ),
        ALLOCATOR,
        _table("Quantization", "get_quantization_config", BOTH, QuantizationConfig, made=""),
        "What it returns for a layer has:\n",
        _rows(LinearMethod, "process_weights_after_loading apply"),
        _table(
            "Communicator",
            "get_communicator_class",
            EMBEDDED,
            Communicator,
            made="rank, world_size, init_method",
        ),
        _table(
            "Graph runner",
            "get_graph_runner_cls",
            EMBEDDED,
            GraphRunner,
            "capture can_run replay",
            made="model_runner",
        ),
        GRAPHS,
        _rows(ModelRunner, "decode_inputs write_decode_inputs decode"),
        "\nOne that works:\n",
        f"```python\n{GRAPH_RUNNER}```\n",
        _table(
            "Event", "create_event", EMBEDDED, DeviceEvent, "record query synchronize elapsed_ms", made=""
        ),
        f"`ClockEvent` (`sgl_aspects.platforms`): {_first(ClockEvent)}\n",
        _table("Graph", "create_graph", EMBEDDED, DeviceGraph, made=None),
        f"## Device methods\n\nOf `DeviceMixin`, beside `{'`, `'.join(DEVICE_ATTRIBUTES)}`.\n",
        _rows(DeviceMixin, " ".join(_device_methods())),
        _platform(),
        "## MMPlatform\n\nCalled by SGLang's engine for images and video.\n",
        _rows(
            MMPlatform,
            "get_attn_backend_cls_str get_available_attn_backends optimize_vae is_amp_supported "
            "is_float64_supported",
        ),
        _fields("Capabilities", PlatformCapabilities, "."),
        _fields(
            "The embedded engine's settings, in `apply_server_args_defaults(server_args)`",
            ServerArgs,
            ", the names of those that the user left open. What the others mean: `sgl-aspects serve --help`.",
        ),
    ]
    return "\n".join(parts)


def _table(title: str, factory: str, engine: str, cls: type, names: str = "", *, made: str | None) -> str:
    head = f"`{factory}` returns one" if made is None else f"`{factory}` names it;\nmade as `Class({made})`"
    return f"## {title}\n\n{head}. Used by {engine}.\n\n{_rows(cls, names)}"


def _rows(cls: type, names: str) -> str:
    chosen = names.split() or [
        name
        for each in cls.__mro__[::-1]
        for name, value in vars(each).items()
        if inspect.isfunction(value) and not name.startswith("_") and each is not object
    ]
    lines = ["| method | what it does |", "| --- | --- |"]
    for name in dict.fromkeys(chosen):
        method = getattr(cls, name)
        lines.append(f"| `{name}{_signature(method)}` | {_first(method)} |")
    return "\n".join(lines) + "\n"


def _signature(method: Any) -> str:
    signature = inspect.signature(method)
    kept = [each for name, each in signature.parameters.items() if name != "self"]
    text = str(signature.replace(parameters=kept))
    return re.sub(r"'|torch\.(?!device\b)|typing\.", "", text).replace("|", "\\|")


def _first(thing: Any) -> str:
    """Return a docstring as one line of a table."""
    text = inspect.cleandoc(thing.__doc__ or "")
    text = re.sub(r":(?:class|func|data|meth):`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split()).replace("|", "\\|")


def _attributes(what: str, sample: Any, names: str) -> str:
    missing = [name for name in names.split() if not hasattr(sample, name)]
    if missing:
        raise AttributeError(f"{type(sample).__name__} has no {missing}")
    return f"{what} has " + ", ".join(f"`{name}`" for name in names.split()) + ", as SGLang's.\n"


def _batch() -> str:
    comments = comments_of(ForwardBatch)
    names = (
        "forward_mode req_pool_indices seq_lens out_cache_loc positions extend_seq_lens extend_prefix_lens "
        "extend_start_loc extend_seq_lens_cpu extend_prefix_lens_cpu batch_size"
    )
    said = {"forward_mode": "`is_decode()`, `is_extend()`, `is_mixed()`", "batch_size": "requests"}
    lines = ["| `forward_batch.` | |", "| --- | --- |"]
    for name in names.split():
        of_class = getattr(ForwardBatch, name, None)
        text = said.get(name) or comments.get(name) or _first(getattr(of_class, "func", of_class))
        if not text or text == "None":
            text = f"`{name.removesuffix('_cpu')}` as a list"
        lines.append(f"| `{name}` | {text.replace('``', '`')} |")
    return "\n".join(lines) + "\n"


def _pool_arguments() -> str:
    return "*, size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer, **row"


def _device_methods() -> list[str]:
    """Return the operations of a device: what a vendor writes, without the queries of its family."""
    functions = [name for name, value in vars(DeviceMixin).items() if inspect.isfunction(value)]
    missing = [name for name in DEVICE_ATTRIBUTES if not hasattr(DeviceMixin, name)]
    if missing:
        raise AttributeError(f"DeviceMixin has no {missing}")
    return [name for name in functions[functions.index("device_count") :] if not name.startswith("_")]


def _platform() -> str:
    lines = ["## Platform methods\n", "| method | what it does | called by |", "| --- | --- | --- |"]
    for name, method in vars(SRTPlatform).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            engine = SGLANG if ONLY_SGLANG.search(name) else BOTH
            lines.append(f"| `{name}{_signature(method)}` | {_first(method)} | {engine} |")
    return "\n".join(lines) + "\n"


def _fields(title: str, cls: type[Any], after: str) -> str:
    """List fields with their defaults."""
    named = [
        f"`{field.name}`" if field.default is dataclasses.MISSING else f"`{field.name}={field.default!r}`"
        for field in dataclasses.fields(cls)
    ]
    text = textwrap.fill(", ".join(named) + after, 120, break_long_words=False, break_on_hyphens=False)
    return f"## {title}\n\n{text}\n"


def page() -> str:
    """Return the page as the code is now."""
    return f"{HEAD}\n{tables()}"


if __name__ == "__main__":
    PAGE.write_text(page())
