"""The flight recorder: a memory-mapped file of fixed-size records, its writer and its reader.

Each traced process has one file, ``<pid>-<random>.ring`` (mode 0600), in the folder of its run. The process
maps it and writes; the collector reads with ``pread``; the file outlives its writer. Numbers are
little-endian, words have 64 bits. Times are nanoseconds of the monotonic clock; plus the clock offset, taken
once for a run, they are Unix time. This is version 8: a reader refuses any other. `format` has the same
numbers as constants.

======== ============================================
bytes    contents
======== ============================================
0        header, 512 words
4096     definitions, 256 KiB, only appended to
266240   slots of 256 bytes, a power of two of them
======== ============================================

Header, by word:

======== =========== =========================================================================================
words    written by  contents
======== =========== =========================================================================================
0-8      writer      once: ``SGLARING``; version; process id; time of making; clock offset (signed); number of
                     slots; bytes of a slot; offset of the definitions; offset of the slots
16       writer      bytes of definitions, stored after the definition itself
17       writer      records dropped because every slot was taken
18       writer      1: ended in order; 2: detached from, the process goes on untraced
19       writer      time since which its hooks are being removed; 0: they are not
24, 25   collector   last record whose slot is free again; last one that every exporter has taken or given up
32-34    control     level (0: off), in its second byte 1 if there is a request, which the writer takes away;
                     level to return to after off; sampled share of requests x 2**32
64-511   writer      14 blocks of 32 words, the open steps; a block whose first word is 0 is free
======== =========== =========================================================================================

The writer holds a write lock on the open file: if no lock is there (``F_GETLK``), the writer is gone. The
folder's file ``control`` has words 32-34 as of the last `sgl-aspects control`, for processes that start
later.

Definitions are numbered from 1. Each is a 32-bit length and that many bytes of JSON: a text, a type of spans,
``[name, {attribute: type}]``, or what the process says of itself, ``{attribute: value}``. One that does not
parse still counts.

Slot number n, from 1, lies at n modulo the number of slots. Its last word, the mark, is n and is written
last: a slot with another mark is not finished, or is older. A reader checks marks first and reads the records
after that. A writer uses a slot again only when its record was taken; until then it drops the new record and
counts it. The first byte is the kind: 2 for a step, 1 for a part of another record:

======== ==================================================================================
byte     contents
======== ==================================================================================
2, 4     number of this part from 0, number of parts (16 bits each)
8, 12    the record's bytes and their CRC-32 (32 bits each)
16       slot number of the first part; parts of other records may lie between
24-247   the part
248      the mark
======== ==================================================================================

The parts together are a tuple in the format of CPython's ``marshal``, version 2. ``attributes`` is a
dictionary whose keys are numbers of definitions, or names where the definitions were full:

- a whole span: number of its type, span id, root id, parent id, start, end, values in the order of the type,
  error, links
- ``"begin"``, number of the type, span id, root id, parent id, start
- ``"request"``, span id, request id, start, trace id, parent id, sampled, trace state, whether the parent is
  remote, name, attributes: a request was received
- ``"sent"``, span id: it is about to leave this process
- ``"seen"``, key, request id, time: another process got it, and calls it key
- ``"elsewhere"``, key, trace id, span id, sampled: another host's request came with its span
- ``"process"``, attributes: the process's rank, its server's model
- ``"group"``, key, links: the requests that steps with this group link to

``marshal`` can crash on damaged input: decode only files of this user whose checksum is right, and only the
kinds above.

A step is one record, of which a reader makes up to eight spans. While it runs its words are in a block of the
header; when its result was processed the block, but for the mark, is copied into a slot. 0 is "not yet" or
"unknown":

======== ===================================================================================================
word     contents
======== ===================================================================================================
0        the kind; bits 9 to 15: spans the error went through, in the order of words 3-12, 26-29
1, 2     span id (0: no span, metrics only); key of its group of requests
3-12     start and end of schedule, run_batch, forward, sample, process_result; the step ends with word 12
13       number of the text of its mode
14-18    plus one: batch size, tokens, the engine's number of the step, requests waiting, running
19, 20   plus one: KV cache in use (millionths), device time of the forward pass
21-23    numbers of texts: how the graph was run, the device's name, the error
24, 25   plus one: tokens drafted for the batch, and accepted
26-29    start and end of draft, draft_extend
======== ===================================================================================================

The id of a span in a step is the step's, with the span's number (1 to 7) from bit 60 on; other ids stay below
bit 60. ``forward``, ``sample`` and the drafts are children of ``run_batch``, or of the step where they began
after it.

A record missing between two others was not finished: while its process lives, a reader waits for it for some
seconds. Freed records stay until they are overwritten: `sgl-aspects dump` and a restarted collector read
them.
"""
