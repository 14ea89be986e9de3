"""The room of transformers' server, `transformers serve`, with and without continuous batching."""

from sgl_aspects.engines.transformers.roles import TRANSFORMERS

__all__ = ["TRANSFORMERS"]
