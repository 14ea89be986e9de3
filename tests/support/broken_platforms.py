"""The loopback platform, broken: each class has one fault, named in its docstring."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from loopback_platform import streams
from loopback_platform.attention import LoopbackAttention
from loopback_platform.graph import LoopbackGraph
from loopback_platform.kv_pool import LoopbackTokenPool
from loopback_platform.operators import rms_norm
from loopback_platform.platform import LoopbackPlatform
from loopback_platform.streams import LoopbackEvent, LoopbackStream

from sgl_aspects.platforms import DeviceEvent, DeviceGraph, PlatformEnum
from sgl_aspects.runtime.kv_cache import MLATokenPool, NSATokenPool, PagedAllocator
from sgl_aspects.runtime.ops import Operator, RMSNorm, SiluAndMul

#: Each fault, and the checks that find it, of the groups that need no other process.
FAULTS: dict[type[LoopbackPlatform], set[str]] = {}
#: A pool that is wrong shows in attention too: here the checks of pools alone.
POOL_FAULTS: dict[type[LoopbackPlatform], set[str]] = {}
#: A platform that generates wrong tokens does so with quantized weights, too.
_WRITES = {"kv_pools.write", "kv_pools.clear"}
_Class = TypeVar("_Class", bound=type[LoopbackPlatform])


def found_by(
    *checks: str, among: dict[type[LoopbackPlatform], set[str]] = FAULTS
) -> Callable[[_Class], _Class]:
    """Enter the decorated class into a table of faults."""

    def enter(fault: _Class) -> _Class:
        among[fault] = set(checks)
        return fault

    return enter


class Broken(LoopbackPlatform):
    """The loopback platform, whose parts a fault replaces by name."""

    Event: type[DeviceEvent] = LoopbackEvent
    Graph: type[DeviceGraph] = LoopbackGraph
    Attention: type = LoopbackAttention
    Allocator: type = PagedAllocator
    TokenPool: type = LoopbackTokenPool
    LatentPool: type = MLATokenPool
    IndexPool: type = NSATokenPool

    def create_event(self) -> DeviceEvent:
        return self.Event()

    def create_graph(self) -> DeviceGraph:
        return self.Graph()

    def get_attention_backends(self) -> dict[str, type | str]:
        return {"loopback": self.Attention}

    def get_paged_allocator_cls(self) -> type | str:
        return self.Allocator

    def get_mha_kv_pool_cls(self) -> type | str:
        return self.TokenPool

    def get_mla_kv_pool_cls(self) -> type | str:
        return self.LatentPool

    def get_nsa_kv_pool_cls(self) -> type | str:
        return self.IndexPool


@found_by("identity.family")
class NoFamily(Broken):
    """Has no identity."""

    _enum = PlatformEnum.UNSPECIFIED


@found_by("identity.names")
class NoName(Broken):
    """Has no product name."""

    def get_device_name(self, device_id: int = 0) -> str:
        return ""


@found_by("identity.uuid")
class OtherUuid(Broken):
    """Makes a new identifier each time."""

    _count = itertools.count()

    def get_device_uuid(self, device_id: int = 0) -> str:
        return str(next(self._count))


@found_by("identity.classes", "kv_pools.shape", "kv_pools.allocator", *_WRITES, among=POOL_FAULTS)
class NoSuchPool(Broken):
    """Names a class that does not exist."""

    def get_mha_kv_pool_cls(self) -> type | str:
        return "loopback_platform.kv_pool:TokenPool"


@found_by("setup.device")
class NoDevice(Broken):
    """Its driver fails."""

    def get_device(self, local_rank: int) -> torch.device:
        raise OSError("driver not loaded")


@found_by("operations.inference_mode")
class RecordsGradients(Broken):
    """inference_mode does nothing."""

    def inference_mode(self) -> AbstractContextManager[Any]:
        return nullcontext()


@found_by("operations.reindex")
class LeavesVariable(Broken):
    """Does not restore the variable."""

    def reindex_device_id(self, device_id: int) -> AbstractContextManager[int]:
        os.environ["LOOPBACK_VISIBLE_DEVICES"] = str(device_id)
        return nullcontext(0)


@found_by("operations.quantization")
class AcceptsQuantization(Broken):
    """Accepts a quantization that it cannot run."""

    def verify_quantization(self, quant: str) -> None:
        return None


@found_by("operations.streams")
class StaysOnStream(Broken):
    """Does not go back to the stream before."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        streams._current.stream = stream
        return nullcontext()


