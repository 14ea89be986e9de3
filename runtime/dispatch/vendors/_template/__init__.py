"""A template: copy this folder under your vendor's name, beside the others or into a folder of yours.

Folders whose names begin with "_" are not loaded. A folder of yours is found through
SGL_ASPECTS_OP_VENDOR_PATH, a package through an entry point of group "sgl_aspects.operators".
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl, needs

VENDOR = "template"
#: The package with your kernels.
PACKAGE = "torch"


def silu_and_mul(x: Tensor) -> Tensor:
    """The operator's arguments under their names, in their order. Import your package here, and call your
    kernel.

    Reject unsupported calls before anything is written: the next implementation gets the call.
    """
    if x.shape[-1] % 2:
        raise UnsupportedCallError("two halves are needed")
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def register(registry: OpRegistry) -> None:
    """Called once at start."""
    registry.register(
        OpImpl(
            "silu_and_mul",
            f"vendor.{VENDOR}.silu_and_mul",
            ImplKind.VENDOR,
            silu_and_mul,
            vendor=VENDOR,
            supported_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            device_types=frozenset({"cpu"}),  # torch's name of your device
            min_arch=None,  # (major, minor), where your device has such numbers
            is_available=needs(PACKAGE),  # or a function that returns True, or why not
            mutates=(),  # arguments that your kernel writes to
        )
    )
