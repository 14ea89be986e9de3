"""Prefill and decode on two servers: the number that both have of a request, to derive its trace.

Connectors put it into ``kv_transfer_params``: mooncake and MoRIIO one ``transfer_id`` on both servers; NIXL
gives the decode server the prefill server's request id (``remote_request_id``).
"""

from __future__ import annotations

import hashlib
from typing import Any


def _parameters(request: Any) -> dict[str, Any]:
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    found = extra.get("kv_transfer_params")
    return found if isinstance(found, dict) else {}


def is_first_server(request: Any) -> bool:
    """Return whether the request's prompt is prefilled here, and its answer decoded elsewhere."""
    return bool(_parameters(request).get("do_remote_decode"))


def shared_key(request: Any) -> int | None:
    """Return a number that both servers can derive; None if there is no other server or no such number."""
    parameters = _parameters(request)
    shared = parameters.get("transfer_id") or parameters.get("remote_request_id")
    if not shared and parameters.get("do_remote_decode"):
        shared = request.request_id
    if not shared:
        return None
    return int.from_bytes(hashlib.blake2b(str(shared).encode(), digest_size=7).digest(), "big")
