"""The paged key-value cache.

pages.py   PagedAllocator and PageTable: which pages are free, which belong to which request
pools.py   MHATokenPool, MLATokenPool, NSATokenPool: the memory itself, by kind of attention
"""

from sgl_aspects.runtime.kv_cache.pages import PagedAllocator, PageTable
from sgl_aspects.runtime.kv_cache.pools import MHATokenPool, MLATokenPool, NSATokenPool, token_bytes

__all__ = ["MHATokenPool", "MLATokenPool", "NSATokenPool", "PageTable", "PagedAllocator", "token_bytes"]
