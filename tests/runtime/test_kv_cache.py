"""The key-value cache as a whole: whatever requests do, no slot is lost, and none is anyone else's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_aspects.runtime import SamplingParams
from sgl_aspects.runtime.core import Req
from sgl_aspects.runtime.kv_cache import KVCache, PagedAllocator, PrefixCache, ReqToTokenPool
from sgl_aspects.runtime.kv_cache.pages import pages_of
from sgl_aspects.runtime.kv_cache.prefix_cache import Node
from tests.support.schedulers import Memory

ROWS = 5


def make_cache(size: int, page_size: int, prefix_cache: bool = True) -> KVCache:
    table = ReqToTokenPool(ROWS, size, page_size, torch.device("cpu"))
    return KVCache(PagedAllocator(size, page_size), table, Memory(page_size), prefix_cache=prefix_cache)


def make_req(tokens: list[int]) -> Req:
    return Req("r", tokens, SamplingParams(), random.Random(0))


def compute(cache: KVCache, req: Req, count: int) -> None:
    """Imitate a forward pass: reads all before, writes ``count`` more."""
    tokens = req.tokens_between(0, req.total_tokens)
    row = cache.req_to_token_pool.req_to_token[req.row].tolist()
    for at in range(req.computed_tokens + count):
        slot = row[at]
        assert slot >= cache.page_size, "the padding has an owner"
        if at < req.computed_tokens:
            assert cache.pool.slots[slot] == tuple(tokens[: at + 1]), f"position {at} is another's"
        else:
            cache.pool.slots[slot] = tuple(tokens[: at + 1])
    req.computed_tokens += count


def nodes(cache: PrefixCache) -> list[Node]:
    found, todo = [], [cache.root]
    while todo:
        node = todo.pop()
        found.append(node)
        todo += node.children.values()
    return found[1:]


class CacheMachine(RuleBasedStateMachine):
    """Requests of few different tokens are added, grow, are preempted and end, as in a scheduler."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 24),
        prefix_cache=st.sampled_from([True] * 4 + [False]),
    )
    def begin(self, page_size: int, pages: int, prefix_cache: bool) -> None:
        self.cache = make_cache(pages * page_size, page_size, prefix_cache)
        self.running: list[Req] = []

    @precondition(lambda self: len(self.running) < ROWS)
    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30), reserve=st.integers(0, 8))
    def add(self, tokens: list[int], reserve: int) -> None:
        req = make_req(tokens)
        before = self.cache.available_size()
        if self.cache.add(req, reserve):
            assert req.computed_tokens < len(tokens)
            self.running.append(req)
        else:
            assert self.cache.available_size() == before
            assert not req.pages
            needed = -(-len(tokens) // self.cache.page_size) * self.cache.page_size
            assert needed + reserve > before or len(tokens) + reserve > before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9))
    def step(self, data: st.DataObject, count: int) -> None:
        req = data.draw(st.sampled_from(self.running), label="req")
        if not self.cache.extend(req, req.total_tokens):
            assert self.cache.available_size() < self.cache.page_size
            return
        compute(self.cache, req, min(count, req.total_tokens - req.computed_tokens))
        if data.draw(st.booleans(), label="store"):
            self.cache.store_prefix(req)
        if req.computed_tokens == req.total_tokens < self.cache.total_size:
            req.output_ids.append(data.draw(st.integers(0, 2), label="token"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        req = data.draw(st.sampled_from(self.running), label="req")
        self.running.remove(req)
        self.cache.release(req)

    @rule()
    def forget(self) -> None:
        self.cache.forget_prefixes()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, tree = self.cache, self.cache.prefix_cache
        owned = list(cache.allocator._free)
        for node in nodes(tree):
            owned += node.pages
            assert len(node.tokens) == len(node.pages) * cache.page_size > 0
        for req in self.running:
            owned += req.pages[req.shared_pages :]
            assert req.pages[: req.shared_pages] == tree.pages_of(req.prefix or tree.root)
            row = cache.req_to_token_pool.req_to_token[req.row]
            assert pages_of(row[: len(req.pages) * cache.page_size], cache.page_size) == req.pages
        assert sorted(owned) == list(range(1, cache.allocator.num_pages + 1))

    @invariant()
    def counts_are_what_they_count(self) -> None:
        if not hasattr(self, "cache"):
            return
        tree = self.cache.prefix_cache
        referrers: dict[int, int] = {}
        for req in self.running:
            node = req.prefix
            while node is not None and node.parent is not None:
                referrers[id(node)] = referrers.get(id(node), 0) + 1
                node = node.parent
        everything = nodes(tree)
        assert all(node.locks == referrers.get(id(node), 0) for node in everything)
        assert tree.num_pages == sum(len(node.pages) for node in everything)
        assert tree.num_evictable == sum(len(node.pages) for node in everything if not node.locks)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for req in self.running:
                self.cache.release(req)
            self.running = []
            assert self.cache.available_size() == self.cache.total_size
            self.every_page_has_one_owner()
            self.cache.forget_prefixes()
            assert self.cache.allocator.available_size() == self.cache.total_size


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- one by one --------------------------------------------------------------------------------------


def run_through(cache: KVCache, tokens: list[int]) -> int:
    """A request that is computed and ends; returns what of it was cached."""
    req = make_req(tokens)
    assert cache.add(req, 0)
    cached = req.computed_tokens
    compute(cache, req, len(tokens) - cached)
    cache.release(req)
    return cached


@pytest.mark.parametrize(("page_size", "expected"), [(1, 9), (4, 8), (16, 0)])
def test_a_prompt_finds_what_an_earlier_one_left(page_size: int, expected: int) -> None:
    cache = make_cache(64, page_size)
    assert run_through(cache, list(range(10))) == 0
    assert run_through(cache, list(range(10))) == expected  # the last token is computed always
    assert run_through(cache, [*range(9), 50, 51]) == expected
    assert run_through(cache, [50, *range(9)]) == 0


def test_what_was_used_longest_ago_is_evicted_first() -> None:
    cache = make_cache(32, 4)
    for start in (0, 100, 200):
        run_through(cache, list(range(start, start + 9)))  # two whole pages each, and two are free
    assert run_through(cache, list(range(9))) == 8  # uses the first again
    assert cache.prefix_cache.num_pages == 6
    run_through(cache, list(range(300, 317)))  # five pages: three have to be evicted
    found = {start: cache.prefix_cache.match(list(range(start, start + 8))) for start in (0, 100, 200)}
    assert [len(cache.prefix_cache.pages_of(node)) for node in found.values()] == [2, 0, 1]


def test_requests_that_compute_the_same_at_once_end_up_with_one_copy() -> None:
    cache = make_cache(40, 2)
    reqs = [make_req([1, 2, 3, 4, 5]) for _ in range(3)]
    for req in reqs:
        assert cache.add(req, 0)
        compute(cache, req, 5)
    assert cache.available_size() == 40 - 3 * 6
    for req in reqs:
        cache.store_prefix(req)
    assert cache.available_size() == 40 - 4 - 3 * 2
    assert len({tuple(req.pages[:2]) for req in reqs}) == 1
    for req in reqs:
        cache.release(req)
    assert cache.available_size() == cache.total_size
    assert cache.cached_size() == 4


def test_without_a_prefix_cache_nothing_is_found() -> None:
    cache = make_cache(64, 4, prefix_cache=False)
    assert run_through(cache, list(range(10))) == run_through(cache, list(range(10))) == 0
    assert cache.allocator.available_size() == cache.total_size


def test_eviction_takes_no_more_than_it_must() -> None:
    freed: list[Any] = []
    cache = PrefixCache(2, freed.extend)
    cache.insert([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.evict(1) == 1
    assert freed == [9]
    assert cache.pages_of(cache.match([1, 2, 3, 4, 5, 6])) == [7, 8]
    assert cache.evict(5) == 2
    assert cache.num_pages == cache.num_evictable == 0
