"""The lengths of two prompts are in each other's place."""

from adapters.drill.indices import each_step

FAULT = {
    "path": "A",
    "kind": "wrong_q_len",
    "step": 0,
    "request": None,
    "source": "lengths of the queries in another order than the queries",
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    def change(step):
        if step.number or step.rows == 1:
            return
        if ctx.engine == "lmdeploy":
            lengths = step.metadata.q_seqlens.clone()
            lengths[0], lengths[1] = int(lengths[1]), int(lengths[0])
            step.metadata.q_seqlens = step.metadata.kv_seqlens = lengths
        else:
            ends = list(step.metadata.actual_seq_lengths_q)
            ends[0] = ends[1] - ends[0]
            step.metadata.actual_seq_lengths_q = ends

    each_step(ctx, change)
