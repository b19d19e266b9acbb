"""The kernel that writes also writes a row into another request's block."""

from adapters.drill.indices import after_write, each_step

FAULT = {
    "path": "A",
    "kind": "stomped",
    "step": "{step}",
    "request": 2,
    "source": "catalogue A: a tile at the end of a batch",
    "draws": {"layer": [0, 1, 2, 3], "step": [1, 2, 4]},
}
DRAWN = {"layer": 2, "step": 2}


TABLES = {}


def apply(ctx):
    def remember(step):
        TABLES["last"] = step.tables

    each_step(ctx, remember)


def after_load(ctx):
    def wrong(layer, key, value, key_cache, value_cache, slots):
        if layer == DRAWN["layer"] and ctx.step == DRAWN["step"] and len(slots) > 2:
            block = int(TABLES["last"][2, 0])
            key_cache[block, 5] = key.view(len(slots), *key_cache.shape[2:])[1]
            value_cache[block, 5] = value.view(len(slots), *value_cache.shape[2:])[1]

    after_write(ctx, wrong)
