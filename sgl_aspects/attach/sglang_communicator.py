"""A vendor's communicator in SGLang's groups: hooks on the collectives of its group coordinator.

``SGL_ASPECTS_COMMUNICATOR=pkg.mod:Class`` names a subclass of the runtime's Communicator that can be made
for a group that exists: ``Class.of_group(device_group, ranks, rank)``. "torch" is torch.distributed, to
prove the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_aspects.engines.sglang_operators import GROUP_COORDINATOR
from sgl_aspects.errors import ConfigError
from sgl_aspects.weaving.faces import HookRegistry
from sgl_aspects.weaving.hooks import HookType

_attached = False


def attach(class_name: str) -> None:
    """Once in each process.

    :raises ConfigError: the name is none of a communicator's class.
    """
    global _attached
    communicator_class = _communicator_class(class_name)
    if _attached:
        return
    _attached = True
    communicators: dict[int, Any] = {}

    def of(coordinator: Any) -> Any:
        """One communicator for each group."""
        group = coordinator.device_group
        if id(group) not in communicators:
            communicators[id(group)] = communicator_class.of_group(
                group, coordinator.ranks, coordinator.rank_in_group
            )
        return communicators[id(group)]

    def hook(work: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., Any]:
        def around(original_fn: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.world_size == 1:
                return original_fn(self, *args, **kwargs)
            outcome = work(of(self), self, args, kwargs)
            return original_fn(self, *args, **kwargs) if outcome is NotImplemented else outcome

        return around

    for name, work in _WORK.items():
        HookRegistry.register(f"{GROUP_COORDINATOR}.{name}", hook(work), HookType.AROUND)


def _all_reduce(communicator: Any, coordinator: Any, args: Any, kwargs: Any) -> Any:
    return communicator.all_reduce(_one(args, kwargs, "input_"))


def _all_gather(communicator: Any, coordinator: Any, args: Any, kwargs: Any) -> Any:
    """Only into a new tensor: SGLang also gathers into tensors that it brings."""
    others = [*args[2:], *(value for name, value in kwargs.items() if name not in ("input_", "dim"))]
    if any(value is not None for value in others):
        return NotImplemented
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return communicator.all_gather(_one(args, kwargs, "input_"), dim)


def _broadcast(communicator: Any, coordinator: Any, args: Any, kwargs: Any) -> Any:
    source = args[1] if len(args) > 1 else kwargs.get("src", 0)
    return communicator.broadcast(_one(args, kwargs, "input_"), source)


def _one(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    return args[0] if args else kwargs[name]


_WORK: dict[str, Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
}


def _communicator_class(class_name: str) -> Any:
    from sgl_aspects.platforms import resolve_qualified_name
    from sgl_aspects.runtime.communicator import Communicator, TorchCommunicator

    if class_name == "torch":
        return TorchCommunicator
    found = resolve_qualified_name(class_name)
    if not issubclass(found, Communicator) or not hasattr(found, "of_group"):
        raise ConfigError(
            f"SGL_ASPECTS_COMMUNICATOR={class_name!r}: write 'torch' or the name of a Communicator's class "
            f"with of_group(group, ranks, rank), 'pkg.mod:Class'"
        )
    return found
