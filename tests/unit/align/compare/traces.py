"""Small traces for the comparison's tests: a made-up run of a two-layer Llama, written by the real writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.base import RowSpan
from align.checkpoints.shards import shards
from align.checkpoints.table import Name, Structure, parse, structure_of
from align.trace.format import MANIFEST, POSITIONS, SCHEMA, TOKEN_IDS, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
}
PROMPTS = {"r0": (5, 6, 7), "r1": (8, 9)}
GENERATED = {"r0": (1, 2), "r1": (3, 4)}
#: (phase, spans in batch order); the batch order of the second differs from the first on purpose.
STEPS: tuple[tuple[str, tuple[RowSpan, ...]], ...] = (
    ("prefill", (RowSpan("r0", 0, 3), RowSpan("r1", 0, 2))),
    ("decode", (RowSpan("r1", 2, 1), RowSpan("r0", 3, 1))),
)
Edit = Callable[[str, int, dict[str, torch.Tensor]], None]


def value(name: Name, request: str, position: int, shape: Sequence[int]) -> torch.Tensor:
    """What a right engine has for one row: depends on the checkpoint, the request and the position alone."""
    if name.kind.integer:
        return torch.tensor(position)
    layer = 99 if name.layer is None else name.layer
    seed = ((name.kind.index * 100 + layer) * 1000 + position) * 1000 + sum(map(ord, request))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def manifest(**changes: Any) -> dict[str, Any]:
    """Of a run of :data:`PROMPTS`."""
    content = {
        "schema": SCHEMA,
        "side": "candidate",
        "dtype": "bfloat16",
        "model": CONFIG,
        "layout": {"tp": 1, "dp": 1, "ep": 1},
        "requests": [{"name": name, "prompt_len": len(ids), "token_ids": list(ids)} for name, ids in PROMPTS.items()],
        "generations": {
            "free": [{"request": name, "steps": [{"chosen": one} for one in ids]} for name, ids in GENERATED.items()]
        },
    }
    return {**content, **changes}


def write(
    directory: Path,
    *,
    steps: Sequence[tuple[str, Sequence[RowSpan]]] = STEPS,
    noise: float = 0.0,
    seed: int = 0,
    edit: Edit | None = None,
    tp: int = 1,
    about: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] = CONFIG,
) -> Trace:
    """Write a trace and open it.

    Args:
        noise: relative size of a random error of every float.
        edit: changes a step's whole tensors before ranks take their parts: (phase, step, tensors).
    """
    structure = structure_of(config, tp)
    layout = {"tp": tp, "dp": 1, "ep": 1}
    writers = [TraceWriter(directory, rank, rank, tp, shards(structure, rank)) for rank in range(tp)]
    generator = torch.Generator().manual_seed(seed)
    for number, (phase, spans) in enumerate(steps):
        tensors = step_tensors(structure, spans)
        for key, tensor in tensors.items():
            if tensor.is_floating_point() and noise:
                tensor += noise * tensor.abs() * torch.randn(tensor.shape, generator=generator)
            tensors[key] = tensor.bfloat16() if tensor.is_floating_point() else tensor
        if edit is not None:
            edit(phase, number, tensors)
        entry = StepEntry(
            step=number,
            phase=phase,
            rows=tuple(spans),
            logits_rows=tuple((span.request, span.start + span.count - 1) for span in spans),
        )
        for rank, writer in enumerate(writers):
            writer.write_step(entry, {key: part(structure, key, tensor, rank) for key, tensor in tensors.items()})
    for writer in writers:
        writer.write_dummy(len(steps))
        writer.close()
    content = manifest(layout=layout, **{"model": config, **(about or {})})
    (directory / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    return Trace(directory)


def step_tensors(structure: Structure, spans: Sequence[RowSpan]) -> dict[str, torch.Tensor]:
    """All checkpoints of a step, whole, float32, and what the engine was fed."""
    rows = [(span.request, at) for span in spans for at in range(span.start, span.start + span.count)]
    lasts = [(span.request, span.start + span.count - 1) for span in spans]
    found: dict[str, torch.Tensor] = {}
    for name in structure.names():
        shape = [structure.size(axis) for axis in name.kind.axes[1:]]
        which = lasts if name.kind.axes[0] == "requests" else rows
        found[str(name)] = torch.stack([value(name, request, at, shape) for request, at in which])
    history = {name: (*ids, *GENERATED[name]) for name, ids in PROMPTS.items()}
    found[TOKEN_IDS] = torch.tensor([history[request][at] for request, at in rows])
    found[POSITIONS] = torch.tensor([at for _, at in rows])
    return found


def part(structure: Structure, key: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank holds of a whole tensor; of a sum each rank holds an equal part."""
    if key in (TOKEN_IDS, POSITIONS) or "#" in key:
        return tensor
    kind = parse(key).kind
    if kind.shard == "partial":
        return (tensor.float() / structure.tp).to(tensor.dtype)
    shard = shards(structure, rank).get(kind.name)
    if shard is None:
        return tensor
    return tensor.narrow(kind.axes.index(kind.shard), shard.start, shard.count).contiguous()
