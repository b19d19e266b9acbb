"""Where both engines compute the same thing: the object whose ``forward`` a fault of an operator changes.

Objects, not classes: an engine may have bound a class's methods when its model was built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.probe.patch import PatchContext

#: Part of a decoder layer → attributes that lead to it; of lmdeploy, of vLLM where it differs.
_PARTS: dict[str, tuple[str, str]] = {
    "attn_norm": ("input_layernorm", ""),
    "qkv": ("self_attn.qkv_proj", ""),
    "q_norm": ("self_attn.q_norm", ""),
    "k_norm": ("self_attn.k_norm", ""),
    "rope": ("self_attn.apply_rotary_pos_emb", "self_attn.rotary_emb"),
    "attention": ("self_attn.attn_fwd", "self_attn.attn"),
    "o": ("self_attn.o_proj", ""),
    "mlp_norm": ("post_attention_layernorm", ""),
    "gate_up": ("mlp.gate_up_proj", ""),
    "act": ("mlp.act_fn", ""),
    "down": ("mlp.down_proj", ""),
}


def module(ctx: PatchContext, layer: int, part: str) -> Any:
    """The module of a part of a layer, which holds its weights.

    Raises:
        KeyError, AttributeError, IndexError: there is no such part or layer.
    """
    lmdeploy, vllm = _PARTS[part]
    found = ctx.model.model.layers[layer]
    for name in (lmdeploy if ctx.engine == "lmdeploy" else vllm or lmdeploy).split("."):
        found = getattr(found, name)
    return found


def operator(ctx: PatchContext, layer: int, part: str) -> Any:
    """The object whose ``forward`` computes a part of a layer: the backend's, behind the module."""
    found = module(ctx, layer, part)
    return getattr(found, "impl", found)


def final_norm(ctx: PatchContext) -> Any:
    """The object whose ``forward`` norms the last layer's output."""
    found = ctx.model.model.norm
    return getattr(found, "impl", found)


def change_output(ctx: PatchContext, owner: Any, change: Callable[[Tensor], Tensor], result: int = 0) -> None:
    """Let ``change`` have what ``owner.forward`` computed, written back in place: engines hand buffers on.

    Args:
        result: which one, of several.
    """
    original = owner.forward

    @functools.wraps(original)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        computed = original(*args, **kwargs)
        one = computed[result] if isinstance(computed, tuple) else computed
        if ctx.step >= 0:
            one.copy_(change(one))
        return computed

    ctx.replace(owner, "forward", wrong)


def rows_of(ctx: PatchContext, request: int) -> slice:
    """Token rows of the ``request``-th request of the batch that runs; none where there are fewer requests."""
    start = 0
    for at, row in enumerate(ctx.rows):
        if at == request:
            return slice(start, start + row.count)
        start += row.count
    return slice(0, 0)


def by_token(ctx: PatchContext, tensor: Tensor) -> Tensor:
    """The same memory as ``[num_tokens, …]``, all else of a token in one axis."""
    return tensor.view(sum(row.count for row in ctx.rows), -1)


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """With so many bits of mantissa, rounded to nearest even, as a format with fewer bits has them."""
    scale = 2.0 ** (23 - bits)
    value = tensor.float()
    shifted = value * (scale + 1)
    return (shifted - (shifted - value)).to(tensor.dtype) if torch.is_floating_point(tensor) else tensor
