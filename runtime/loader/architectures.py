"""The class of each architecture, by name: nothing is imported before a model is built."""

from __future__ import annotations

from typing import Any

from sgl_aspects.platforms import resolve_qualified_name

#: Architecture, as config.json names it, to the qualified name of its class here.
MODELS: dict[str, str] = {
    "DeepseekV2ForCausalLM": "sgl_aspects.runtime.models.deepseek:DeepseekForCausalLM",
    "DeepseekV3ForCausalLM": "sgl_aspects.runtime.models.deepseek:DeepseekForCausalLM",
    "DeepseekV32ForCausalLM": "sgl_aspects.runtime.models.deepseek:DeepseekForCausalLM",
    "GemmaForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "LlamaForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "Qwen3MoeForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
}


def known_architectures() -> list[str]:
    return sorted(MODELS)


def model_class(architecture: str) -> Any:
    """Return the class of an architecture that ``config.json`` may name."""
    return resolve_qualified_name(MODELS[architecture])
