"""KVCache: allocates pages to requests, and keeps their prefixes afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sgl_aspects.runtime.kv_cache.pages import pages_of, slots_of
from sgl_aspects.runtime.kv_cache.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from sgl_aspects.runtime.kv_cache.pages import ReqToTokenPool
    from sgl_aspects.runtime.kv_cache.prefix_cache import Node


class CachedRequest(Protocol):
    """The part of a request that concerns the cache."""

    #: All pages; how many of them, from the first on, are the prefix tree's, and where they end in it.
    pages: list[int]
    shared_pages: int
    prefix: Node | None
    #: Row of ``req_to_token``; -1 while waiting.
    row: int
    #: Tokens whose keys and values are in the cache.
    computed_tokens: int

    @property
    def total_tokens(self) -> int: ...

    def tokens_between(self, start: int, end: int) -> list[int]: ...


class KVCache:
    """The pages of a request are the prefix tree's as far as ``req.shared_pages``, and its own after that.

    Sizes are in tokens. Evictable memory counts as available.
    """

    def __init__(
        self,
        allocator: Any,
        req_to_token_pool: ReqToTokenPool,
        pool: Any,
        *,
        prefix_cache: bool = True,
        clears_pages: bool = True,
    ) -> None:
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.pool = pool
        self.page_size = req_to_token_pool.page_size
        self.total_size: int = allocator.available_size()
        self.prefix_cache = PrefixCache(self.page_size, self._free)
        self._keeps_prefixes = prefix_cache
        # A page of one token is written before it is read; a pool without `clear` begins with zeros.
        self._clears_pages = clears_pages and self.page_size > 1 and hasattr(pool, "clear")

    def available_size(self) -> int:
        free: int = self.allocator.available_size()
        return free + self.prefix_cache.num_evictable * self.page_size

    def cached_size(self) -> int:
        """Tokens in the prefix tree, whether held or not."""
        return self.prefix_cache.num_pages * self.page_size

    def match_prefix(self, req: CachedRequest) -> int:
        """Lock the longest cached prefix for ``req``; returns its number of tokens: never all of them."""
        tokens = req.tokens_between(0, req.total_tokens - 1)
        whole = len(tokens) // self.page_size * self.page_size
        req.prefix = self.prefix_cache.match(tokens[:whole])
        self.prefix_cache.lock(req.prefix)
        req.pages = self.prefix_cache.pages_of(req.prefix)
        req.shared_pages = len(req.pages)
        return req.shared_pages * self.page_size

    def alloc(self, num_tokens: int) -> list[int] | None:
        """Return pages for this number of tokens, evicting cached ones; None if too few can be freed."""
        if num_tokens > self.available_size():
            return None
        short = num_tokens - self.allocator.available_size()
        if short > 0:
            self.prefix_cache.evict(self._pages_for(short))
        slots = self.allocator.alloc(self._pages_for(num_tokens) * self.page_size)
        if slots is None:
            return None
        pages = pages_of(slots, self.page_size)
        if pages and self._clears_pages:
            self.pool.clear(pages)
        return pages

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _free(self, pages: list[int]) -> None:
        if pages:
            self.allocator.free(slots_of(pages, self.page_size))

    def add(self, req: CachedRequest, reserve: int) -> bool:
        """Allocate a row and pages for all tokens of ``req``; False, and nothing allocated, if they leave
        less than ``reserve`` tokens for others.
        """
        cached = self.match_prefix(req)
        wanted = req.total_tokens - cached
        pages = self.alloc(wanted) if wanted + reserve <= self.available_size() else None
        if pages is None:
            self.prefix_cache.unlock(req.prefix)
            req.prefix, req.pages, req.shared_pages = None, [], 0
            return False
        req.pages += pages
        req.row = self.req_to_token_pool.add_row(req.pages)
        req.computed_tokens = cached
        return True

    def extend(self, req: CachedRequest, num_tokens: int) -> bool:
        """Extend the request's pages to ``num_tokens`` tokens; False if memory has run out."""
        missing = num_tokens - len(req.pages) * self.page_size
        if missing <= 0:
            return True
        pages = self.alloc(missing)
        if pages is None:
            return False
        self.req_to_token_pool.set_pages(req.row, len(req.pages), pages)
        req.pages += pages
        return True

    def store_prefix(self, req: CachedRequest) -> None:
        """Insert the request's computed tokens into the tree, for other requests; they stay locked."""
        count = req.computed_tokens // self.page_size
        if not self._keeps_prefixes or count <= req.shared_pages:
            return
        mine = req.pages[:count]
        node = self.prefix_cache.insert(req.tokens_between(0, count * self.page_size), mine)
        self.prefix_cache.lock(node)
        self.prefix_cache.unlock(req.prefix)
        req.prefix, req.shared_pages = node, count
        kept = self.prefix_cache.pages_of(node)
        # If another request inserted the same first, its pages stay.
        twice = [page for page, tree_page in zip(mine, kept) if page != tree_page]
        if twice:
            self._free(twice)
            req.pages[:count] = kept
            self.req_to_token_pool.set_pages(req.row, 0, kept)

    def release(self, req: CachedRequest) -> None:
        """Release the request's memory; its computed tokens stay in the tree until memory is needed."""
        self.store_prefix(req)
        self._free(req.pages[req.shared_pages :])
        self.prefix_cache.unlock(req.prefix)
        self.req_to_token_pool.remove_row(req.row)
        req.row, req.prefix, req.pages, req.shared_pages = -1, None, [], 0

    def forget_prefixes(self) -> None:
        """Evict all unlocked pages: the weights that they were computed with have been replaced."""
        self.prefix_cache.evict(self.prefix_cache.num_evictable)
