"""Traces of two right ranks: sums are the sums of the ranks' parts and copies are equal; tests make them wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adapters.base import RowSpan
from align.checkpoints.shards import shards
from align.checkpoints.table import Name, parse, structure_of
from align.trace.format import MANIFEST, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter
from tests.unit.align.compare import traces

Tensor = torch.Tensor
Change = Callable[[int, int, dict[str, Tensor]], None]
TP = 2
STRUCTURE = structure_of(traces.CONFIG, TP)


def consistent(spans: tuple[RowSpan, ...]) -> list[dict[str, Tensor]]:
    """What two right ranks hold in a step: sums are the sums of the ranks' parts, copies are equal."""
    whole = {
        key: one.bfloat16() if one.is_floating_point() else one
        for key, one in traces.step_tensors(STRUCTURE, spans).items()
    }
    ranks: list[dict[str, Tensor]] = [{}, {}]
    for key, tensor in whole.items():
        for rank in range(TP):
            ranks[rank][key] = traces.part(STRUCTURE, key, tensor, rank)
    for name in STRUCTURE.names():
        if STRUCTURE.operator(name.kind) != "all_reduce":
            continue
        source = f"{name}_partial"
        noise = [traces.value(_partial(name), f"p{rank}", 0, (len(whole[str(name)]), 16)) for rank in range(TP)]
        for rank in range(TP):
            ranks[rank][source] = noise[rank].bfloat16()
        total = (ranks[0][source].float() + ranks[1][source].float()).bfloat16()
        for rank in range(TP):
            ranks[rank][str(name)] = total.clone()
    return ranks


def _partial(name: Name) -> Name:
    return parse(f"{name}_partial")


def write(directory: Path, change: Change | None = None, **about: Any) -> Trace:
    """Both ranks' trace; ``change(rank, step, tensors)`` makes it wrong."""
    writers = [TraceWriter(directory, rank, rank, TP, shards(STRUCTURE, rank)) for rank in range(TP)]
    for number, (phase, spans) in enumerate(traces.STEPS):
        heads = tuple((span.request, span.start + span.count - 1) for span in spans)
        for rank, tensors in enumerate(consistent(tuple(spans))):
            if change is not None:
                change(rank, number, tensors)
            writers[rank].write_step(StepEntry(number, phase, tuple(spans), logits_rows=heads), tensors)
    for writer in writers:
        writer.close()
    content = traces.manifest(layout={"tp": TP, "dp": 1, "ep": 1}, **about)
    (directory / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    return Trace(directory)
