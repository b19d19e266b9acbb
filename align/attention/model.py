"""What the rules may know of a call beyond its arguments: the model's configuration, the layout and the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from align.checkpoints.table import structure_of
from align.fa.call import Context
from align.fa.files import Step
from align.oracle.facts import facts_of

#: Of a configuration with latent attention: its scale and head dimension depend on how the engine absorbs weights.
_LATENT = "kv_lora_rank"


@dataclass(frozen=True)
class Model:
    """Facts of one model in one layout; ``None`` where the configuration does not tell.

    Attributes:
        ranks: tensor-parallel size of attention.
        dtype: that it computes in, ``bfloat16``.
        windows: of each layer the keys that a query sees, 0 for all.
    """

    ranks: int = 1
    dtype: str = ""
    scale: float | None = None
    eps: float | None = None
    head_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if layer < len(self.windows) else None

    def context(self, step: Step, window: int | None) -> Context:
        """Of the layers with this window, in a step."""
        return Context(
            phase=step.phase,
            causal=True,
            window=window,
            # Nothing is drafted ahead where a decode computes one token.
            next_n=0 if step.phase == "decode" and all(row.count == 1 for row in step.rows) else None,
            q_lens=tuple(row.count for row in step.rows),
            kv_lens=tuple(row.start + row.count for row in step.rows),
            scale=self.scale,
            eps=self.eps,
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ranks=self.ranks,
            dtype=self.dtype,
            device="npu",
        )


def model_of(config: Mapping[str, Any], ranks: int, dtype: str) -> Model:
    """Read a configuration; a model without a table of checkpoints leaves most unknown."""
    try:
        structure = structure_of(config, ranks)
        facts = facts_of(config, structure)
    except (ValueError, KeyError, TypeError):
        return Model(ranks, dtype)
    latent = bool(config.get(_LATENT))
    return Model(
        ranks=ranks,
        dtype=dtype,
        scale=None if latent else facts.scale,
        eps=structure.eps,
        head_dim=None if latent else structure.head_dim,
        heads=structure.heads,
        kv_heads=None if latent else structure.kv_heads,
        windows=tuple(None if one.why else one.size or 0 for one in facts.windows),
    )
