"""A decode writes where the row before it writes."""

from adapters.drill.indices import each_step

FAULT = {
    "path": "A",
    "kind": ("wrong_slot", "duplicate_slot"),
    "step": "{step}",
    "request": None,
    "source": "catalogue A-22",
    "draws": {"step": [1, 3, 5]},
}
DRAWN = {"step": 3}


def apply(ctx):
    def change(step):
        if step.number == DRAWN["step"] and step.rows > 1:
            slots = step.slots
            slots[1] = slots[0]
            step.slots = slots

    each_step(ctx, change)
