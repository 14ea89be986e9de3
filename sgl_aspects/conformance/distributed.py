"""The communicator that an engine makes on the platform, between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, require
from sgl_aspects.conformance.suite import call_in_processes
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform, resolve_qualified_name
from sgl_aspects.runtime.communicator import make_communicator

_WORLD = 2
#: Seconds for all methods: where one rank fails the other may wait for it endlessly.
_SECONDS = 60.0
#: The tensor of each rank.
_OF_0, _OF_1 = [[0.0, 1.0], [2.0, 3.0]], [[10.0, 11.0], [12.0, 13.0]]
_SUM = [[10.0, 12.0], [14.0, 16.0]]
_NO_ANSWER = f"no answer in {_SECONDS:g} s"


def join_group(rank: int, store: str) -> dict[str, tuple[Any, Any]]:
    """Join the group as ``rank``; returns the answer of each method, up to the first that fails, and the
    right one.
    """
    platform = current_platform
    platform.init_backend()
    platform.set_device(platform.get_device(rank))
    device = platform.get_group_coordinator_device(rank)
    made = make_communicator(rank, _WORLD, f"file://{store}")
    mine = torch.tensor((_OF_0, _OF_1)[rank], device=device)
    values, sends = {"x": mine, "name": f"rank {rank}"}, rank == 0

    def share() -> list[Any]:
        try:
            return [made.share(4, "a size"), made.share(3, "a size")]
        except ConfigError as error:
            return [made.share(4, "a size"), type(error).__name__]

    #: Method, or two that are one exchange → the call, and its right answer on this rank.
    work: dict[str, tuple[Callable[[], Any], Any]] = {
        "all_reduce": (lambda: made.all_reduce(mine.clone()), _SUM),
        "all_gather": (lambda: made.all_gather(mine), [a + b for a, b in zip(_OF_0, _OF_1)]),
        "broadcast": (lambda: made.broadcast(mine.clone(), 1), _OF_1),
        "reduce_scatter": (lambda: made.reduce_scatter(mine.clone()), [_SUM[rank]]),
        "send, recv": (
            lambda: made.send(mine, 1) if sends else made.recv((2, 2), torch.float32, 0),
            None if sends else _OF_0,
        ),
        "gather_objects": (lambda: made.gather_objects(f"rank {rank}"), ["rank 0", "rank 1"]),
        "broadcast_tensor_dict": (
            lambda: made.broadcast_tensor_dict(None if sends else values, 1),
            {"x": _OF_1, "name": "rank 1"},
        ),
        "send_tensor_dict, recv_tensor_dict": (
            lambda: made.send_tensor_dict(values, 1) if sends else made.recv_tensor_dict(0),
            None if sends else {"x": _OF_0, "name": "rank 0"},
        ),
        "share": (share, [2, "ConfigError"]),
        "close": (made.close, None),
    }
    found = {name: (_NO_ANSWER, right) for name, (_, right) in work.items()}

    def run() -> None:
        for name, (call, right) in work.items():
            try:
                found[name] = _plain(call()), right
            except Exception as error:  # noqa: BLE001  # reported as the method's answer
                found[name] = f"{type(error).__name__}: {error}", right
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
    for name in answers[0]:
        # Of a rank that waited for the other there is no answer: the other's tells more.
        for rank, answer in sorted(enumerate(answers), key=lambda each: each[1][name][0] == _NO_ANSWER):
            found, right = answer[name]
            require(found == right, f"{right} on rank {rank}", found, f"{name} of the communicator")
    chosen, name = bench.platform.get_communicator_class(), "torch.distributed"
    backend = bench.platform.get_torch_distributed_backend_str
    whose = f"{name}, {backend()}" if chosen is None else resolve_qualified_name(chosen).__name__
    return f"{sum(len(name.split(', ')) for name in answers[0])} methods of {whose}"
