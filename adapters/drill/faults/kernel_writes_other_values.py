"""The kernel writes something else than it is given."""

from adapters.drill.indices import after_write

FAULT = {
    "path": "A",
    "kind": "content",
    "step": "{step}",
    "request": "{row}",
    "source": "catalogue A: written = key_states",
    "draws": {"layer": [0, 1, 2, 3], "step": [1, 2, 4], "row": [0, 1]},
}
DRAWN = {"layer": 1, "step": 2, "row": 1}


def apply(ctx):
    pass


def after_load(ctx):
    def wrong(layer, key, value, key_cache, value_cache, slots):
        if layer == DRAWN["layer"] and ctx.step == DRAWN["step"] and len(slots) > 1:
            key_cache.view(-1, *key_cache.shape[2:])[int(slots[DRAWN["row"]])] *= 1.5

    after_write(ctx, wrong)
