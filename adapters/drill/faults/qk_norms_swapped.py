"""The norms of query and key have each other's weights."""

from adapters.drill.places import module

FAULT = {
    "path": "B",
    "kind": "weights",
    "checkpoint": "layers.{layer}.attn.q_norm",
    "source": "catalogue F14: a loader's mapping",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def after_load(ctx):
    q, k = (module(ctx, DRAWN["layer"], part).weight for part in ("q_norm", "k_norm"))
    query, key = q.detach().clone(), k.detach().clone()
    ctx.assign(q, key)
    ctx.assign(k, query)
