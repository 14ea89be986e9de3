"""The pages of the key-value cache: which are free, and which belong to which request.

    page table, one row for each running request          pool, page_size 4 (slots 0 1 2 3 | 4 5 6 7 | ...)
    row 0 │ 3 5 0 0   six tokens: page 3 full, 5 half      page 0 │ padding: never handed out
    row 1 │ 1 0 0 0   two tokens of page 1                 page 1 │ k0 k1 .. ..   row 1
    row 2 │ 0 0 0 0   free                                 page 2 │ free
                                                           page 3 │ k0 k1 k2 k3   row 0
    The token at position p of a row lives in              page 4 │ free
    slot = row[p // page_size] * page_size + p % page_size page 5 │ k4 k5 .. ..   row 0

Rows end in zeros, so that a step can take the same number of pages from each row and mask values from page 0.
All layers share one page table; each has its own keys and values in the same slots.
"""

from __future__ import annotations

import torch

from sgl_aspects.platforms import current_platform


class PagedAllocator:
    """Hands out pages of ``page_size`` tokens. Sizes are in tokens."""

    def __init__(self, size: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = size // page_size
        #: Free pages, the next one last; low numbers first, so that a quiet engine touches little memory.
        self._free = list(range(self.num_pages, 0, -1))

    @property
    def total_size(self) -> int:
        return self.num_pages * self.page_size

    def available_size(self) -> int:
        return len(self._free) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def alloc(self, num_tokens: int) -> list[int] | None:
        """Allocate pages for ``num_tokens`` tokens; None, and nothing allocated, if there are not enough."""
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return pages

    def free(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def copy_to(target: torch.Tensor, numbers: list[int]) -> None:
    """Copy whole numbers into a tensor, asynchronously where possible."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if current_platform.is_pin_memory_available():
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)


class PageTable:
    """Rows of page numbers on the device: ``table[row, i]`` is the page of tokens i * page_size and on."""

    def __init__(self, rows: int, max_tokens: int, page_size: int, device: torch.device) -> None:
        pages = -(-max_tokens // page_size)
        self.page_size = page_size
        #: One row more than there are requests: always empty, for the padding of captured batches.
        self.table = torch.zeros(rows + 1, pages, dtype=torch.int64, device=device)
        self.padding_row = rows
        self._free_rows = list(range(rows - 1, -1, -1))

    def add_row(self, pages: list[int]) -> int:
        row = self._free_rows.pop()
        self.set_pages(row, 0, pages)
        return row

    def set_pages(self, row: int, start: int, pages: list[int]) -> None:
        """Put ``pages`` into a row from its page number ``start`` on."""
        copy_to(self.table[row, start : start + len(pages)], pages)

    def remove_row(self, row: int) -> None:
        self.table[row] = 0
        self._free_rows.append(row)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [tokens]: the slot of the token at each position of each row."""
        page_size = self.page_size
        if page_size == 1:
            return self.table[rows, positions]
        offsets = positions % page_size
        return self.table[rows, positions // page_size].mul_(page_size).add_(offsets)
