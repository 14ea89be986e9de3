"""Checkpoint: the one interface of both kinds of model files."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.model_config import ModelConfig
from sgl_aspects.runtime.loader.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


class Checkpoint(abc.ABC):
    """A model on disk. Opening one reads little; each part is read on demand.

    Every part that is missing or damaged is a ModelLoadError that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    @abc.abstractmethod
    def config(self) -> ModelConfig: ...

    @abc.abstractmethod
    def load_tokenizer(self) -> Tokenizer: ...

    @abc.abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its Hugging Face name, one at a time, on the CPU."""


def open_checkpoint(model_path: str) -> Checkpoint:
    """The checkpoint at ``model_path``: a Hugging Face folder, a GGUF file, or a folder with just one."""
    from sgl_aspects.runtime.loader.gguf_file import GGUFCheckpoint
    from sgl_aspects.runtime.loader.hf_folder import HuggingFaceCheckpoint

    path = Path(os.path.expanduser(model_path))
    if not path.exists():
        raise ModelLoadError(
            f"no model at {path}: it does not exist. model_path is a local Hugging Face folder "
            "(with config.json and *.safetensors) or a GGUF file; nothing is downloaded."
        )
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return GGUFCheckpoint(path)
        raise ModelLoadError(
            f"{path} is a file, but not a .gguf file. Give the folder that holds config.json."
        )
    if (path / "config.json").is_file():
        return HuggingFaceCheckpoint(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GGUFCheckpoint(gguf_files[0])
    if gguf_files:
        found = ", ".join(file.name for file in gguf_files)
        raise ModelLoadError(f"{path} holds several GGUF files ({found}): give the path of one of them")
    raise ModelLoadError(f"{path} holds neither config.json nor a GGUF file")
