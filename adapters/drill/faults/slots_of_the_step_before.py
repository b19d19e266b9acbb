"""A step writes where the step before wrote."""

from adapters.drill.indices import each_step

FAULT = {
    "path": "A",
    "kind": "wrong_slot",
    "step": "{step}",
    "request": None,
    "source": "catalogue A-4, A-5: a buffer that is not refreshed",
    "draws": {"step": [2, 3, 5]},
}
DRAWN = {"step": 3}


LAST = {}


def apply(ctx):
    def change(step):
        before, LAST["slots"] = LAST.get("slots"), step.slots
        if step.number == DRAWN["step"] and step.rows > 1 and len(before) == step.rows:
            step.slots = before

    each_step(ctx, change)
