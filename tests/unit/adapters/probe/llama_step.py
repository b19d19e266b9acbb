"""One step of a small Llama, fed to a recorder by hand as taps feed it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.recorder import Recorder
from adapters.probe.spec import CaptureSpec
from align.checkpoints.table import Structure, structure_of
from align.trace.format import StepEntry
from align.trace.reader import Trace

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 6,
    "vocab_size": 12,
}
LLAMA = structure_of(MODEL)
ROWS = (RowSpan("a", 0, 3), RowSpan("b", 5, 2))
BLOCK = 4
SLOTS = "attn.kv_start_indices"


class NoWeights:
    norm_offset = 0.0

    def weight(self, kind: str, layer: int | None) -> Tensor | None:
        return None

    def bias(self, kind: str, layer: int | None) -> Tensor | None:
        return None


def new(structure: Structure = LLAMA, tp_rank: int = 0) -> Recorder:
    return Recorder(structure, tp_rank, tp_rank, NoWeights(), BLOCK, torch.bfloat16)


def plain(directory: Path, *values: str, **changes: Any) -> CaptureSpec:
    """Values alone, of these patterns."""
    return replace(CaptureSpec(str(directory), values=values, digest=False, residual=False), **changes)


def tensors(
    rows: tuple[RowSpan, ...] = ROWS, structure: Structure = LLAMA, seed: int = 0
) -> dict[tuple[str, int | None], Tensor]:
    """What the taps see in one step, in order."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in structure.names():
        if name.kind.name == SLOTS:
            continue
        count = len(rows) if name.kind.name == "logits" else sum(row.count for row in rows)
        local = {"heads": 4 // structure.tp, "kv_heads": 2 // structure.tp, "intermediate": 6 // structure.tp}
        shape = [count, *(local.get(axis) or structure.size(axis) for axis in name.kind.axes[1:])]
        found[name.kind.name, name.layer] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return found


def feed(
    recorder: Recorder, given: Mapping[tuple[str, int | None], Any], slots: Iterable[int] = (8, 9, 10, 21, 22)
) -> None:
    recorder.put("token_ids", None, torch.tensor([[5, 6, 7, 8, 9]], dtype=torch.int32))
    recorder.put("positions", None, torch.tensor([0, 1, 2, 5, 6]))
    recorder.put("block_tables", None, torch.tensor([[2, 0], [3, 5]], dtype=torch.int32))
    for (checkpoint, layer), value in given.items():
        recorder.put(checkpoint, layer, value)
    for layer in (0, 1):
        recorder.put(SLOTS, layer, torch.tensor(list(slots), dtype=torch.int32))


def trace(directory: Path, tp: int = 1) -> Trace:
    manifest = {"schema": 1, "dtype": "bfloat16", "model": MODEL, "layout": {"tp": tp, "dp": 1, "ep": 1}}
    (directory / "trace.json").write_text(json.dumps(manifest))
    return Trace(directory)


def one_step(directory: Path) -> tuple[Trace, StepEntry]:
    found = trace(directory)
    (entry,) = (one for one in found.steps() if not one.dummy)
    return found, entry
