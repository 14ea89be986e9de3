"""A Hugging Face folder: config.json, safetensors (single or sharded), tokenizer.json, chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.checkpoint import Checkpoint
from sgl_aspects.runtime.loader.hf_config import config_from_hugging_face
from sgl_aspects.runtime.loader.model_config import ModelConfig
from sgl_aspects.runtime.loader.tokenizer import Tokenizer, read_tokenizer_file

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class HuggingFaceCheckpoint(Checkpoint):
    @cached_property
    def config(self) -> ModelConfig:
        file = self.path / "config.json"
        return config_from_hugging_face(
            _read_json(file), _read_json_if_there(self.path / "generation_config.json"), str(file)
        )

    def load_tokenizer(self) -> Tokenizer:
        file = self.path / "tokenizer_config.json"
        settings = _read_json_if_there(file)
        try:
            template = self._chat_template(settings)
            tokens = {  # each a text, or an object with its text under "content"
                name: str(value["content"] if isinstance(value, dict) else value)
                for name, value in settings.items()
                if name.endswith("_token") and value is not None and not isinstance(value, bool)
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{file} or a chat template beside it is invalid: {error!r}") from error
        backend = read_tokenizer_file(self.path / "tokenizer.json")
        return Tokenizer(backend, chat_template=template, template_tokens=tokens)

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        """chat_template.jinja where it exists, as newer checkpoints have it; else tokenizer_config.json."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            by_name = {entry["name"]: entry["template"] for entry in template}
            template = by_name.get("default")
        return template

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import SafetensorError, safe_open

        for file in self._weight_files():
            try:
                with safe_open(str(file), framework="pt", device="cpu") as opened:
                    for name in sorted(opened.keys()):
                        yield name, opened.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file} cannot be read, it may be cut short: {error}") from error

    def _weight_files(self) -> list[Path]:
        index_file = self.path / INDEX_FILE
        if not index_file.is_file():
            single = self.path / SINGLE_FILE
            if single.is_file():
                return [single]
            others = sorted(
                file.name for file in self.path.glob("*") if file.suffix in (".bin", ".pt", ".pth")
            )
            hint = f"; {', '.join(others)} cannot be read: convert to safetensors" if others else ""
            raise ModelLoadError(f"{self.path} holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
        weight_map = _read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index_file} has no weight_map")
        names = sorted(set(map(str, weight_map.values())))
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelLoadError(f"{index_file} names {outside[0]!r}, which is not a file of this folder")
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{self.path}: {INDEX_FILE} names {', '.join(missing)}, which "
                "is not there: the copy or download is incomplete"
            )
        return [self.path / name for name in names]


def _read_json_if_there(file: Path) -> dict[str, Any]:
    return _read_json(file) if file.is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds {type(content).__name__}, not a JSON object")
    return content
