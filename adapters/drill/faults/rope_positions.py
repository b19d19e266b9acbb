"""The rotary embedding is that of a position further on, in the queries or the keys."""

import torch

from adapters.drill.places import change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.0.attn.{which}",
    "source": "catalogue: rope is the largest single kind beside padding; positions that are off by one on one side",
    "draws": {"which": ["q_rope", "k_rope"], "angle": [1.0, 0.25]},
    "sweep": {"name": "angle", "neutral": 0.0},
}
DRAWN = {"which": "q_rope", "angle": 1.0}


def apply(ctx):
    pass


def after_load(ctx):
    """Turned once more: as if each of its rows stood ``angle`` tokens further."""
    owner = operator(ctx, 0, "rope")
    half = 64
    inverse = 1.0 / 1000000.0 ** (torch.arange(half).float() / half)
    angles = inverse * DRAWN["angle"]

    def turned(out):
        rows = out.view(-1, 2 * half).float()
        first, second = rows[:, :half], rows[:, half:]
        on_device = angles.to(out.device)  # on the host it would be a fault of another kind
        cos, sin = on_device.cos(), on_device.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).view(out.shape)

    change_output(ctx, owner, turned, result=0 if DRAWN["which"] == "q_rope" else 1)
