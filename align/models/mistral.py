"""The ``mistral`` preset: every layer has a sliding window, shorter than the longest default prompt.

Computed as :mod:`align.models.qwen3` computes its weights. A query sees ``sliding_window`` tokens, itself among them
(transformers' ``sliding_window_overlay``), so that rows from the position ``sliding_window`` on tell a window that is
ignored, or one token too long, from the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from align.models import qwen3
from align.models.cache import Say

#: Of the default prompts only the longest is cut by it; below lmdeploy's block of 128 tokens, so that it drops none.
WINDOW = 100
#: What only Qwen's configurations have.
_QWEN_ONLY = ("attention_bias", "max_window_layers", "use_sliding_window")

CONFIG: dict[str, Any] = {
    **{key: value for key, value in qwen3.CONFIG.items() if key not in _QWEN_ONLY},
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": WINDOW,
}


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, as MistralForCausalLM has them."""
    for name, shape in qwen3.shapes(config):
        if not name.endswith(("q_norm.weight", "k_norm.weight")):
            yield name, shape


def build(folder: Path, say: Say) -> None:
    """Write the whole checkpoint into an existing empty ``folder``. Takes about a second, 8 MB."""
    qwen3.build(folder, say, config=CONFIG, parameters=shapes)