# -- events -----------------------------------------------------------------------------------------------


@found_by("events.reached", "events.synchronize", "events.elapsed", "events.again")
class EventNotRecorded(Broken):
    """record() does nothing."""

    class Event(LoopbackEvent):
        def record(self, stream: LoopbackStream | None = None) -> None:
            return None

        def synchronize(self) -> None:
            return None


@found_by("events.elapsed")
class EventInSeconds(Broken):
    """Seconds for milliseconds."""

    class Event(LoopbackEvent):
        def elapsed_ms(self, end: DeviceEvent) -> float:
            return super().elapsed_ms(end) / 1e3


@found_by("events.unrecorded")
class EventAlwaysReached(Broken):
    """An event that was not recorded reports that it is reached, as torch's do."""

    class Event(LoopbackEvent):
        def query(self) -> bool:
            return self._mark is None or super().query()


@found_by("events.again")
class EventKeepsFirst(Broken):
    """Recording again changes nothing."""

    class Event(LoopbackEvent):
        def record(self, stream: LoopbackStream | None = None) -> None:
            if self._mark is None:
                super().record(stream)


@found_by("events.synchronize", "events.elapsed", "events.again")
class DoesNotWait(Broken):
    """synchronize returns at once, before the stream is done."""

    def synchronize(self) -> None:
        return None

    def create_event(self) -> DeviceEvent:
        streams.current_stream().submit(lambda: __import__("time").sleep(0.002))
        return LoopbackEvent()


# -- operators --------------------------------------------------------------------------------------------


@found_by("operators.rms_norm_residual")
class ForgetsResidual(Broken):
    """Normalizes x, not x + residual."""

    def init_backend(self) -> None:
        def forgetful(
            x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
        ) -> Any:
            normed = rms_norm(x, weight, eps)
            return normed if residual is None else (normed, x + residual)

        Operator.register_oot_forward(RMSNorm, forgetful, "forgetful")

    def get_dispatch_key_name(self) -> str:
        return "forgetful"


@found_by("operators.silu_and_mul")
class WritesInput(Broken):
    """Its activation writes over its input."""

    def init_backend(self) -> None:
        def overwriting(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1)
            gate.copy_(torch.nn.functional.silu(gate))
            return gate * up

        Operator.register_oot_forward(SiluAndMul, overwriting, "overwriting")

    def get_dispatch_key_name(self) -> str:
        return "overwriting"


# -- pools ------------------------------------------------------------------------------------------------


@found_by("kv_pools.shape", "kv_pools.allocator", *_WRITES, among=POOL_FAULTS)
class WrongType(Broken):
    """Keeps everything as float16."""

    class TokenPool(LoopbackTokenPool):
        def __init__(self, *, dtype: torch.dtype, **kwargs: Any) -> None:
            super().__init__(dtype=torch.float16, **kwargs)
            self.dtype = dtype


@found_by("kv_pools.write", among=POOL_FAULTS)
class NextSlot(Broken):
    """Writes one slot too far."""

    class TokenPool(LoopbackTokenPool):
        def set_kv_buffer(
            self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
        ) -> None:
            super().set_kv_buffer(layer, loc + 1, cache_k, cache_v)


@found_by("kv_pools.mla", among=POOL_FAULTS)
class ForgetsRotaryKey(Broken):
    """Its compressed rows lack the rotary part."""

    class LatentPool(MLATokenPool):
        def set_kv_buffer(
            self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
        ) -> None:
            rotary = torch.zeros_like(cache_k[..., self.kv_lora_rank :])
            super().set_kv_buffer(layer, loc, torch.cat((cache_v, rotary), -1), cache_v)


@found_by("kv_pools.dsa", among=POOL_FAULTS)
class KeepsIndexKeys(Broken):
    """Leaves the indexer's keys of the request before."""

    class IndexPool(NSATokenPool):
        def clear(self, pages: list[int]) -> None:
            kept = [rows[:, self.index_start :].clone() for rows in self.rows]
            super().clear(pages)
            for rows, old in zip(self.rows, kept):
                rows[:, self.index_start :] = old


@found_by("kv_pools.clear")
class NextPage(Broken):
    """Clears the page after."""

    class TokenPool(LoopbackTokenPool):
        def clear(self, pages: list[int]) -> None:
            super().clear([page + 1 for page in pages])


