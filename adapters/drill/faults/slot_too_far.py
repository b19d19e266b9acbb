"""A decode writes one place too far."""

from adapters.drill.indices import each_step

FAULT = {
    "path": "A",
    "kind": "wrong_slot",
    "step": 1,
    "request": "{row}",
    "source": "catalogue F01; vllm-ascend #7019, #8547",
    "draws": {"row": [0, 1, 2], "by": [1, 2]},
}
DRAWN = {"row": 1, "by": 1}


def apply(ctx):
    def change(step):
        if step.decode and step.rows > max(1, DRAWN["row"]):
            slots = step.slots
            slots[DRAWN["row"]] += DRAWN["by"]
            step.slots = slots

    each_step(ctx, change)
