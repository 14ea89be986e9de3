"""The spans of a step's record: their ids are derived from the step's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.records import UNFINISHED, SpanEnd, SpanType

#: Each child of a step: its number, type, the words of its start and end, and its parent (0: the step).
_CHILDREN: tuple[tuple[int, SpanType, int, int, int], ...] = (
    (layout.CHILD_SCHEDULE, schema.SCHEDULE, layout.SCHEDULE_START, layout.SCHEDULE_END, 0),
    (layout.CHILD_RUN_BATCH, schema.RUN_BATCH, layout.RUN_START, layout.RUN_END, 0),
    (
        *(layout.CHILD_FORWARD, schema.FORWARD, layout.FORWARD_START, layout.FORWARD_END),
        layout.CHILD_RUN_BATCH,
    ),
    (layout.CHILD_SAMPLE, schema.SAMPLE, layout.SAMPLE_START, layout.SAMPLE_END, layout.CHILD_RUN_BATCH),
    (layout.CHILD_PROCESS_RESULT, schema.PROCESS_RESULT, layout.PROCESS_START, layout.PROCESS_END, 0),
    (layout.CHILD_DRAFT, schema.DRAFT, layout.DRAFT_START, layout.DRAFT_END, layout.CHILD_RUN_BATCH),
    (
        *(layout.CHILD_DRAFT_EXTEND, schema.DRAFT_EXTEND),
        *(layout.DRAFT_EXTEND_START, layout.DRAFT_EXTEND_END, layout.CHILD_RUN_BATCH),
    ),
)
CHILD_TYPES = {child: type for child, type, *_ in _CHILDREN}
CHILD_STARTS = {child: start for child, _, start, *_ in _CHILDREN}


def spans_of(
    words: Sequence[int], text_of: Callable[[int], str], links: Sequence[int], open_until: int = 0
) -> list[SpanEnd]:
    """Make the spans of a step's record, the step's own first; times as in the record.

    ``open_until``: the end of open spans, for a step that has not ended.
    """
    step_id = words[layout.STEP_SPAN_ID]
    mode, size, tokens = (
        text_of(words[layout.STEP_MODE]) if words[layout.STEP_MODE] else None,
        _figure(words[layout.STEP_SIZE]),
        _figure(words[layout.STEP_TOKENS]),
    )
    error = text_of(words[layout.STEP_ERROR]) if words[layout.STEP_ERROR] else ""
    end = words[layout.PROCESS_END] or open_until
    if not words[layout.PROCESS_END] and not error:
        error = UNFINISHED
    start = words[layout.SCHEDULE_START] or words[layout.RUN_START] or end
    usage = _figure(words[layout.STEP_KV_USAGE])
    values = [
        _figure(words[layout.STEP_NUMBER]),
        mode,
        size,
        tokens,
        _figure(words[layout.STEP_WAITING]),
        _figure(words[layout.STEP_RUNNING]),
        None if usage is None else usage / layout.KV_USAGE_UNIT,
        _figure(words[layout.STEP_DRAFTED]),
        _figure(words[layout.STEP_ACCEPTED]),
    ]
    found = [SpanEnd(schema.STEP, step_id, step_id, 0, start, end, values, error, links)]
    if not step_id:
        return found  # figures for the metrics
    failed = words[layout.STEP_HEAD] >> layout.FAILED_SHIFT
    for child, type, first, last, parent in _CHILDREN:
        if not words[first]:
            continue
        values = []
        if type is schema.FORWARD:
            device_time = _figure(words[layout.STEP_DEVICE_TIME])
            values = [mode, size, tokens, None, None, None]
            if words[layout.STEP_DEVICE_NAME]:
                values[3] = text_of(words[layout.STEP_DEVICE_NAME])
            if device_time is not None:
                values[4] = device_time / 1e9
            if words[layout.STEP_GRAPH]:
                values[5] = text_of(words[layout.STEP_GRAPH])
        is_open = not words[last]
        if type in (schema.SAMPLE, schema.DRAFT) and 0 < words[layout.RUN_END] < words[first]:
            parent = 0  # it had to wait for the previous result
        problem = error if failed >> child & 1 or is_open else ""
        found.append(
            SpanEnd(
                type,
                layout.child_id(step_id, child),
                step_id,
                layout.child_id(step_id, parent),
                words[first],
                words[last] or end,
                values,
                problem,
            )
        )
    return found


def _figure(word: int) -> int | None:
    return word - 1 if word else None
