"""Prefixes whose keys and values are still in the cache: a radix tree over whole pages of tokens.

    tokens of three requests, page_size 2        the tree; each node has the pages of its tokens
    1 2 3 4 5 6                                  root ─ [1 2 3 4] ─┬─ [5 6]
    1 2 3 4 7 8 9 9                                                └─ [7 8 9 9]
    6 6                                               └ [6 6]

A prefix ends at a whole page, because a page belongs to one node. Requests lock the node their prefix ends
at, which holds all nodes above it too. Unlocked nodes are evicted when memory is needed: leaves first, the
least recently used one before the others. Recency is counted in calls, so that all ranks agree.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence


class Node:
    """Some pages of tokens that follow those of the parent. ``locks`` counts the requests at or below it."""

    __slots__ = ("children", "in_heap", "last_used", "locks", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: list[int], pages: list[int], last_used: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.last_used = last_used
        #: By their first page of tokens.
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.in_heap = False


class PrefixCache:
    """Owns the pages that are inserted, until it evicts them through ``free``."""

    def __init__(self, page_size: int, free: Callable[[list[int]], None]) -> None:
        self.page_size = page_size
        self.root = Node(None, [], [], 0)
        #: Pages in the tree, and the unlocked ones among them.
        self.num_pages = 0
        self.num_evictable = 0
        self._free = free
        self._clock = itertools.count(1)
        self._order = itertools.count()
        #: Unlocked leaves, with their time of insertion here; it may be outdated.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, tokens: Sequence[int]) -> Node:
        """Return the node of the longest cached prefix of ``tokens``: the root if there is none."""
        return self._walk(tokens)[0]

    def pages_of(self, node: Node) -> list[int]:
        """Return the pages of the whole prefix that ends at ``node``."""
        parts = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return [page for part in reversed(parts) for page in part]

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> Node:
        """Insert a prefix of whole pages; returns its last node.

        The pages of the part that was not in the tree belong to the tree from now on. For the rest, its own
        pages stay: see :meth:`pages_of`.
        """
        node, known = self._walk(tokens)
        if known < len(tokens):
            child = Node(
                node, list(tokens[known:]), list(pages[known // self.page_size :]), next(self._clock)
            )
            node.children[self._key(child.tokens)] = child
            self.num_pages += len(child.pages)
            self.num_evictable += len(child.pages)
            self._note_leaf(child)
            node = child
        return node

    def lock(self, node: Node | None) -> None:
        """Lock the prefix that ends at ``node``: none of it is evicted."""
        while node is not None and node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._note_leaf(node)
            node = node.parent

    def evict(self, num_pages: int) -> int:
        """Free up to this number of unlocked pages; returns how many."""
        freed = 0
        while freed < num_pages and self._leaves:
            noted, _, node = heapq.heappop(self._leaves)
            node.in_heap = False
            if node.locks or node.children:
                continue  # it is noted again when that changes
            if node.last_used != noted:
                self._note_leaf(node)
                continue
            parent = node.parent
            assert parent is not None  # the root is never noted
            kept = max(len(node.pages) - (num_pages - freed), 0)
            self._free(node.pages[kept:])
            freed += len(node.pages) - kept
            if kept:
                node.pages, node.tokens = node.pages[:kept], node.tokens[: kept * self.page_size]
                self._note_leaf(node)
            else:
                del parent.children[self._key(node.tokens)]
                self._note_leaf(parent)
        self.num_pages -= freed
        self.num_evictable -= freed
        return freed

    def _walk(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """Return the last node of the longest known prefix, and its length; splits a node if needed."""
        node, known, now = self.root, 0, next(self._clock)
        while (child := node.children.get(self._key(tokens, known))) is not None:
            shared = self._shared(child.tokens, tokens, known)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            child.last_used = now
            node, known = child, known + shared
        return node, known

    def _shared(self, mine: list[int], tokens: Sequence[int], start: int) -> int:
        """Return how many tokens, in whole pages, ``mine`` shares with ``tokens`` from ``start`` on."""
        if mine == list(tokens[start : start + len(mine)]):
            return len(mine)
        size = self.page_size
        for at in range(0, len(mine), size):
            if mine[at : at + size] != list(tokens[start + at : start + at + size]):
                return at
        return len(mine)

    def _split(self, node: Node, length: int) -> Node:
        """Insert a new parent for ``node`` with its first ``length`` tokens. Requests keep their node."""
        parent = node.parent
        assert parent is not None  # the root has no tokens
        count = length // self.page_size
        upper = Node(parent, node.tokens[:length], node.pages[:count], node.last_used)
        upper.locks = node.locks
        parent.children[self._key(upper.tokens)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[length:], node.pages[count:]
        upper.children[self._key(node.tokens)] = node
        return upper

    def _note_leaf(self, node: Node) -> None:
        if node.parent is not None and not (node.locks or node.children or node.in_heap):
            node.in_heap = True
            heapq.heappush(self._leaves, (node.last_used, next(self._order), node))

    def _key(self, tokens: Sequence[int], start: int = 0) -> tuple[int, ...]:
        return tuple(tokens[start : start + self.page_size])
