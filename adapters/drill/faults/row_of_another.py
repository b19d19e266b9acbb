"""A request reads with the block table of another."""

from adapters.drill.indices import each_step

FAULT = {
    "path": "A",
    "kind": "foreign_row",
    "step": "{step}",
    "request": "{row}",
    "source": "catalogue A-16, A-17",
    "draws": {"step": [1, 3, 5], "row": [0, 1]},
}
DRAWN = {"step": 3, "row": 1}


def apply(ctx):
    def change(step):
        if step.number == DRAWN["step"] and step.rows > 2:
            tables = step.tables
            tables[DRAWN["row"]] = tables[2]
            step.tables = tables

    each_step(ctx, change)
