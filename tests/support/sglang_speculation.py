"""SGLang's speculation on a plain CPU: what its CUDA kernels do, by its own Triton kernels, interpreted.

``PLUGIN`` is the code of a plugin for each process of a server, which runs with ``ENVIRONMENT`` and
``OPTIONS``. Drafts are chains: for a tree of them SGLang's plain attention would need a mask.
"""

from __future__ import annotations

#: Triton's interpreter runs kernels on the CPU.
ENVIRONMENT = {"TRITON_INTERPRET": "1"}
DRAFT_TOKENS = 4
OPTIONS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFT_TOKENS)),
    *("--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-steps", str(DRAFT_TOKENS - 1)),
)
PLUGIN = f"""
import sys, types
import sgl_aspects as aspects

KERNELS = "sglang.kernels.ops.speculative"

@aspects.around(KERNELS + ".reconstruct_tree:reconstruct_indices_from_tree_mask_func")
def reconstruct(original_fn, *args):
    sys.modules[KERNELS + ".reconstruct_tree"].reconstruct_indices_from_tree_mask_triton(*args)

@aspects.around(KERNELS + ".spec_tree:verify_tree_greedy_func")
def verify(original_fn, topk=-1, **tensors):
    sys.modules[KERNELS + ".spec_tree"].verify_tree_greedy_triton(**tensors)
    return tensors["predicts"], tensors["accept_index"], tensors["accept_token_num"]

@aspects.around(KERNELS + ".cache_locs:assign_extend_cache_locs_func")
def locations(original_fn, *, req_pool_indices, req_to_token, start_offset, end_offset, **rest):
    import torch
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    return torch.cat([req_to_token[row, start:end].long() for row, start, end in rows])

@aspects.around("sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend")
def attend(original_fn, *args, **kwargs):
    batch = kwargs.get("forward_batch", args[5] if len(args) > 5 else None)
    if not batch.forward_mode.is_target_verify():
        return original_fn(*args, **kwargs)
    before = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
    drafted = before[0].new_full(before[0].shape, {DRAFT_TOKENS})
    batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = before[0] + drafted, before[0], drafted
    try:
        return original_fn(*args, **kwargs)
    finally:
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = before

def activate():
    missing = types.ModuleType("sgl_kernel.speculative")
    missing.reconstruct_indices_from_tree_mask = None
    sys.modules["sgl_kernel.speculative"] = missing
    aspects.weave(reconstruct, verify, locations, attend)
"""
