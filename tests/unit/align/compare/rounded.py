"""The forward of the tiny Qwen3 preset in two numerics that both are right: a source of clean noise."""

from __future__ import annotations

import torch

from align.checkpoints.table import Structure, structure_of
from align.models import qwen3

Tensor = torch.Tensor


def structure() -> Structure:
    return structure_of(qwen3.CONFIG)


def forward(ids: tuple[int, ...], native: bool, dtype: torch.dtype, swapped: int | None = None) -> dict[str, Tensor]:
    """Checkpoints of one prompt in ``dtype``.

    Args:
        native: round after every operation; else compute in float32 and round once for each operator, and let norms
            read the sum before it was rounded, as fused kernels do.
        swapped: layer whose gate and up weights change places.
    """
    model = structure()
    weights = {name: tensor.to(dtype) for name, tensor in qwen3.weights().items()}
    out: dict[str, Tensor] = {}
    tokens, dim = len(ids), model.head_dim
    angles = torch.arange(tokens)[:, None] * model.rope["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([wave, wave], -1)[:, None].to(dtype) for wave in (angles.cos(), angles.sin()))

    def wide(x: Tensor) -> Tensor:
        return x if native else x.float()

    def linear(x: Tensor, name: str) -> Tensor:
        return (wide(x) @ wide(weights[name]).T).to(dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + model.eps)
        return weights[name] * scaled.to(dtype) if native else (scaled * weights[name].float()).to(dtype)

    def rope(x: Tensor) -> Tensor:
        half = dim // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return (wide(x) * wide(cos) + wide(turned) * wide(sin)).to(dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = model.heads // model.kv_heads
        q, k, v = (wide(x).transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        scores = (q @ k.transpose(1, 2)) * model.scale
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        return (torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v).transpose(0, 1).to(dtype)

    x = out["embed"] = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    exact = x  # the residual stream as a fused add-norm sees it
    for layer in range(model.layers):
        at, there = f"layers.{layer}.", f"model.layers.{layer}."
        out[at + "block_in"] = x
        h = out[at + "attn_norm"] = norm(exact, there + "input_layernorm.weight")
        for part, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
            out[f"{at}attn.{part}"] = linear(h, f"{there}self_attn.{part}_proj.weight").view(tokens, heads, dim)
        for part in "qk":
            out[f"{at}attn.{part}_norm"] = norm(out[f"{at}attn.{part}"], f"{there}self_attn.{part}_norm.weight")
            out[f"{at}attn.{part}_rope"] = rope(out[f"{at}attn.{part}_norm"])
        found = attention(out[at + "attn.q_rope"], out[at + "attn.k_rope"], out[at + "attn.v"])
        out[at + "attn.out"] = found.contiguous()
        o = out[at + "attn.o"] = linear(found.reshape(tokens, -1), there + "self_attn.o_proj.weight")
        exact = x + o if native else x.float() + o.float()
        x = out[at + "mid"] = x + o
        h = out[at + "mlp_norm"] = norm(exact, there + "post_attention_layernorm.weight")
        names = ("up_proj", "gate_proj") if layer == swapped else ("gate_proj", "up_proj")
        gate, up = (linear(h, f"{there}mlp.{name}.weight") for name in names)
        out[at + "mlp.gate"], out[at + "mlp.up"] = gate, up
        act = out[at + "mlp.act"] = (torch.nn.functional.silu(wide(gate)) * wide(up)).to(dtype)
        down = out[at + "mlp.down"] = linear(act, there + "mlp.down_proj.weight")
        exact = x + down if native else x.float() + down.float()
        x = x + down
    out["final_in"] = x
    h = out["final_norm"] = norm(exact, "model.norm.weight")
    out["logits"] = linear(h, "lm_head.weight")
    return out
