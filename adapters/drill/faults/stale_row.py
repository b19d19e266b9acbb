"""A request ends, rows move up, and those of the block table do not."""

FAULT = {
    "path": "A",
    "kind": "stale_table",
    "step": None,
    "request": None,
    "source": "catalogue A-13",
    "batch": "ends",
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.strategies.ar.model_inputs import ARModelInputsStrategy

        original = ARModelInputsStrategy.index_select

        def select(inputs, indices, indice_cpu=None, block_offsets=None, **kwargs):
            if len(indices) < len(inputs.seq_length):
                block_offsets = inputs.block_offsets[: len(indices)]
            return original(inputs, indices, indice_cpu, block_offsets, **kwargs)

        ctx.replace(ARModelInputsStrategy, "index_select", select)
        return
    from vllm_ascend.worker.block_table import BlockTable

    ctx.replace(BlockTable, "move_row", lambda self, src, tgt: None)
    ctx.replace(BlockTable, "clear_row", lambda self, row: None)
