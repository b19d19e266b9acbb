"""Where each engine makes its indices into the cache and hands them over, for faults that change them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.drill.places import operator
from adapters.probe.patch import PatchContext

#: Engine → what its metadata calls slots and block tables.
_NAMES = {"lmdeploy": ("kv_start_indices", "block_offsets"), "vllm": ("slot_mapping", "block_tables")}


class Step:
    """What the engine hands to attention in a step. Slots and tables are copies until they are set.

    Attributes:
        number: of the step; -1 in warm-up and dummies.
        decode: whether all of its rows are decodes.
        rows: requests of the batch. Faults leave a request alone that runs alone: what is wrong is the batch.
    """

    def __init__(self, ctx: PatchContext, metadata: Any) -> None:
        lmdeploy = ctx.engine == "lmdeploy"
        self._slots, self._tables = _NAMES["lmdeploy" if lmdeploy else "vllm"]
        self.metadata, self.number = metadata, ctx.step
        decoding = metadata.is_decoding if lmdeploy else metadata.attn_state.name == "DecodeOnly"
        self.decode = bool(decoding)
        self.rows = getattr(metadata, self._tables).shape[0]

    @property
    def slots(self) -> Tensor:
        found: Tensor = getattr(self.metadata, self._slots)
        return found.clone()

    @slots.setter
    def slots(self, value: Tensor) -> None:
        setattr(self.metadata, self._slots, value)

    @property
    def tables(self) -> Tensor:
        found: Tensor = getattr(self.metadata, self._tables)
        return found.clone()

    @tables.setter
    def tables(self, value: Tensor) -> None:
        setattr(self.metadata, self._tables, value)


#: Layer whose attention runs.
LAYER = {"now": 0}


def each_step(ctx: PatchContext, change: Callable[[Step], None]) -> None:
    """Call change(step) once the engine has made the indices of a step."""
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend

        original = AscendOpsBackend.update_step_context

        def made(cls: Any, context: Any) -> Any:
            result = original(context)
            change(Step(ctx, result.attn_metadata))
            return result

        ctx.replace(AscendOpsBackend, "update_step_context", made)
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionMetadataBuilder

    original = AscendAttentionMetadataBuilder.build

    def made_too(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        change(Step(ctx, result))
        return result

    ctx.replace(AscendAttentionMetadataBuilder, "build", made_too)


def each_length(ctx: PatchContext, change: Callable[[int, bool, list[int]], list[int]]) -> None:
    """change(number, decode, lengths) returns what the lengths of the keys are said to be.

    lmdeploy derives decode slots from them, vllm-ascend does not.
    """
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend

        original = AscendOpsBackend.update_step_context

        def made(cls: Any, context: Any) -> Any:
            lengths = context.kv_seqlens
            given = change(ctx.step, bool(context.is_decoding), lengths.tolist())
            context.kv_seqlens = torch.tensor(given, dtype=lengths.dtype, device=lengths.device)
            return original(context)

        ctx.replace(AscendOpsBackend, "update_step_context", made)
        return

    def told(step: Step) -> None:
        metadata = step.metadata
        given = change(step.number, step.decode, list(metadata.seq_lens_list))
        metadata.seq_lens_list = given
        metadata.seq_lens = torch.tensor(given, dtype=metadata.seq_lens.dtype)

    each_step(ctx, told)


def after_write(ctx: PatchContext, change: Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]) -> None:
    """Called in ``after_load``: change(layer, key, value, key_cache, value_cache, slots) runs behind the writes."""
    for layer in range(len(ctx.model.model.layers)):
        _after_write_of(ctx, layer, operator(ctx, layer, "attention"), change)
    if ctx.engine == "lmdeploy":
        return
    from vllm_ascend.device.device_op import DeviceOperator

    original = DeviceOperator.reshape_and_cache

    def written(cls: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
        original(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
        change(LAYER["now"], key, value, key_cache, value_cache, slot_mapping)

    ctx.replace(DeviceOperator, "reshape_and_cache", written)


def _after_write_of(ctx: PatchContext, layer: int, attention: Any, change: Callable[..., None]) -> None:
    if ctx.engine == "lmdeploy":  # each layer's attention holds the function
        fill = attention.fill_kv_cache

        def filled(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **kwargs: Any) -> Any:
            result = fill(key, value, key_cache, value_cache, slots, **kwargs)
            change(layer, key, value, key_cache, value_cache, slots)
            return result

        ctx.replace(attention, "fill_kv_cache", filled)
        return
    original = attention.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        LAYER["now"] = layer
        return original(*args, **kwargs)

    ctx.replace(attention, "forward", forward)


def bucket(ctx: PatchContext, size: int, stale: bool) -> None:
    """Run decodes as a graph of ``size`` rows does: padding rows behind the batch, in buffers that stay.

    Padding rows have no slot, unless they are ``stale``: then they keep what they had when they were last real.
    """
    held: dict[str, Tensor] = {}

    def fill(step: Step) -> None:
        if not step.decode or step.number < 0:
            return
        slots, tables = step.slots, step.tables
        if not held:
            held["slots"] = slots.new_full((size,), -1)
            held["tables"] = tables.new_zeros((size, 16))
        rows = slots.shape[0]
        if rows > size:
            return
        if not stale:
            held["slots"][rows:] = -1
            held["tables"][rows:] = 0
        held["slots"][:rows] = slots
        held["tables"][:rows] = 0
        held["tables"][:rows, : tables.shape[1]] = tables
        wide = held["tables"][:, : max(tables.shape[1], 4)]
        step.metadata.graph = (rows, held["slots"].clone(), wide.clone())

    each_step(ctx, fill)

    def more(rows: Tensor, by: int) -> Tensor:
        return torch.cat([rows, rows[-1:].expand(by, *rows.shape[1:]) * 0.5])

    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.attention import DlinferAttentionImpl

        original = DlinferAttentionImpl.forward

        @functools.wraps(original)
        def forward(self: Any, query: Any, key: Any, value: Any, k_cache: Any, v_cache: Any, attn_metadata: Any,
                    *args: Any, **kwargs: Any) -> Any:  # fmt: skip
            rows, slots, tables = getattr(attn_metadata, "graph", (size, None, None))
            if rows == size:
                return original(self, query, key, value, k_cache, v_cache, attn_metadata, *args, **kwargs)
            one = copy.copy(attn_metadata)
            one.kv_start_indices, one.block_offsets = slots, tables
            one.kv_seqlens = torch.cat([one.kv_seqlens, one.kv_seqlens.new_ones(size - rows)])
            given = [more(tensor, size - rows) for tensor in (query, key, value)]
            return original(self, *given, k_cache, v_cache, one, *args, **kwargs)[:rows]

        ctx.replace(DlinferAttentionImpl, "forward", forward)
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

    within = AscendAttentionBackendImpl.forward

    @functools.wraps(within)
    def widened(self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
                output: Any = None, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        rows, slots, tables = getattr(attn_metadata, "graph", (size, None, None))
        if rows == size:
            return within(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        one = copy.copy(attn_metadata)
        one.slot_mapping, one.block_tables, one.num_actual_tokens = slots, tables, size
        one.seq_lens_list = [*one.seq_lens_list, *[1] * (size - rows)]
        one.seq_lens = torch.tensor(one.seq_lens_list, dtype=one.seq_lens.dtype)
        one.actual_seq_lengths_q = list(range(1, size + 1))
        given = [more(tensor, size - rows) for tensor in (query, key, value)]
        wide = more(output, size - rows)
        within(self, layer, *given, kv_cache, one, wide, *args, **kwargs)
        output.copy_(wide[:rows])
        return output

    ctx.replace(AscendAttentionBackendImpl, "forward", widened)
