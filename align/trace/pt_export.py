"""A trace as plain tensors that other tools read: one directory for each step, named as :mod:`align.trace.pt_names`::

    step00000/layer0_attn_out_output_rank0.pt      layers.0.attn.out
    step00000/layer0_attn_qkv_output_rank0.pt      in native shapes: q, k and v of layer 0
    index.json                                     whose rows they hold, and how native shapes are undone

Digests and residuals are not exported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from align.checkpoints.table import kinds
from align.trace.native import NativeForms, NativeTensor, dims_of, dims_to
from align.trace.pt import INDEX, INDEX_SCHEMA
from align.trace.pt_names import file_of, kind_and_layer
from align.trace.reader import Trace


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        files, bytes: how many and how much.
        skipped: checkpoint → why it was left out.
        canonical: kind → why it is canonical although native shapes were asked for.
    """

    files: int
    bytes: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    canonical: Mapping[str, str] = field(default_factory=dict)


def export_pt(trace: Trace, out: Path, native: NativeForms | None = None) -> Exported:
    """Write every value of a trace, rank by rank, as plain tensors.

    Args:
        native: writes the engine's own shapes; by default they are canonical, local to the rank.

    Raises:
        ValueError: ``out`` is not empty, or the trace is damaged.
        OSError: the disk is full or not writable.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    dims = {} if native is None else {rank: dims_of(trace, rank) for rank in trace.ranks}
    out.mkdir(parents=True, exist_ok=True)
    files = size = 0
    digests: set[str] = set()
    written: set[str] = set()
    canonical: dict[str, str] = {}
    for rank in trace.ranks:
        for entry in trace.steps(rank):
            if entry.dummy:
                continue
            folder = out / f"step{entry.step:05d}"
            folder.mkdir(exist_ok=True)
            keys = trace.keys(rank, entry.step)
            digests |= {key.partition("#")[0] for key in keys if "#" in key}
            names = sorted(key for key in keys if "#" not in key)
            written |= set(names)
            if native is None:
                planned = _as_they_are(names)
            else:
                planned, why = native.plan(names)
                canonical |= why
            for one in planned:
                parts = []
                for name in one.names:
                    part = trace.tensor(rank, entry.step, name)
                    assert part is not None, name
                    parts.append(part)
                value = parts[0] if native is None else one.build(parts, dims[rank])
                path = folder / file_of(one.kind, one.layer, rank)
                # A view would take its whole storage along.
                torch.save(value.detach().cpu().clone(memory_format=torch.contiguous_format), path)
                files += 1
                size += path.stat().st_size
    skipped = dict.fromkeys(sorted(digests - written), "only a digest was recorded")
    exported = Exported(files, size, skipped, canonical)
    index = _index(trace, exported)
    if native is not None:
        index["native"] = {
            **native.to_dict(),
            "canonical": canonical,
            "dims": {rank: dims_to(one) for rank, one in dims.items()},
        }
    _write(index, out)
    return exported


def _as_they_are(names: Collection[str]) -> tuple[NativeTensor, ...]:
    return tuple(NativeTensor(*kind_and_layer(name), (name,), None) for name in names)


def _index(trace: Trace, exported: Exported) -> dict[str, object]:
    shards = {rank: {kind: trace.shard(rank, kind) for kind in kinds()} for rank in trace.ranks}
    return {
        "schema": INDEX_SCHEMA,
        "native": None,
        "manifest": trace.manifest,
        "ranks": {
            rank: {
                "shards": {kind: asdict(shard) for kind, shard in found.items() if shard is not None},
                **({"dp_rank": trace.group_of(rank)} if trace.groups > 1 else {}),
            }
            for rank, found in shards.items()
        },
        "steps": {rank: [entry.to_dict() for entry in trace.steps(rank)] for rank in trace.ranks},
        "skipped": dict(exported.skipped),
    }


def _write(index: Mapping[str, object], out: Path) -> None:
    temporary = out / f"{INDEX}.tmp"
    temporary.write_text(json.dumps(index), encoding="utf-8")
    os.replace(temporary, out / INDEX)
