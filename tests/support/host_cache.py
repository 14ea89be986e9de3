"""SGLang's host cache on a plain CPU: the copies of its CUDA kernels, by PyTorch, and no pinned memory.

``PLUGIN`` is the code of a plugin for each process of a server, which runs with ``OPTIONS``.
"""

from __future__ import annotations

OPTIONS = (
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--hicache-write-policy", "write_through", "--hicache-ratio", "4"),
)
PLUGIN = """
import sgl_aspects as aspects
import wrapt

@aspects.replace("sglang.srt.mem_cache.pool_host.common:_cuda_host_register")
def register(*args, **kwargs):
    pass

def copy(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers):
        target[dst_indices] = source[src_indices]

def activate():
    aspects.weave(register)
    wrapt.register_post_import_hook(
        lambda module: setattr(module, "transfer_kv_direct", copy), "sglang.srt.mem_cache.pool_host.mha"
    )
"""
