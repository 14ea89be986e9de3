"""The communicator that an engine makes on the platform, between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, require
from sgl_aspects.conformance.isolated import call_in_processes
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform, resolve_qualified_name
from sgl_aspects.runtime.communicator import make_communicator

_WORLD = 2
#: Seconds for all methods: where one rank fails the other may wait for it endlessly.
_SECONDS = 60.0
_MINE = ([0.0, 1.0], [2.0, 3.0]), ([10.0, 11.0], [12.0, 13.0])
#: Method → the right answer of each rank.
_RIGHT: dict[str, list[Any]] = {
    "all_reduce": [[[10.0, 12.0], [14.0, 16.0]]] * 2,
    "all_gather": [[[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]] * 2,
    "broadcast": [[[10.0, 11.0], [12.0, 13.0]]] * 2,
    "reduce_scatter": [[[10.0, 12.0]], [[14.0, 16.0]]],
    "send": [None, [[0.0, 1.0], [2.0, 3.0]]],
    "gather_objects": [["rank 0", "rank 1"]] * 2,
    "broadcast_tensor_dict": [{"x": [[10.0, 11.0], [12.0, 13.0]], "name": "rank 1"}] * 2,
    "send_tensor_dict": [None, {"x": [[0.0, 1.0], [2.0, 3.0]], "name": "rank 0"}],
    "share": [[2, "ConfigError"]] * 2,
    "close": [None, None],
}
#: Two methods that are one exchange.
_WITH = {"send": "send, recv", "send_tensor_dict": "send_tensor_dict, recv_tensor_dict"}


def join_group(rank: int, store: str) -> dict[str, Any]:
    """Join the group as ``rank``; returns the answer of each method, up to the first that fails."""
    platform = current_platform
    platform.init_backend()
    platform.set_device(platform.get_device(rank))
    device = platform.get_group_coordinator_device(rank)
    made = make_communicator(rank, _WORLD, f"file://{store}")
    mine = torch.tensor(_MINE[rank], device=device)
    values = {"x": mine, "name": f"rank {rank}"}

    def share() -> list[Any]:
        try:
            return [made.share(4, "a size"), made.share(3, "a size")]
        except ConfigError as error:
            return [made.share(4, "a size"), type(error).__name__]

    sends = rank == 0
    work: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: made.all_reduce(mine.clone()),
        "all_gather": lambda: made.all_gather(mine),
        "broadcast": lambda: made.broadcast(mine.clone(), 1),
        "reduce_scatter": lambda: made.reduce_scatter(mine.clone()),
        "send": lambda: made.send(mine, 1) if sends else made.recv((2, 2), torch.float32, 0),
        "gather_objects": lambda: made.gather_objects(f"rank {rank}"),
        "broadcast_tensor_dict": lambda: made.broadcast_tensor_dict(None if sends else values, 1),
        "send_tensor_dict": lambda: made.send_tensor_dict(values, 1) if sends else made.recv_tensor_dict(0),
        "share": share,
        "close": made.close,
    }
    found: dict[str, Any] = {}

    def run() -> None:
        for name, call in work.items():
            try:
                found[name] = _plain(call())
            except Exception as error:  # noqa: BLE001  # reported as the method's answer
                found[name] = f"{type(error).__name__}: {error}"
                break

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return dict(found)


def _plain(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: _plain(value) for name, value in answer.items()}
    return answer.tolist() if isinstance(answer, torch.Tensor) else answer


@check(
    write="get_torch_distributed_backend_str, get_communicator_class",
    expects="every method of the communicator, between two processes",
)
def collectives(bench: Bench) -> str:
    count = bench.platform.device_count()
    if bench.device.type != "cpu" and count < _WORLD:
        raise NotApplicableError(f"needs {_WORLD} devices, and there is {count}")
    store = bench.folder / "rendezvous"
    store.unlink(missing_ok=True)
    answers = call_in_processes(join_group, [(rank, str(store)) for rank in range(_WORLD)])
    for name, right in _RIGHT.items():
        method = f"{_WITH.get(name, name)} of the communicator"
        # Of a rank that waited for the other there is no answer: the other's tells more.
        for rank, answer in sorted(enumerate(answers), key=lambda each: name not in each[1]):
            found = answer.get(name, f"no answer in {_SECONDS:g} s")
            require(found == right[rank], f"{right[rank]} on rank {rank}", found, method)
    return f"{len(_RIGHT) + len(_WITH)} methods of {_name(bench)}"


def _name(bench: Bench) -> str:
    chosen = bench.platform.get_communicator_class()
    backend = bench.platform.get_torch_distributed_backend_str
    return f"torch.distributed, {backend()}" if chosen is None else resolve_qualified_name(chosen).__name__
