"""Engine rooms, one per engine: which function plays which role, and how to read its attributes.

All code specific to an engine is in its room. ``engines/NAME/plugin.py``, where there is one, has an
``activate()`` that each process calls before the plugins; what it returns is called once their hooks are in
place. A room in a package of its own registers these as an entry point of group ``sgl_aspects.plugins``.
"""

from sgl_aspects.engines.base import Engine, Outcome, Role
from sgl_aspects.engines.contract import Observation
from sgl_aspects.engines.discovery import find_engines
from sgl_aspects.engines.embedded import EMBEDDED
from sgl_aspects.engines.sglang.diffusion import SGLANG_DIFFUSION
from sgl_aspects.engines.sglang.roles import SGLANG
from sgl_aspects.engines.transformers import TRANSFORMERS
from sgl_aspects.engines.vllm import VLLM

#: The engines whose rooms are in this package.
BUILT_IN: tuple[Engine, ...] = (EMBEDDED, SGLANG, SGLANG_DIFFUSION, TRANSFORMERS, VLLM)

__all__ = [
    "BUILT_IN",
    "EMBEDDED",
    "SGLANG",
    "SGLANG_DIFFUSION",
    "TRANSFORMERS",
    "VLLM",
    "Engine",
    "Observation",
    "Outcome",
    "Role",
    "find_engines",
]
