"""vLLM's room: which of its functions plays which role (roles.py), what each of its processes is
(processes.py), and what of its scheduler no generic observer can translate (scheduler.py). Importing it
imports nothing of the engine.
"""

from sgl_aspects.engines.vllm.roles import VLLM

__all__ = ["VLLM"]
