"""The platform's distributed backend, between two processes."""

from __future__ import annotations

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, require
from sgl_aspects.conformance.isolated import call_in_processes
from sgl_aspects.platforms import current_platform

_WORLD = 2


def join_group(rank: int, store: str) -> dict[str, list[float]]:
    """Join the group as ``rank``; returns the result of each collective."""
    import torch.distributed as dist

    platform = current_platform
    platform.init_backend()
    platform.set_device(platform.get_device(rank))
    device = platform.get_group_coordinator_device(rank)
    dist.init_process_group(
        platform.get_torch_distributed_backend_str(),
        init_method=f"file://{store}",
        rank=rank,
        world_size=_WORLD,
    )
    try:
        mine = torch.full((3,), float(rank + 1), device=device)
        reduced, sent = mine.clone(), mine.clone()
        dist.all_reduce(reduced)
        dist.broadcast(sent, src=1)
        gathered = [torch.empty_like(mine) for _ in range(_WORLD)]
        dist.all_gather(gathered, mine)
        platform.synchronize()
        return {
            "all_reduce": reduced.tolist(),
            "broadcast": sent.tolist(),
            "all_gather": torch.cat(gathered).tolist(),
        }
    finally:
        dist.destroy_process_group()


@check(
    write="get_torch_distributed_backend_str",
    expects="all_reduce, broadcast and all_gather between two processes",
)
def collectives(bench: Bench) -> str:
    backend = bench.platform.get_torch_distributed_backend_str()
    count = bench.platform.device_count()
    if bench.device.type != "cpu" and count < _WORLD:
        raise NotApplicableError(f"needs {_WORLD} devices, and there is {count}")
    store = bench.folder / "rendezvous"
    store.unlink(missing_ok=True)
    answers = call_in_processes(join_group, [(rank, str(store)) for rank in range(_WORLD)])
    right = {"all_reduce": [3.0] * 3, "broadcast": [2.0] * 3, "all_gather": [1.0] * 3 + [2.0] * 3}
    for rank, answer in enumerate(answers):
        for name, values in right.items():
            method = "get_torch_distributed_backend_str"
            require(answer[name] == values, f"{name} on rank {rank}: {values}", answer[name], method)
    return f"{backend}, {len(right)} collectives"
