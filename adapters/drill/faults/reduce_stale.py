"""A rank reads the buffer of the sum before."""

from adapters.drill.ranks import reduced

FAULT = {
    "path": "C",
    "kind": "stale_buffer",
    "checkpoint": "layers.{layer}.attn.o",
    "source": "catalogue C: a buffer that is read before it is filled",
    "tp": 2,
    "draws": {"layer": [1, 2, 3], "rank": [0, 1]},
}
DRAWN = {"layer": 2, "rank": 1}


def apply(ctx):
    pass


def after_load(ctx):
    kept = {}

    def keep(partial, reduce):
        kept["last"] = reduce(partial)
        return kept["last"].clone()

    def read(partial, reduce):
        total = reduce(partial)
        return kept["last"].clone() if ctx.tp_rank == DRAWN["rank"] else total

    reduced(ctx, {(DRAWN["layer"] - 1, "down"): keep, (DRAWN["layer"], "o"): read})
