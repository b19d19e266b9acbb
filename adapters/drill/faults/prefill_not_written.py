"""A prefill leaves some places unwritten."""

from adapters.drill.indices import each_step

FAULT = {
    "path": "A",
    "kind": "not_written",
    "step": 0,
    "request": 1,
    "source": "seed 000 T5.4-1: prefill also writes",
    "draws": {"first": [13, 15], "count": [1, 5]},
}
DRAWN = {"first": 13, "count": 5}


def apply(ctx):
    def change(step):
        if step.number == 0 and step.rows > 1:
            slots = step.slots
            slots[DRAWN["first"] : DRAWN["first"] + DRAWN["count"]] = -1
            step.slots = slots

    each_step(ctx, change)
