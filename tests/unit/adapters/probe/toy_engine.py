"""An engine in small, for the tests of taps: nested objects, fused projections, one rotary object for all layers, a
function of a module, and kernels that write in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Cache:
    """Kernels of the toy: a static one, a class one and one of an object."""

    @staticmethod
    def write(key: Tensor, value: Tensor) -> None:
        key.zero_()  # a kernel may use its inputs as room to work in

    @classmethod
    def write_class(cls, key: Tensor) -> str:
        return f"{cls.__name__} {key.shape[0]}"

    def write_object(self, key: Tensor) -> Tensor:
        return key + 1


class Inherits(Cache):
    """Has nothing of its own."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class Rotary(nn.Module):
    """One object for all layers."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q + 100, k + 200


class Attention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, 8, bias=False)
        self.rotary_emb = rotary
        self.o_proj = Output()
        self.cache = Inherits()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        qkv = self.qkv_proj(x)
        q, k = self.rotary_emb(qkv[:, :4].unflatten(-1, (2, 2)), qkv[:, 4:6].unflatten(-1, (1, 2)))
        self.attend(q.clone(), key=k.clone(), value=qkv[:, 6:].unflatten(-1, (1, 2)))
        out: Tensor = self.o_proj(q.flatten(1))
        return out.mul_(0)  # and a later one may overwrite what was tapped

    def attend(self, query: Tensor, *, key: Tensor, value: Tensor) -> None:
        Inherits.write(key, value)
        Inherits.write_class(key)
        self.cache.write_object(value)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)

    def forward(self, x: Tensor) -> Tensor:
        partial: Tensor = linear(x, self.weight)
        return partial.add_(5)  # as an all-reduce in place


class Layer(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.self_attn = Attention(rotary)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.self_attn(x, residual), x if residual is None else x + residual


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rotary = Rotary()
        self.layers = nn.ModuleList([Layer(rotary), Layer(rotary)])
        self.fails = False

    def attention(self, layer: int) -> Attention:
        found = self.get_submodule(f"layers.{layer}.self_attn")
        assert isinstance(found, Attention)
        return found

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        x: Tensor = input_ids[:, None].float().repeat(1, 4)
        residual = None
        for layer in self.layers:
            _, residual = layer(x, residual)
        if self.fails:
            raise LookupError("of the engine")
        return x
