"""vLLM's room: roles.py maps functions to roles, processes.py describes its processes, and scheduler.py
observes what no generic observer can read of its scheduler. Importing it imports nothing of the engine.
"""

from sgl_aspects.engines.vllm.roles import VLLM

__all__ = ["VLLM"]
