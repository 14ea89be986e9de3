"""The paged key-value cache.

pages.py         PagedAllocator and PageTable: free pages, and the pages of each request
pools.py         MHATokenPool, MLATokenPool, NSATokenPool: the memory itself, by kind of attention
prefix_cache.py  PrefixCache: the prefixes in the cache
states.py        StatePool: the states of layers without keys and values
manager.py       KVCache: allocation for requests
"""

from sgl_aspects.runtime.kv_cache.manager import KVCache
from sgl_aspects.runtime.kv_cache.pages import PagedAllocator, PageTable
from sgl_aspects.runtime.kv_cache.pools import MHATokenPool, MLATokenPool, NSATokenPool, token_bytes
from sgl_aspects.runtime.kv_cache.prefix_cache import PrefixCache
from sgl_aspects.runtime.kv_cache.states import StatePool

__all__ = [
    "KVCache",
    "MHATokenPool",
    "MLATokenPool",
    "NSATokenPool",
    "PageTable",
    "PagedAllocator",
    "PrefixCache",
    "StatePool",
    "token_bytes",
]
