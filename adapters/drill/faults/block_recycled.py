"""A block is handed out again while its request still reads it."""

FAULT = {
    "path": "A",
    "kind": "double_owner",
    "step": 3,
    "request": 0,
    "source": "catalogue A-38",
    "batch": "recycled",
}
DRAWN = {}


FIRST = {}


def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.paging.block_manager.default_block_manager import DefaultBlockManager

        table = DefaultBlockManager.get_block_table

        def recycled_table(self, msg):
            found = table(self, msg)
            if len(found) > 1:
                FIRST["block"] = found[0]
            elif len(found) and "block" in FIRST:
                found[0] = FIRST["block"]
            return found

        ctx.replace(DefaultBlockManager, "get_block_table", recycled_table)
        return
    from vllm.v1.core.sched.output import NewRequestData

    original = NewRequestData.from_request

    def recycled(cls, request, block_ids, *args, **kwargs):
        if len(block_ids[0]) > 1:
            FIRST["block"] = block_ids[0][0]
        elif "block" in FIRST:
            block_ids = ([FIRST["block"]],)
        return original(request, block_ids, *args, **kwargs)

    ctx.replace(NewRequestData, "from_request", recycled)
