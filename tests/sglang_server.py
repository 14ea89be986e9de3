"""The earlier place of :mod:`tests.support.sglang_server`: scripts outside the tree import it from here."""

from __future__ import annotations

from tests.support.sglang_server import Server, serve

__all__ = ["Server", "serve"]
