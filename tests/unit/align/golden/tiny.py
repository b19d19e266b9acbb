"""Small random checkpoints of each dense architecture, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from align.models.info import ModelInfo, read_info

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def build(folder: Path, architecture: str, **changes: Any) -> ModelInfo:
    """``Llama``, ``Qwen2`` (its projections have biases) or ``Qwen3``, in bfloat16; norms are not all ones."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return read_info(folder)