@found_by(*_WRITES, among=POOL_FAULTS)
class Copies(Broken):
    """Gives copies of its buffers."""

    class TokenPool(LoopbackTokenPool):
        def get_value_buffer(self, layer_id: int) -> torch.Tensor:
            return super().get_value_buffer(layer_id).clone()


@found_by("kv_pools.allocator", "graphs.decode_steps", "capabilities.compiled")
class PageZero(Broken):
    """Hands out page 0, the padding."""

    class Allocator(PagedAllocator):
        def clear(self) -> None:
            super().clear()
            self._free = [page - 1 for page in self._free]


# -- attention --------------------------------------------------------------------------------------------


@found_by(*(f"attention.{name}" for name in ("decode", "chunks", "prompts", "mixed")), "graphs.decode_steps")
class ReadsPadding(Broken):
    """Attends over the rest of the last page too."""

    class Attention(LoopbackAttention):
        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            size = self.req_to_token_pool.page_size
            # Whole pages, including unused slots.
            if forward_batch.forward_mode.is_decode():
                self._seen = torch.cat((self._seen[:, :1].expand(-1, size), self._seen), 1)[:, :-size]
                return
            table = self.req_to_token_pool.req_to_token
            rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.lengths)
            self._prompts = [table[row, : -(-length // size) * size] for row, length in rows]


@found_by("attention.decode")
class WrongScale(Broken):
    """Decodes with a scale that is 5 % off."""

    class Attention(LoopbackAttention):
        def forward_decode(self, q: torch.Tensor, *others: Any) -> torch.Tensor:
            return super().forward_decode(q * 1.05, *others)


# -- graphs -----------------------------------------------------------------------------------------------


@found_by("graphs.replay", "graphs.decode_steps")
class ReplaysNothing(Broken):
    """A replay that computes nothing."""

    class Graph(LoopbackGraph):
        def replay(self) -> None:
            return None


@found_by("graphs.memory")
class ReplayAllocates(Broken):
    """Keeps the memory of every replay."""

    class Graph(LoopbackGraph):
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def replay(self) -> None:
            self.kept.append(self._work())
            super().replay()


@found_by("graphs.capturing")
class CapturesInSecret(Broken):
    """Does not report that it captures."""

    def is_capturing(self) -> bool:
        return False


@found_by(*(f"graphs.{name}" for name in ("replay", "capturing", "memory", "decode_steps")))
class GraphsDeclaredOnly(Broken):
    """Declares graphs, and has none."""

    def support_cuda_graph(self) -> bool:
        return True

    def create_graph(self) -> DeviceGraph:
        self._not_implemented("create_graph")

    def get_graph_runner_cls(self) -> type | str:
        return dict


@found_by("graphs.decode_steps")
class CapturesHostSizes(Broken):
    """Declares that its attention can be captured, but takes lengths from the host."""

    class Attention(LoopbackAttention):
        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            if forward_batch.forward_mode.is_decode():  # the host's value at capture stays in the graph
                positions = torch.arange(self._seen.shape[1])
                self._seen = positions < torch.tensor(forward_batch.lengths)[:, None]


@found_by("graphs.decode_steps")
class NothingToCapture(Broken):
    """Declares graphs, and its attention cannot be captured."""

    class Attention(LoopbackAttention):
        capturable = False


# -- capabilities -----------------------------------------------------------------------------------------


@found_by("capabilities.triton")
class DeclaresTriton(Broken):
    """Triton does not compile for it."""

    capabilities = dataclasses.replace(LoopbackPlatform.capabilities, supports_triton=True)


@found_by("capabilities.compiled")
class NoSuchCompiler(Broken):
    """Names a compiler that does not exist."""

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "no_such_compiler"


# -- seeds, and what only processes of their own show -----------------------------------------------------


@found_by("operations.seed")
class ForgetsSeed(Broken):
    """Seeds nothing."""

    def seed_everything(self, seed: int | None = None) -> None:
        return None


class ManyFaults(NextSlot):
    """Memory in KiB, a peak that falls, half the total, no such backend, and writes one slot too far."""

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        free, total = super().get_available_memory(device_id)
        return free // 1024, total // 1024

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        free, total = super().get_available_memory()
        return float(total - free)

    def get_torch_distributed_backend_str(self) -> str:
        return "no_such_backend"
