"""A side that a small dense engine recorded, and its checkpoint: kernels written in the tests, files by the writers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapters.base import RowSpan
from align.checkpoints.parameters import parameters
from align.checkpoints.shards import shards, split
from align.checkpoints.table import parse, structure_of
from align.trace.format import MANIFEST, POSITIONS, SCHEMA, TOKEN_IDS, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter
from tests.unit.adapters.probe.dense_engine import DenseEngine, Recorded
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
#: Prefill of two requests, then two steps of decoding in another batch order.
STEPS: tuple[tuple[RowSpan, ...], ...] = (
    (RowSpan("a", 0, 9), RowSpan("b", 0, 5)),
    (RowSpan("b", 5, 1), RowSpan("a", 9, 1)),
    (RowSpan("a", 10, 1), RowSpan("b", 6, 1)),
)
Edit = Callable[[int, dict[str, Tensor]], None]


class SummingEngine(DenseEngine):
    """Two ranks: what tensor parallelism sums up is kept as summands."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.partials: dict[tuple[str, int], list[Tensor]] = {}

    def _linear(self, kind: str, layer: int | None, x: Tensor) -> Tensor:
        if kind not in ("attn.o", "mlp.down"):
            return super()._linear(kind, layer, x)
        weight = self.weights.of[(kind, layer)]
        parts = [eager.linear_internal(a, b) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
        assert layer is not None
        self.partials[(kind, layer)] = parts
        return parts[0] + parts[1]


def save_checkpoint(directory: Path, engine: DenseEngine, without: Sequence[str] = ()) -> Path:
    """Write the engine's weights as a Hugging Face checkpoint has them, in two files."""
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, Tensor] = {}
    for one in parameters(engine.structure):
        weights = engine.weights.biases if one.bias else engine.weights.of
        tensor = weights.get((one.kind, one.layer))
        if tensor is not None and one.tensor not in without:
            found[one.tensor] = tensor.clone().contiguous()
    names = sorted(found)
    save_file({name: found[name] for name in names[::2]}, directory / "model-00001.safetensors")
    save_file({name: found[name] for name in names[1::2]}, directory / "model-00002.safetensors")
    (directory / "config.json").write_text(json.dumps(engine.config), encoding="utf-8")
    return directory


def record(
    directory: Path,
    engine: DenseEngine,
    steps: Sequence[tuple[RowSpan, ...]] = STEPS,
    *,
    tp: int = 1,
    edit: Edit | None = None,
    model_dir: Path | None = None,
    cut_final: bool = False,
) -> Trace:
    """Run the engine and write what a probe would.

    Args:
        edit: changes or removes a step's whole tensors: (step, tensors by name).
        model_dir: named in the manifest.
        cut_final: the last norm is computed for the rows that reach the head alone.
    """
    structure = structure_of(engine.config, tp)
    writers = [TraceWriter(directory, rank, rank, tp, shards(structure, rank)) for rank in range(tp)]
    for number, rows in enumerate(steps):
        recorded = engine.step(*rows, seed=number)
        whole = _whole(engine, recorded, cut_final)
        if edit is not None:
            edit(number, whole)
        entry = StepEntry(
            step=number,
            phase="prefill" if number == 0 else "decode",
            rows=rows,
            logits_rows=tuple((span.request, span.start + span.count - 1) for span in rows),
        )
        for rank, writer in enumerate(writers):
            parts = {key: _part(key, tensor, tp, rank, structure) for key, tensor in whole.items()}
            if isinstance(engine, SummingEngine) and tp > 1:
                parts |= {
                    f"layers.{layer}.{kind}_partial": tensors[rank]
                    for (kind, layer), tensors in engine.partials.items()
                }
            writer.write_step(entry, parts)
    for writer in writers:
        writer.close()
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "model": engine.config,
        "layout": {"tp": tp, "dp": 1, "ep": 1},
    }
    if model_dir is not None:
        manifest["model_info"] = {"path": str(model_dir)}
    (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return Trace(directory)


def _whole(engine: DenseEngine, recorded: Recorded, cut_final: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {TOKEN_IDS: recorded.token_ids, POSITIONS: recorded.positions}
    for kind, values in recorded.values.items():
        if parse(f"layers.0.{kind}" if kind not in ONCE else kind).layer is None:
            found[kind] = values[recorded.logits_rows] if cut_final and kind == "final_norm" else values
        else:
            found |= {f"layers.{layer}.{kind}": values[layer] for layer in range(engine.structure.layers)}
    return found


ONCE = ("embed", "final_in", "final_norm", "logits")


def _part(key: str, tensor: Tensor, tp: int, rank: int, structure: Any) -> Tensor:
    """A rank's share of a whole tensor."""
    if tp == 1 or key in (TOKEN_IDS, POSITIONS):
        return tensor.contiguous()
    kind = parse(key).kind
    shard = split(structure.size(kind.shard), tp, rank) if kind.shard not in ("", "partial") else None
    if shard is None or key == "logits":
        return tensor.contiguous()
    return tensor.narrow(kind.axes.index(kind.shard), shard.start, shard.count).contiguous()


def verdicts(results: Sequence[Any]) -> Mapping[str, str]:
    return {result.name: result.verdict for result in results}
