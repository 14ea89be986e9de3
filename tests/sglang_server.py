"""Earlier name of :mod:`tests.support.sglang_server`, for scripts outside the tree: the same module."""

from __future__ import annotations

import sys

from tests.support import sglang_server

sys.modules[__name__] = sglang_server
