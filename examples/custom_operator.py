"""A vendor's operator, registered, chosen by a policy, and compared with the reference.

Prints:

    chosen: vendor.acme.silu_and_mul
    greatest difference to the reference: below 1e-6
    without vendors: reference.silu_and_mul
"""

import torch

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl


def silu_and_mul(x):
    """[tokens, 2 * width] -> [tokens, width]: the operator's own arguments, in its order."""
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def main() -> None:
    manager = dispatch.get_manager()
    manager.registry.register(
        OpImpl("silu_and_mul", "vendor.acme.silu_and_mul", ImplKind.VENDOR, silu_and_mul, vendor="acme")
    )
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with dispatch.with_preference("vendor"):
        print("chosen:", chosen(manager, x))
        ours = dispatch.silu_and_mul(x)
    with dispatch.with_preference("reference"):
        difference = (ours - dispatch.silu_and_mul(x)).abs().max().item()
        print("greatest difference to the reference:", "below 1e-6" if difference < 1e-6 else difference)
        print("without vendors:", chosen(manager, x))


def chosen(manager, x):
    lines = str(manager.explain("silu_and_mul", x.dtype, x.device)).splitlines()
    return next(line.split(":")[0].strip() for line in lines if line.endswith(": chosen"))


main()
