"""Patch texts: block tables and lengths that are wrong as attention is handed them."""

from __future__ import annotations

#: A-36: attention takes blocks for half as large as they are.
READER_BLOCKS = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.kernels.dlinfer as kernels

        original = kernels.paged_attention_fwd

        def halved(query, key, value, output, k_cache, v_cache, tables, *args, is_decoding, block_size, **kwargs):
            if is_decoding:
                block_size //= 2
                k_cache, v_cache = (one.view(-1, block_size, *one.shape[2:]) for one in (k_cache, v_cache))
                tables = torch.cat([tables, tables * 0], 1)
            given = {"is_decoding": is_decoding, "block_size": block_size, **kwargs}
            return original(query, key, value, output, k_cache, v_cache, tables, *args, **given)

        ctx.replace(kernels, "paged_attention_fwd", halved)
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl as attention

    original = attention._get_fia_params

    def halved(self, *args, **kwargs):
        key, value, size, tables, lengths = original(self, *args, **kwargs)
        if tables is not None:
            size //= 2
            key, value = (one.view(-1, size, one.shape[-1]) for one in (key, value))
            tables = torch.cat([tables, tables * 0], 1)
        return key, value, size, tables, lengths

    ctx.replace(attention, "_get_fia_params", halved)
"""

#: A-17, A-16: one step's table has another request's row.
FOREIGN_ROW = """
def apply(ctx):
    def change(step):
        if step.number == 3 and step.rows > 2:
            tables = step.tables
            tables[1] = tables[2]
            step.tables = tables

    each_step(ctx, change)
"""

#: A-23: one short.
LENGTH_SHORT = """
def apply(ctx):
    def change(number, decode, lengths):
        return [length - (decode and row == 1) for row, length in enumerate(lengths)]

    each_length(ctx, change)
"""

#: The length stays that of the prompt.
LENGTH_FROZEN = """
def apply(ctx):
    def change(number, decode, lengths):
        return [7 if decode and row == 1 else length for row, length in enumerate(lengths)]

    each_length(ctx, change)
"""

#: A-24, where it is used: every decode counts twice.
LENGTH_DOUBLED = """
def apply(ctx):
    def change(number, decode, lengths):
        return [2 * length - 7 if decode and row == 1 else length for row, length in enumerate(lengths)]

    each_length(ctx, change)
"""

#: A-24 as it was: the longest of all lengths, which nobody reads the cache by.
LONGEST_DOUBLED = """
def apply(ctx):
    def change(step):
        for name in ("max_kv_seq_len", "max_query_len"):
            value = getattr(step.metadata, name, None)
            if value is not None and step.decode:
                setattr(step.metadata, name, 2 * value)

    each_step(ctx, change)
"""

#: A-30: the length of a first chunk is that of the whole prompt.
WHOLE_PROMPT = """
def apply(ctx):
    def change(number, decode, lengths):
        return [300 if 100 < length < 300 else length for length in lengths]

    each_length(ctx, change)
"""

#: Lengths of the queries in another order than the queries.
QUERIES_SWAPPED = """
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
"""

#: A-37: block ids of 64 bits.
WIDE = """
def apply(ctx):
    def change(step):
        if step.number == 2:
            step.tables = step.tables.long()

    each_step(ctx, change)
"""

#: No fault: what stands behind the blocks that a length needs is read by nobody.
TABLE_TAIL = """
def apply(ctx):
    def change(step):
        tables = step.tables
        if step.decode and step.rows > 2 and tables.shape[1] > 1:
            tables[:2, 1:] = tables[2, :1]
            step.tables = tables

    each_step(ctx, change)
"""
