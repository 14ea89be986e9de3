"""The paged key-value cache.

pages.py         PagedAllocator and ReqToTokenPool: free pages, and the slots of each request
pools.py         MHATokenPool, MLATokenPool, NSATokenPool: the memory itself, by kind of attention
prefix_cache.py  PrefixCache: the prefixes in the cache
manager.py       KVCache: allocation for requests
"""

from sgl_aspects.runtime.kv_cache.manager import KVCache
from sgl_aspects.runtime.kv_cache.pages import PagedAllocator, ReqToTokenPool
from sgl_aspects.runtime.kv_cache.pools import MHATokenPool, MLATokenPool, NSATokenPool, token_bytes
from sgl_aspects.runtime.kv_cache.prefix_cache import PrefixCache

__all__ = [
    "KVCache",
    "MHATokenPool",
    "MLATokenPool",
    "NSATokenPool",
    "PagedAllocator",
    "PrefixCache",
    "ReqToTokenPool",
    "token_bytes",
]
