"""The presets, one row each: what is built, by whom, and under which key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.models import gemma2, mistral, qwen3, qwen_moe, smollm2
from align.models.cache import Say, build_once, models_dir
from align.models.text import TEXTS

#: Raised by one whenever a builder changes what it writes in a way that the recipes below do not show.
RECIPE_VERSION = 1


@dataclass(frozen=True)
class Preset:
    """A checkpoint that this project can build.

    Attributes:
        name: what ``MODEL=`` says.
        summary: one line for lists.
        recipe: everything that decides the files' content; its hash is part of the directory's name.
        build: writes the checkpoint into an existing empty directory.
    """

    name: str
    summary: str
    recipe: dict[str, Any]
    build: Callable[[Path, Say], None]

    @property
    def key(self) -> str:
        """12 hex digits; another recipe never meets the files of this one."""
        content = json.dumps([RECIPE_VERSION, self.name, self.recipe], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def path(self) -> Path:
        """Where the finished checkpoint lies (or will lie)."""
        return models_dir() / f"{self.name}-{self.key}"

    def ensure(self, say: Say) -> Path:
        """Return the checkpoint's directory, built first if need be.

        Raises:
            UserError: disk full, directory not writable, or a source that is not installed.
        """
        if not self.path.is_dir():
            say(f"building {self.name} in {self.path}")
        return build_once(self.path, lambda folder: self.build(folder, say))


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "qwen3",
            "tiny seeded Qwen3 (4 layers, 4 heads, 2 kv heads, head_dim 128, q/k norm), built locally",
            {
                "seed": qwen3.SEED,
                "config": qwen3.CONFIG,
                "generation": qwen3.GENERATION_CONFIG,
                "template": qwen3.CHAT_TEMPLATE,
                "prompts": qwen3.PROMPT_LENGTHS,
            },
            qwen3.build,
        ),
        Preset(
            "qwen3-mqa",
            "the same with 1 kv head, of which every rank holds a copy, and a vocabulary of 1000 that engines pad",
            {
                "seed": qwen3.SEED,
                "config": qwen3.MQA_CONFIG,
                "generation": qwen3.GENERATION_CONFIG,
                "template": qwen3.CHAT_TEMPLATE,
                "prompts": qwen3.PROMPT_LENGTHS,
            },
            qwen3.build_mqa,
        ),
        *(
            Preset(
                name,
                summary,
                {
                    "seed": qwen3.SEED,
                    "config": config,
                    "generation": qwen3.GENERATION_CONFIG,
                    "template": qwen3.CHAT_TEMPLATE,
                    "prompts": qwen3.PROMPT_LENGTHS,
                },
                build,
            )
            for name, summary, config, build in (
                (
                    "qwen3-moe",
                    "tiny seeded Qwen3-MoE (4 layers of 8 experts, 2 for each token, weights renormalised)",
                    qwen_moe.QWEN3_MOE_CONFIG,
                    qwen_moe.build_qwen3_moe,
                ),
                (
                    "qwen2-moe",
                    "the same as Qwen2-MoE: biases, weights not renormalised, a gated shared expert beside the routed",
                    qwen_moe.QWEN2_MOE_CONFIG,
                    qwen_moe.build_qwen2_moe,
                ),
                (
                    "mistral",
                    f"tiny seeded Mistral (4 layers, 4 heads, 2 kv heads), a sliding window of {mistral.WINDOW} tokens",
                    mistral.CONFIG,
                    mistral.build,
                ),
            )
        ),
        Preset(
            "gemma2",
            f"tiny seeded Gemma 2 (4 layers, 4 heads, 2 kv heads), attention scaled by 1/sqrt({gemma2.SCALAR})",
            {
                "seed": gemma2.SEED,
                "config": gemma2.CONFIG,
                "norms": [gemma2.BEFORE, gemma2.BEHIND],
                "generation": qwen3.GENERATION_CONFIG,
                "template": qwen3.CHAT_TEMPLATE,
                "prompts": qwen3.PROMPT_LENGTHS,
            },
            gemma2.build,
        ),
        Preset(
            "smollm2",
            f"SmolLM2-135M-Instruct, converted from the package {smollm2.PACKAGE} {smollm2.VERSION}",
            {"gguf": smollm2.GGUF_SHA256, "texts": list(TEXTS.items())},
            smollm2.build,
        ),
    )
}
