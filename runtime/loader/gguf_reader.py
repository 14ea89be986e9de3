"""Read a GGUF file's metadata and tensors.

The layout, in order: magic "GGUF", version, number of tensors, number of metadata entries; the entries
(key, type, value); per tensor its name, dimensions (fastest first), quantization type and offset; padding
up to ``general.alignment``; the tensors' data. Version 2 and 3 differ in nothing that matters here.

The ``gguf`` package reads this too, but takes seconds for a vocabulary, thirty times as long as
this; it is used here only to dequantize blocks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from sgl_aspects.errors import ModelLoadError

# The type numbers of the format, and how struct reads each. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Errors of reading nonsensical numbers; RecursionError of nested arrays, for example.
_DAMAGE = (struct.error, ValueError, TypeError, ArithmeticError, IndexError, MemoryError, RecursionError)
_NUMBERS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class TensorInfo:
    #: Slowest dimension first, as in numpy: the file's order reversed.
    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    #: Bytes from the start of the data.
    offset: int

    @property
    def nbytes(self) -> int:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.quantization]
        nbytes: int = math.prod(self.shape) // block_size * block_bytes
        return nbytes

    @property
    def rows_at_once(self) -> int:
        """Rows of the last dimension that are dequantized as one; faster for short ones."""
        length = self.shape[-1] if self.shape else 1
        if length % gguf.GGML_QUANT_SIZES[self.quantization][0]:
            return 1  # the gguf package refuses it
        most = max(1, _NUMBERS_AT_ONCE // max(1, length))
        return math.gcd(math.prod(self.shape[:-1]), 1 << (most.bit_length() - 1))


class GGUFReader:
    """``metadata`` by key and ``tensors`` by name; data stays in the file until :meth:`read_tensor`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        self._buffer = self._data.data
        self._position = 0
        try:
            self._read_header()
        except _DAMAGE as error:
            raise ModelLoadError(f"{path} is damaged or cut short in its header: {error}") from error

    def _read_header(self) -> None:
        if bytes(self._buffer[:4]) != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file: it does not start with the letters GGUF")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        tensor_count, entry_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = self._string()
            self.tensors[name] = self._tensor_info(name)
        alignment = self.metadata.get("general.alignment", 32)
        self._start = math.ceil(self._position / alignment) * alignment
        for name, info in self.tensors.items():
            end = self._start + info.offset + info.nbytes
            if end > len(self._buffer):
                raise ModelLoadError(
                    f"{self.path} is cut short: tensor {name!r} ends at byte {end}, "
                    f"the file at {len(self._buffer)}"
                )

    def read_tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32, slowest dimension first."""
        info = self.tensors[name]
        start = self._start + info.offset
        try:
            # dequantize works row by row: it needs the bytes of each row of the last dimension together.
            rows = self._data[start : start + info.nbytes].reshape(math.prod(info.shape[:-1]), -1)
            rows = rows.reshape(len(rows) // info.rows_at_once, -1)
            numbers: npt.NDArray[np.float32] = gguf.dequantize(rows, info.quantization)
            return numbers.reshape(info.shape)
        except (NotImplementedError, ValueError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} of type {info.quantization.name} and shape {list(info.shape)} "
                f"cannot be dequantized by the gguf package: {error}"
            ) from error

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._buffer, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._position + length
        if end > len(self._buffer):
            raise IndexError(f"a text of {length} bytes reaches past the end")
        text = bytes(self._buffer[self._position : end]).decode("utf-8")
        self._position = end
        return text

    def _value(self, type_number: int) -> Any:
        if type_number == _STRING:
            return self._string()
        if type_number == _ARRAY:
            item_type, count = self._scalar("I"), self._scalar("Q")
            if item_type not in _SCALARS:
                return [self._value(item_type) for _ in range(count)]
            layout = f"<{count}{_SCALARS[item_type]}"
            values = struct.unpack_from(layout, self._buffer, self._position)
            self._position += struct.calcsize(layout)
            return list(values)
        if type_number not in _SCALARS:
            raise ModelLoadError(f"{self.path}: metadata of unknown type number {type_number}")
        return self._scalar(_SCALARS[type_number])

    def _tensor_info(self, name: str) -> TensorInfo:
        shape = tuple(reversed([self._scalar("Q") for _ in range(self._scalar("I"))]))
        type_number = self._scalar("I")
        try:
            return TensorInfo(shape, gguf.GGMLQuantizationType(type_number), self._scalar("Q"))
        except ValueError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} is of the unknown type number {type_number}"
            ) from error
