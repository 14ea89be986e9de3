"""The layout of a ring file, in numbers. The docstring of `sgl_aspects.tracing.record` has it in words."""

from __future__ import annotations

import struct

from sgl_aspects.run.control import OFFSET
from sgl_aspects.run.control import SAMPLE_ALL as SAMPLE_ALL

MAGIC = b"SGLARING"
VERSION = 8
SUFFIX = ".ring"

HEADER_BYTES = 4096
DEFINITIONS_BYTES = 256 << 10
SLOTS_OFFSET = HEADER_BYTES + DEFINITIONS_BYTES
SLOT_BYTES = 256
#: A power of two; smaller if the memory for it is not available.
SLOTS = 1 << 15
FEWEST_SLOTS = 1 << 8

# Words of the header: unsigned 64-bit numbers, by index.
(
    WORD_MAGIC,
    WORD_VERSION,
    WORD_PROCESS_ID,
    WORD_STARTED_NS,
    WORD_CLOCK_OFFSET_NS,
    WORD_SLOTS,
    WORD_SLOT_BYTES,
    WORD_DEFINITIONS_OFFSET,
    WORD_SLOTS_OFFSET,
) = range(9)
WORD_DEFINITIONS_END = 16  # the rest: written while the ring is in use, first by the writer
WORD_DROPPED = 17
WORD_CLOSED = 18
WORD_DETACHING_NS = 19
WORD_TAKEN, WORD_DELIVERED = 24, 25  # by the collector
WORD_LEVEL = OFFSET // 8  # written by `sgl-aspects control`
WORD_SAMPLE = 34
#: Values of WORD_CLOSED: the process has ended; the process was detached from and lives on.
CLOSED, DETACHED = 1, 2

#: The header's open steps: blocks of a slot's size, from this word to the header's end.
OPEN_STEPS_WORD = 64
OPEN_STEPS = (HEADER_BYTES // 8 - OPEN_STEPS_WORD) // (SLOT_BYTES // 8)

# Kinds of records: the first byte of a slot. 0: the slot is empty.
KIND_RECORD, KIND_STEP = 1, 2

#: A record's slot: kind; this part's number, and the number of parts; bytes and checksum of the whole; the
#: number of the first part's slot; the part; the mark, which is the slot's number.
PART_BYTES = SLOT_BYTES - 32
SLOT_HEAD = struct.Struct("<BxHHxxIIQ")
SLOT = struct.Struct(f"{SLOT_HEAD.format}{PART_BYTES}sQ")
MOST_PARTS = (1 << 16) - 1
MARK = struct.Struct("<Q")
MARK_OFFSET = SLOT_BYTES - 8


# -- a step: one record for all of its spans ------------------------------------------------------------

#: The words of a step, in its block of the header while it is open and in its slot when it has ended.
#: Times are nanoseconds, 0: not yet. ``GROUP``: the group record with this key holds the links.
(
    STEP_HEAD,
    STEP_SPAN_ID,
    STEP_GROUP,
    SCHEDULE_START,
    SCHEDULE_END,
    RUN_START,
    RUN_END,
    FORWARD_START,
    FORWARD_END,
    SAMPLE_START,
    SAMPLE_END,
    PROCESS_START,
    PROCESS_END,
    STEP_MODE,
    STEP_SIZE,
    STEP_TOKENS,
    STEP_NUMBER,
    STEP_WAITING,
    STEP_RUNNING,
    STEP_KV_USAGE,
    STEP_DEVICE_TIME,
    STEP_GRAPH,
    STEP_DEVICE_NAME,
    STEP_ERROR,
    STEP_DRAFTED,
    STEP_ACCEPTED,
    DRAFT_START,
    DRAFT_END,
    DRAFT_EXTEND_START,
    DRAFT_EXTEND_END,
) = range(STEP_FIELDS := 30)  # one more word is free before the mark
STEP_WORDS = SLOT_BYTES // 8
#: Those that are times.
STEP_TIMES = (*range(SCHEDULE_START, PROCESS_END + 1), *range(DRAFT_START, DRAFT_EXTEND_END + 1))
#: Figures are stored plus one, so that 0 is "unknown": numbers, nanoseconds, and the usage in millionths.
KV_USAGE_UNIT = 1_000_000

#: The spans of a step by number: in their ids, and as bits of ``STEP_HEAD``, above its kind.
FAILED_SHIFT = 8
CHILD_SCHEDULE, CHILD_RUN_BATCH, CHILD_FORWARD, CHILD_SAMPLE, CHILD_PROCESS_RESULT = range(1, 6)
CHILD_DRAFT, CHILD_DRAFT_EXTEND = 6, 7
#: Ids are counted below this bit; a step's id and a child's number above it make the child's id.
CHILD_SHIFT = 60

#: Queues and KV usage are read at most this often while no request begins or ends: it takes 20 µs.
READING_NS = 200_000_000
#: The mask of a count of passes: how often the stream of the engine's passes is looked up.
PASSES_PER_STREAM = 63
#: Cap on batches in flight: the result of the oldest will never be processed.
MOST_IN_FLIGHT = OPEN_STEPS - 2
#: Cap on steps whose device time is not known yet, though their result is.
MOST_LATE = 8
#: A pair of the device's events takes the host 6 to 20 µs. Below level 4, graph replays shorter than this are
#: timed once in ``UNTIMED_REPLAYS + 1`` (which is a mask).
SHORT_REPLAY_NS = 10_000_000
UNTIMED_REPLAYS = 7


def child_id(step_id: int, child: int) -> int:
    """The span id of a step's child, derived from the step's."""
    return step_id | child << CHILD_SHIFT
