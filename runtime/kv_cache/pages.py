"""The slots of the key-value cache: which are free, and which hold the tokens of which request.

    req_to_token, one row for each running request        pool, page_size 4 (slots 0 1 2 3 | 4 5 6 7 | ...)
    row 0 │ 12 13 14 15 20 21 22 23   six tokens           page 0 │ padding: never handed out
    row 1 │  4  5  6  7  0  0  0  0   two tokens           page 1 │ k0 k1 .. ..   row 1
    row 2 │  0  0  0  0  0  0  0  0   free                 page 2 │ free
                                                           page 3 │ k0 k1 k2 k3   row 0
    The token at position p of a row lives in              page 4 │ free
    slot = req_to_token[row, p]                            page 5 │ k4 k5 .. ..   row 0

Memory is handed out in whole pages. Rows end in zeros, so that a step can take the same number of slots from
each row and mask values from the padding. All layers share the table; each has its own keys and values in the
same slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_aspects.platforms import current_platform


class PagedAllocator:
    """Hands out slots in whole pages of ``page_size`` tokens. Sizes are in tokens.

    Made with the arguments that SGLang gives. ``device``: where the slots are returned; ``kvcache``: the pool
    that they belong to. Slots begin at ``page_size``: the first page is padding.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        kvcache: Any = None,
        need_sort: bool = False,
    ) -> None:
        self.page_size = page_size
        self.num_pages = size // page_size
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Take everything back."""
        #: Free pages, the next one last; low numbers first, so that a quiet engine touches little memory.
        self._free = list(range(self.num_pages, 0, -1))

    def available_size(self) -> int:
        """Tokens that can be allocated now."""
        return len(self._free) * self.page_size

    def alloc(self, need_size: int) -> Tensor | None:
        """Return ``need_size`` slots, a multiple of the page size, page by page; None, and nothing allocated,
        if there are not enough.
        """
        count = need_size // self.page_size
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return slots_of(pages, self.page_size).to(self.device)

    def free(self, free_index: Tensor) -> None:
        """Take back the pages that these slots are in."""
        self._free.extend(reversed(pages_of(free_index, self.page_size)))


def slots_of(pages: list[int], page_size: int) -> Tensor:
    """Return the slots of ``pages``, int64 on the host, in their order."""
    first = torch.tensor(pages, dtype=torch.int64, device="cpu").mul_(page_size)
    return (first[:, None] + torch.arange(page_size, device="cpu")).flatten()


def pages_of(slots: Tensor, page_size: int) -> list[int]:
    """Return the pages of slots, each once, in their order."""
    return list(dict.fromkeys((slots // page_size).tolist()))


def copy_to(target: Tensor, numbers: Tensor) -> None:
    """Copy numbers from the host into a tensor, asynchronously where possible."""
    if current_platform.is_pin_memory_available():
        numbers = numbers.pin_memory()
    target.copy_(numbers, non_blocking=True)


class ReqToTokenPool:
    """Rows of slots on the device: ``req_to_token[row, i]``, int32, is the slot of the row's token i."""

    def __init__(self, rows: int, max_tokens: int, page_size: int, device: torch.device) -> None:
        tokens = -(-max_tokens // page_size) * page_size
        self.page_size = page_size
        #: One row more than there are requests: always empty, for the padding of captured batches.
        self.req_to_token = torch.zeros(rows + 1, tokens, dtype=torch.int32, device=device)
        self.padding_row = rows
        self._free_rows = list(range(rows - 1, -1, -1))

    def add_row(self, pages: list[int]) -> int:
        row = self._free_rows.pop()
        self.set_pages(row, 0, pages)
        return row

    def set_pages(self, row: int, start: int, pages: list[int]) -> None:
        """Put the slots of ``pages`` into a row from its page number ``start`` on."""
        begin, end = start * self.page_size, (start + len(pages)) * self.page_size
        copy_to(self.req_to_token[row, begin:end], slots_of(pages, self.page_size).int())

    def remove_row(self, row: int) -> None:
        self.req_to_token[row] = 0
        self._free_rows.append(row)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return [tokens], int64: the slot of the token at each position of each row."""
        return self.req_to_token[rows, positions].long()

    def pages(self, rows: Tensor, count: int) -> Tensor:
        """Return [rows, count]: the first pages of each row."""
        return self.req_to_token[:, : count * self.page_size : self.page_size][rows] // self.page_size
