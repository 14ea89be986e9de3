"""Attach, trace, replace: any function of an LLM inference engine, without editing the engine."""

from sgl_aspects._version import __version__

__all__ = ["__version__"]
