"""A vendor's communicator in SGLang's groups: hooks on the collectives of its group coordinator.

``SGL_ASPECTS_COMMUNICATOR=pkg.mod:Class`` names a subclass of the runtime's Communicator that can be created
for an existing group: ``Class.of_group(device_group, ranks, rank)``. "torch" is torch.distributed, to test
the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_aspects.engines.sglang.operator_targets import GROUP_COORDINATOR
from sgl_aspects.errors import ConfigError
from sgl_aspects.weaving import HookRegistry, HookType

_attached = False


def attach(class_name: str) -> None:
    """Weave the hooks, once in each process.

    :raises ConfigError: no communicator class has this name.
    """
    global _attached
    communicator_class = _communicator_class(class_name)
    if _attached:
        return
    _attached = True
    communicators: dict[int, Any] = {}

    def of(coordinator: Any) -> Any:
        """Return the communicator of a group, one for each."""
        group = coordinator.device_group
        if id(group) not in communicators:
            communicators[id(group)] = communicator_class.of_group(
                group, coordinator.ranks, coordinator.rank_in_group
            )
        return communicators[id(group)]

    def hook(work: Callable[..., Any]) -> Callable[..., Any]:
        def around(original_fn: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.world_size == 1:
                return original_fn(self, *args, **kwargs)
            outcome = work(of(self), *args, **kwargs)
            return original_fn(self, *args, **kwargs) if outcome is NotImplemented else outcome

        return around

    for work in _WORK:
        HookRegistry.register(f"{GROUP_COORDINATOR}.{work.__name__}", hook(work), HookType.AROUND)


# -- SGLang's collectives, by its names for them and their arguments ---------------------------------------


def all_reduce(communicator: Any, input_: Any) -> Any:
    return communicator.all_reduce(input_)


def all_gather(communicator: Any, input_: Any, dim: int = -1, output_tensor_list: Any = None) -> Any:
    """Gather into a new tensor only: SGLang also passes a list of output tensors."""
    return NotImplemented if output_tensor_list is not None else communicator.all_gather(input_, dim)


def all_gather_into_tensor(communicator: Any, output: Any, input: Any) -> None:
    output.copy_(communicator.all_gather(input, 0).view(output.shape))


def reduce_scatter_tensor(communicator: Any, output: Any, input: Any) -> None:
    output.copy_(communicator.reduce_scatter(input, 0).view(output.shape))


def broadcast(communicator: Any, input_: Any, src: int = 0) -> Any:
    return communicator.broadcast(input_, src)


def send(communicator: Any, tensor: Any, dst: int | None = None) -> None:
    communicator.send(tensor, (communicator.rank + 1) % communicator.world_size if dst is None else dst)


def recv(communicator: Any, size: Any, dtype: Any, src: int | None = None) -> Any:
    source = (communicator.rank - 1) % communicator.world_size if src is None else src
    return communicator.recv(size, dtype, source)


_WORK = (all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor, broadcast, send, recv)


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
