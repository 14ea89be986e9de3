"""Speculative decoding: a step's and a request's drafts, and the functions that draft.

The scheduler counts for each request how often its drafts were verified and how many tokens were right each
time: these are read when it ends. A step's are in its result once the scheduler has resolved it. Verifying
feeds the model the draft's tokens and the one before them, whose successor is right in any case.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

from sgl_aspects.engines.base import Drafts, Role

_WORKERS = "sglang.srt.speculative"


def verified(result: Any) -> tuple[int, int] | None:
    """Return the drafted tokens of a batch, and how many were accepted."""
    each = getattr(result, "num_correct_drafts_per_req_cpu", None)
    if each is None:
        return None
    width = getattr(result, "speculative_output_stride", None) or result.speculative_num_draft_tokens
    drafted = width - getattr(result, "num_non_draft_tokens_per_req", 1)
    return drafted * len(each), sum(each)


DRAFTS = Drafts(
    each="num_correct_drafts_per_req_cpu",
    width="speculative_num_draft_tokens",
    unless="speculative_output_stride",
)


def drafts(req: Any) -> tuple[int, list[int]] | None:
    """Return a request's drafted tokens so far, and those accepted at each position.

    None without drafts, and in versions that have no such counts.
    """
    count, histogram = (
        getattr(req, f"spec_{name}", None) for name in ("verify_ct", "correct_drafts_histogram")
    )
    get_spec = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_spec", None)
    if not count or histogram is None or get_spec is None:
        return None
    width: int = get_spec().speculative_num_draft_tokens
    # The histogram has, for each number of right tokens, how often a draft had as many.
    at_least = [*accumulate(reversed(histogram))]
    return count * (width - 1), at_least[-2::-1]


def output_tokens(req: Any) -> int:
    """Return the tokens of a request's answer: of a beam search those of all beams that it returns.

    Those of its last draft may go beyond its end.
    """
    group: Any = getattr(req, "beam_group", None)
    if beams := getattr(group, "final_results", None):
        return sum(len(beam.tokens) for beam in beams[: group.num_return])
    end = getattr(req, "finished_len", None)
    return len(req.output_ids if end is None else req.output_ids[:end])


ROLES = {
    "draft": Role((f"{_WORKERS}.*:*DraftWorker.draft",)),
    "draft_extend": Role((f"{_WORKERS}.*:*DraftWorker._draft_extend_for_*",)),
    "draft_search": Role((f"{_WORKERS}.ngram_worker:NGRAMWorker._prepare_draft_tokens",)),
}
