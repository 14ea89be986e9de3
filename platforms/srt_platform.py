"""SRTPlatform: what a text engine needs from its platform, beyond the device itself.

Factories may return a class or its qualified name, ``"pkg.mod:Cls"``: a name costs no import before it is
needed (:func:`sgl_aspects.platforms.resolve_qualified_name` turns either into the class).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.identity import PlatformCapabilities

if TYPE_CHECKING:
    import torch


class SRTPlatform(DeviceMixin):
    """The base of every platform that serves text. Conservative: no capability unless it is declared."""

    capabilities: ClassVar[PlatformCapabilities] = PlatformCapabilities()

    # -- configuration and lifecycle -----------------------------------------------------------------

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the values left open in ``server_args``, before the engine reads it."""

    def init_backend(self) -> None:
        """Called once in each worker process, before the first tensor is made. Nothing by default."""

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Called once the weights are on the device, for repacking and the like. Nothing by default."""

    # -- attention -----------------------------------------------------------------------------------

    def get_default_attention_backend(self) -> str:
        """The attention backend used unless the user chooses one."""
        self._not_implemented("get_default_attention_backend")

    def get_attention_backends(self) -> dict[str, type | str]:
        """Attention backends that this platform adds, by name."""
        return {}

    # -- key-value cache -----------------------------------------------------------------------------

    def get_kv_pool_cls(self, *, kind: str) -> type | str:
        """The pool for caches of ``kind``: "mha" (rows per head), "mla" or "dsa" (one compressed row).

        NotImplementedError for a kind without one: SGLang uses its own then, the embedded engine cannot run.
        """
        if kind == "mha":
            return self.get_mha_kv_pool_cls()
        if kind == "mla":
            return self.get_mla_kv_pool_cls()
        if kind in ("dsa", "nsa"):
            return self.get_nsa_kv_pool_cls()
        raise ValueError(f'kind={kind!r}: a KV pool is of kind "mha", "mla" or "dsa"')

    def get_mha_kv_pool_cls(self) -> type | str:
        return "sgl_aspects.runtime.kv_cache:MHATokenPool"

    def get_mla_kv_pool_cls(self) -> type | str:
        return "sgl_aspects.runtime.kv_cache:MLATokenPool"

    def get_nsa_kv_pool_cls(self) -> type | str:
        return "sgl_aspects.runtime.kv_cache:NSATokenPool"

    def get_paged_allocator_cls(self) -> type | str:
        return "sgl_aspects.runtime.kv_cache:PagedAllocator"

    # -- graphs and compilation ----------------------------------------------------------------------

    def support_cuda_graph(self) -> bool:
        """True if whole decode steps can be captured and replayed."""
        return self.capabilities.graph_capture

    def support_device_graph(self) -> bool:
        """Another name of ``support_cuda_graph``."""
        return self.support_cuda_graph()

    def support_piecewise_cuda_graph(self) -> bool:
        """True if a step can be captured in pieces."""
        return self.capabilities.piecewise_graph

    def get_graph_runner_cls(self) -> type | str:
        """The class that captures and replays; used only if ``support_cuda_graph()``."""
        self._not_implemented("get_graph_runner_cls")

    def get_graph_label(self) -> str:
        """The name of a replayed step in logs and traces, "cuda graph"."""
        return f"{self.device_name} graph"

    def needs_graph_recapture(self) -> bool:
        """True if captured graphs are stale after a weight update: always correct, but slower."""
        return True

    def get_compile_backend(self, mode: str | None = None) -> str:
        """The backend's name for ``torch.compile(backend=…)``."""
        self._not_implemented("get_compile_backend")

    def get_piecewise_backend_cls(self) -> type | str:
        self._not_implemented("get_piecewise_backend_cls")

    def get_full_graph_backend_cls(self) -> type | str | None:
        """Used by SGLang alone: the class that captures and replays whole steps; None: SGLang's own."""
        return None

    # -- operators -----------------------------------------------------------------------------------

    def get_dispatch_key_name(self) -> str:
        """The dispatch key, for which implementations of operators are registered."""
        return "native"

    def get_operator_config(self) -> str | None:
        """The path of a YAML file with this platform's preferred operators; None: the engine's own."""
        return None

    def supports_fp8(self) -> bool:
        return self.capabilities.supports_fp8

    # -- quantization --------------------------------------------------------------------------------

    def verify_quantization(self, quant: str) -> None:
        """Raise ValueError if this device cannot run the quantization method ``quant``."""
        if quant != "fp8" or not self.supports_fp8():
            super().verify_quantization(quant)

    def get_quantization_config(self, quantization: str) -> type | str | None:
        """The class that runs ``quantization`` on this device; None: SGLang's own."""
        return None

    # -- speculative decoding: used by SGLang alone ------------------------------------------------------

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return False

    def get_speculative_worker_cls(self, algorithm: str) -> type | str:
        """The worker that drafts tokens; used only if ``supports_speculative_algorithm``."""
        self._not_implemented("get_speculative_worker_cls")

    def get_speculative_graph_runner_cls(self, algorithm: str, phase: str) -> type | str:
        """The class that captures and replays drafting in ``phase``, "draft_decode" or "draft_extend"; used
        only if graphs are supported too.
        """
        self._not_implemented("get_speculative_graph_runner_cls")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """True if drafting can use the attention backend ``backend``."""
        return False

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """The attention backend for drafting unless the user chooses one."""
        self._not_implemented("get_default_speculative_draft_attention_backend")

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor] | None:
        """The function that computes the slots of drafted tokens; None: SGLang's own."""
        return None

    def support_mamba_cache_extra_buffer(self) -> bool:
        """True if states of Mamba layers can be kept at several tokens of a request."""
        return False
