"""Names and plain data that describe a device and its capabilities."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class PlatformEnum(enum.Enum):
    """The families of devices. A vendor's plugin is ``OOT`` (out of tree)."""

    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"
    XPU = "xpu"
    MUSA = "musa"
    NPU = "npu"
    TPU = "tpu"
    MPS = "mps"
    HPU = "hpu"
    SAIL = "sail"
    OOT = "oot"
    UNSPECIFIED = "unspecified"


class CpuArchEnum(enum.Enum):
    """The host's processor architecture, from ``platform.machine()``."""

    X86 = "x86"
    ARM = "arm"
    RISCV = "riscv"
    POWERPC = "powerpc"
    S390X = "s390x"
    LOONGARCH = "loongarch"
    UNKNOWN = "unknown"

    @classmethod
    def from_machine(cls, machine: str) -> CpuArchEnum:
        """``x86_64`` or ``AMD64`` is X86, ``aarch64`` is ARM, and so on; UNKNOWN for anything else."""
        lowered = machine.lower()
        for prefixes, architecture in _MACHINE_PREFIXES:
            if lowered.startswith(prefixes):
                return architecture
        return cls.UNKNOWN


_MACHINE_PREFIXES: tuple[tuple[tuple[str, ...], CpuArchEnum], ...] = (
    (("x86", "amd64", "i386", "i686"), CpuArchEnum.X86),
    (("arm", "aarch"), CpuArchEnum.ARM),
    (("riscv",), CpuArchEnum.RISCV),
    (("ppc", "powerpc"), CpuArchEnum.POWERPC),
    (("s390",), CpuArchEnum.S390X),
    (("loongarch",), CpuArchEnum.LOONGARCH),
)


class DeviceCapability(NamedTuple):
    """A device's compute capability, compared as a pair: (9, 0) is above (8, 9)."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """Return it as text, ``"9.0"``."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """``90``: ten times major, plus minor. ValueError where minor has more than one digit."""
        if not 0 <= self.minor <= 9:
            raise ValueError(f"{self}: minor is one digit")
        return self.major * 10 + self.minor


@dataclass(frozen=True)
class PlatformCapabilities:
    """A platform's declared capabilities. Nothing is assumed: undeclared ones are not used."""

    supports_triton: bool = False
    graph_capture: bool = False
    piecewise_graph: bool = False
    hicache_device_kernels: bool = False
    supports_pynccl: bool = False
    supports_fp8: bool = False
