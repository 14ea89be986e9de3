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
    assert word(8) == 5
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
        if kind in (2, 10):
            name, names, codes, has_error, count = definitions[index]
            position, after = 0, sum(code not in "so" for code in codes)
            ids = iter(_ids(data[slot + 48 + 8 * (after + has_error + count) : slot + 248]))
            values = []
            for code in codes:
                if code in "so":
                    text = next(ids) or None
                    values.append([text] if text and code == "o" else text)
                else:
                    values.append(_value(code, data[slot + 48 + 8 * position :][:8], definitions))
                    position += 1
            error = definitions[words[5 + after]] if has_error else ""
            after += 5 + has_error
            if kind == 2:
                all_links = links.pop(words[0], []) + words[after : after + count]
                records.append(("span", name, names, *words[:5], values, error, all_links))
            else:
                span_id, high, low, parent, start = words[:5]
                records.append(_received(names, span_id, high, low, parent, start, values, error))
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
                if text[0] != "A" and isinstance(text[2], int):
                    text[2] = definitions[text[2]][1]
                if text[0] == "R":
                    records.append(_received(*text[2:-1]))
                    continue
                if text[0] == "S":
                    text[-1] = links.pop(text[3], []) + text[-1]
                records.append(({"A": "seen", "S": "span"}[text[0]], *text[1:]))
        elif kind == 11:
            size = data[slot + 24]
            records.append(("seen", words[0], data[slot + 25 :][:size].decode(), words[1]))
    return {"pid": word(16), "dropped": word(17 * 8), "taken": word(24 * 8), "records": records}


def _ids(data: bytes) -> list[str]:
    return data[1 : 1 + data[0]].decode().split("\0") if data else []


def _received(
    names: list[str],
    span_id: int,
    high: int,
    low: int,
    parent: int,
    start: int,
    values: list[Any],
    state: str,
) -> tuple[Any, ...]:
    flags, name, *rest = values
    attributes = dict(zip(names[2:], rest))
    rid = attributes.pop("", "") or attributes["gen_ai.request.id"]
    trace_id, sampled, remote = high << 64 | low, flags % 2 == 1, flags > 1
    return ("received", span_id, rid, start, trace_id, parent, sampled, state, remote, name, attributes)


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
    if code in "tl":
        return definitions[number]
    return None if code == "f" or number == 2**63 - 1024 else number if code == "i" else bool(number)
