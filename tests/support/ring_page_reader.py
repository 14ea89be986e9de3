"""A reader of ring files written from the docstring of `sgl_aspects.tracing.record` alone.

It shares no line with the product's.
"""

from __future__ import annotations

import json
import marshal
import zlib
from pathlib import Path
from typing import Any

# Where a record has times, by its kind.
_TIMES = {"span": (6, 7), "begin": (6,), "seen": (3,), "received": (3,)}


def read_page(path: Path) -> dict[str, Any]:
    """The header's numbers, and every record from 1 on in order, as tuples that begin with their kind."""
    data = path.read_bytes()

    def word(offset: int, size: int = 8) -> int:
        return int.from_bytes(data[offset : offset + size], "little")

    assert data[:8] == b"SGLARING"
    assert word(8) == 8
    slots, slot_bytes, definitions_at, slots_at = word(40), word(48), word(56), word(64)
    assert len(data) == slots_at + slots * slot_bytes
    definitions = _definitions(data[definitions_at : definitions_at + word(16 * 8)])
    records: list[tuple[Any, ...]] = []
    parts: dict[int, bytes] = {}
    number = 1
    while True:
        slot = slots_at + number % slots * slot_bytes
        if word(slot + 248) != number:
            break
        number += 1
        if data[slot] != 1:
            continue
        part, count, size, checksum, first = (
            word(slot + at, bytes) for at, bytes in ((2, 2), (4, 2), (8, 4), (12, 4), (16, 8))
        )
        parts[first] = parts.get(first, b"") + data[slot + 24 : slot + 248]
        if part + 1 == count:
            whole = parts.pop(first)[:size]
            assert zlib.crc32(whole) == checksum
            records.append(_record(*marshal.loads(whole), definitions=definitions))
    offset = int.from_bytes(data[32:40], "little", signed=True)
    for row, record in enumerate(records):
        times = _TIMES.get(record[0], ())
        records[row] = tuple(value + offset if at in times else value for at, value in enumerate(record))
    return {"pid": word(16), "dropped": word(17 * 8), "taken": word(24 * 8), "records": records}


def _record(kind: Any, *fields: Any, definitions: list[Any]) -> tuple[Any, ...]:
    if isinstance(kind, int):
        name, attributes = definitions[kind]
        *ids, values, error, links = fields
        return ("span", name, [*attributes], *ids, [*values], error, [*links])
    if kind == "begin":
        name, attributes = definitions[fields[0]]
        return ("begin", name, [*attributes], *fields[1:])
    named = [_named(each, definitions) if isinstance(each, dict) else each for each in fields]
    return ({"request": "received"}.get(kind, kind), *named)


def _named(attributes: dict[Any, Any], definitions: list[Any]) -> dict[str, Any]:
    return {definitions[key] if isinstance(key, int) else key: value for key, value in attributes.items()}


def _definitions(data: bytes) -> list[Any]:
    found: list[Any] = [None]
    while data:
        size = int.from_bytes(data[:4], "little")
        found.append(json.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found
