"""ELF files mapped into another process: addresses of exported functions, and unused executable bytes."""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PAGE = mmap.PAGESIZE

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LOAD, _EXECUTABLE, _DYNAMIC_SYMBOLS = 1, 1, 11
_PYTHON = re.compile(r"(^|/)(lib)?python[0-9.]*[a-z]*[^/]*$")


@dataclass(frozen=True)
class Mapping:
    """One line of ``/proc/PID/maps`` that maps a file."""

    start: int
    end: int
    permissions: str


def mapped_files(process_id: int) -> dict[str, list[Mapping]]:
    """Return the files mapped into a process. Raises ``PermissionError`` if this user may not read them."""
    found: dict[str, list[Mapping]] = {}
    with open(f"/proc/{process_id}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, end = (int(part, 16) for part in fields[0].split("-"))
                found.setdefault(fields[5], []).append(Mapping(start, end, fields[1]))
    return found


class Image:
    """One ELF file of a process, and where it is mapped."""

    def __init__(self, path: str, mappings: Iterable[Mapping]) -> None:
        with open(path, "rb") as file:
            self._data = file.read()
        if self._data[:5] != b"\x7fELF\x02":
            raise ValueError(f"{path} is not a 64-bit ELF file")
        header = _HEADER.unpack_from(self._data)
        self.machine, self._section_offset, self._section_count = header[2], header[6], header[12]
        self._segments = [
            _SEGMENT.unpack_from(self._data, header[5] + i * header[9]) for i in range(header[10])
        ]
        first = min(mappings, key=lambda mapping: mapping.start)
        lowest = min(segment[3] for segment in self._segments if segment[0] == _LOAD)
        self._bias = first.start - lowest // PAGE * PAGE

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Return the exported functions among ``names``."""
        wanted = {name.encode() for name in names}
        found: dict[str, int] = {}
        sections = [
            _SECTION.unpack_from(self._data, self._section_offset + i * _SECTION.size)
            for i in range(self._section_count)
        ]
        for section in sections:
            if section[1] != _DYNAMIC_SYMBOLS:
                continue
            texts = sections[section[6]][4]
            for name, _, _, index, value, _ in _SYMBOL.iter_unpack(
                self._data[section[4] : section[4] + section[5]]
            ):
                text = self._data[texts + name : self._data.index(b"\0", texts + name)]
                if index and text in wanted:
                    found[text.decode()] = self._bias + value
        return found

    def unused(self) -> Iterator[tuple[int, int]]:
        """Yield the unused executable bytes after the code, up to the end of its last page: start, size."""
        for kind, flags, _, address, _, size, memory_size, _ in self._segments:
            if kind == _LOAD and flags & _EXECUTABLE and size == memory_size:
                end = self._bias + address + size
                start = -(-end // 16) * 16
                yield start, -(-end // PAGE) * PAGE - start


def python_image(process_id: int) -> Image | None:
    """Return the interpreter's file: libpython, or the executable. None: it is not Python."""
    by_path = mapped_files(process_id)
    executable = os.readlink(f"/proc/{process_id}/exe")
    candidates = [path for path in by_path if path == executable or _PYTHON.search(path)]
    for path in sorted(candidates, key=lambda path: "libpython" not in path):
        try:
            image = Image(path, by_path[path])
        except (OSError, ValueError):
            continue
        if image.addresses(["Py_AddPendingCall"]):
            return image
    return None


def unused_code(process_id: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield places of at least ``size`` bytes that are executable but not code: start, size."""
    for path, mappings in mapped_files(process_id).items():
        if not any(mapping.permissions == "r-xp" for mapping in mappings):
            continue
        try:
            places = list(Image(path, mappings).unused())
        except (OSError, ValueError):
            continue
        for start, room in places:
            is_mapped = any(
                mapping.permissions == "r-xp" and mapping.start <= start and start + room <= mapping.end
                for mapping in mappings
            )
            if room >= size and is_mapped:
                yield start, room
