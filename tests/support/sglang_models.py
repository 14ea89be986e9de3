"""Model folders for real SGLang: SmolLM2 from its GGUF file, and a small random one for overheads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgl_aspects.runtime.loader.gguf_file import GGUFCheckpoint
from tests.support.tiny_models import make_llama, make_tokenizer


def make_mini(folder: Path) -> Path:
    """A random Llama of four layers with its own small tokenizer: a decode step takes a few milliseconds."""
    make_llama(
        folder, num_hidden_layers=4, hidden_size=128, intermediate_size=256, max_position_embeddings=2048
    )
    return folder


def make_adapter(model: Path, folder: Path) -> Path:
    """A random LoRA adapter of the small model, as PEFT saves them."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, heads in (("q", "num_attention_heads"), ("k", kv := "num_key_value_heads"), ("v", kv)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            width = config[heads] * (config.get("head_dim") or hidden // config["num_attention_heads"])
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden)
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, rank)
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16}
    modules = ["q_proj", "k_proj", "v_proj"]
    more = {"target_modules": modules, "bias": "none", "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **more}))
    return folder


def make_eagle(model: Path, folder: Path) -> Path:
    """A random EAGLE head for the small model: one layer over a token and the hidden state before it."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    tensors = {
        name.removeprefix("model."): tensor
        for file in model.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden) / hidden
    folder.mkdir()
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


def make_diffusion(folder: Path) -> Path:
    """A random Z-Image of a layer with its text encoder and decoder of images: a step takes 10 ms."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    torch.manual_seed(7)
    width, heads = 64, 2
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), pad_token="<|text|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    encoder = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
    )
    of_transformer = {"n_heads": heads, "n_kv_heads": heads, "n_layers": 1, "n_refiner_layers": 1}
    of_transformer |= {"dim": width, "cap_feat_dim": width}
    transformer = ZImageTransformer2DModel(axes_dims=[8, 12, 12], **of_transformer)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    decoder = AutoencoderKL(
        **blocks, block_out_channels=[8, 8], latent_channels=16, norm_num_groups=4, shift_factor=0.1
    )
    pipeline = ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0), decoder, Qwen3Model(encoder), tokenizer, transformer
    )
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    # SGLang has names of its own for these.
    config = folder / "transformer" / "config.json"
    more = {"num_attention_heads": heads, "num_layers": 1}
    config.write_text(json.dumps({**json.loads(config.read_text()), **more}))
    return folder


def make_video_diffusion(folder: Path) -> Path:
    """A random Wan of a layer, for videos, which runs here in diffusers' own pipeline."""
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(7)
    width, heads = 64, 2
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), pad_token="<|text|>", eos_token="<|end|>"
    )
    of_encoder = {
        "vocab_size": len(tokenizer),
        "num_layers": 1,
        "num_heads": heads,
        "is_encoder_decoder": False,
    }
    encoder = UMT5EncoderModel(UMT5Config(d_model=width, d_kv=width // heads, d_ff=128, **of_encoder))
    of_transformer = {"num_attention_heads": heads, "attention_head_dim": 128, "num_layers": 1}
    transformer = WanTransformer3DModel(text_dim=width, ffn_dim=128, **of_transformer)
    decoder = AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipeline = WanPipeline(tokenizer, encoder, decoder, scheduler, transformer)
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    return folder


def hugging_face_folder(gguf: Path, folder: Path, *, dtype: str = "float32") -> Path:
    """Convert the GGUF file to config, tokenizer and safetensors, for transformers and SGLang.

    ``dtype``: "float32" (540 MB for SmolLM2) or "bfloat16" (half of that). Done once: a whole folder is kept.
    """
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = GGUFCheckpoint(gguf)
    target = getattr(torch, dtype)
    tensors = {name: tensor.to(target).contiguous() for name, tensor in checkpoint.weights()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer = checkpoint.load_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    metadata = checkpoint.reader.metadata
    special = {
        f"{kind}_token": tokenizer.backend.id_to_token(metadata[f"tokenizer.ggml.{kind}_token_id"])
        for kind in ("bos", "eos")
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    (folder / "config.json").write_text(json.dumps(_config(checkpoint.config, dtype), indent=2))
    return folder


def _config(config: Any, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": dtype,
    }
