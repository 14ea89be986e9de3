"""A reader of ring files written from docs/recorder.md alone: it shares no line with the product's."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def read_page(path: Path) -> dict[str, Any]:
    """The header's numbers, and every record from 1 on in order, as tuples that begin with their kind."""
    data = path.read_bytes()

    def word(offset: int) -> int:
        return int.from_bytes(data[offset : offset + 8], "little")

    assert data[:8] == b"SGLARING"
    assert word(8) == 4
    slots, slot_bytes, definitions_at, slots_at = word(40), word(48), word(56), word(64)
    assert len(data) == slots_at + slots * slot_bytes
    definitions = _definitions(data[definitions_at : definitions_at + word(16 * 8)])
    records: list[tuple[Any, ...]] = []
    pieces: dict[int, bytes] = {}
    links: dict[int, list[int]] = {}
    number = 1
    while True:
        slot = slots_at + number % slots * slot_bytes
        if word(slot + 248) != number:
            break
        number += 1
        kind, index = data[slot], word(slot) >> 32
        words = [word(slot + 8 * position) for position in range(1, 31)]
        if kind == 2:
            name, names, codes, has_error, count = definitions[index]
            values = [
                _value(code, data[slot + 48 + 8 * position :][:8], definitions)
                for position, code in enumerate(codes)
            ]
            error = values.pop() if has_error else ""
            after = 5 + len(codes)
            all_links = links.pop(words[0], []) + words[after : after + count]
            records.append(("span", name, names, *words[:5], values, error, all_links))
        elif kind == 3:
            name, names, *_ = definitions[index]
            records.append(("begin", name, names, *words[:4]))
        elif kind == 4:
            records.append(("sent", words[0]))
        elif kind == 5:
            links.setdefault(words[0], []).extend(filter(None, words[1:30]))
        elif kind in (6, 7):
            pieces[words[0]] = pieces.get(words[0], b"") + data[slot + 16 : slot + 248]
            if kind == 7:
                text = json.loads(pieces.pop(words[0])[:index])
                names_at = 2 if text[0] == "S" else -2
                if text[0] != "A" and isinstance(text[names_at], int):
                    text[names_at] = definitions[text[names_at]][1]
                if text[0] == "S":
                    text[-1] = links.pop(text[3], []) + text[-1]
                if text[0] == "R":
                    text[-2:] = [dict(zip(*text[-2:]))]
                records.append(({"R": "received", "A": "seen", "S": "span"}[text[0]], *text[1:]))
    return {"pid": word(16), "dropped": word(17 * 8), "taken": word(24 * 8), "records": records}


def _definitions(data: bytes) -> list[Any]:
    found: list[Any] = [None]
    while data:
        size = int.from_bytes(data[:4], "little")
        kind, text = data[4:5], data[5 : 4 + size].decode()
        found.append(text if kind == b"T" else json.loads(text))
        data = data[4 + size :]
    return found


def _value(code: str, data: bytes, definitions: list[Any]) -> Any:
    if code == "f" and data != struct.pack("<d", 2**63 - 1024):
        sign = -1 if data[7] & 0x80 else 1
        exponent = (data[7] & 0x7F) << 4 | data[6] >> 4
        fraction = int.from_bytes(data[:7], "little") & (1 << 52) - 1
        if exponent == 0:
            return sign * fraction * 2.0**-1074
        return sign * (1 + fraction / (1 << 52)) * 2.0 ** (exponent - 1023)
    number = int.from_bytes(data, "little", signed=True)
    if code == "t":
        return definitions[number]
    return None if code == "f" or number == 2**63 - 1024 else number if code == "i" else bool(number)
