"""Traces as directories of `.pt` files in the naming of seed 003, and such directories as traces.

``{layer}_{op}_{input|output}_rank{rank}.pt``, one directory for each step::

    step00000/layer0_attn_out_output_rank0.pt      layers.0.attn.out
    step00000/layer0_block_in_input_rank0.pt       layers.0.block_in
    step00000/final_norm_output_rank0.pt           final_norm
    step00000/token_ids_input_rank0.pt             what the engine was fed
    index.json                                     whose rows they hold

``op`` is the checkpoint without its layer, dots as underscores. ``input`` is what is named after the operator that
reads it (:data:`INPUTS`), all else is ``output``. Digests and residuals are not exported.

Directories that somebody wrote by hand have no index. Any operator's name is read, with or without step directories;
the seed's own example ``layer0_attn_out_rank0.pt`` lacks ``input|output`` and counts as an output. Files load with
``weights_only=True``, which cannot execute code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from align.checkpoints.table import kinds, parse
from align.trace.format import POSITIONS, TOKEN_IDS, Shard, StepEntry
from align.trace.reader import Trace

INDEX = "index.json"
INDEX_SCHEMA = 1
#: Checkpoints that are dumped in front of the operator that reads them.
INPUTS = frozenset(
    ("block_in", "final_in", "attn.key_states", "attn.value_states", "attn.kv_start_indices", TOKEN_IDS, POSITIONS)
)
#: (name, tensor) → the engine's own form of a canonical tensor; ``None`` if there is no inverse.
ToNative = Callable[[str, torch.Tensor], "torch.Tensor | None"]
_FILE = re.compile(
    r"(?:(?:layers?[._]?)?(?P<layer>\d+)[._])?(?P<op>.+?)(?:_(?P<io>input|output))?(?:_rank(?P<rank>\d+))?"
)


def _operators() -> dict[str, str]:
    names = [*kinds(), TOKEN_IDS, POSITIONS]
    found = {name.replace(".", "_"): name for name in names}
    assert len(found) == len(names), "two checkpoints have one file name"
    return found


def file_name(name: str, rank: int) -> str:
    """``layers.0.attn.out`` → ``layer0_attn_out_output_rank0.pt``.

    Raises:
        ValueError: no checkpoint has this name.
    """
    kind, layer = (name, None) if name in (TOKEN_IDS, POSITIONS) else (parse(name).kind.name, parse(name).layer)
    prefix = "" if layer is None else f"layer{layer}_"
    return f"{prefix}{kind.replace('.', '_')}_{'input' if kind in INPUTS else 'output'}_rank{rank}.pt"


def read_file_name(stem: str) -> tuple[str, int]:
    """The inverse of :func:`file_name`, without ``.pt``; an operator that is not in the table keeps its own name."""
    match = _FILE.fullmatch(stem)
    assert match is not None, stem  # `op` takes whatever the rest leaves
    rank = int(match["rank"] or 0)
    layer, direction = match["layer"], match["io"]
    kind = _operators().get(match["op"])
    if kind is not None and direction in (None, "input" if kind in INPUTS else "output"):
        per_layer = kind in kinds() and kinds()[kind].per_layer
        if per_layer == (layer is not None):
            return (kind if layer is None else f"layers.{int(layer)}.{kind}"), rank
    prefix = "" if layer is None else f"layer{int(layer)}_"
    return f"{prefix}{match['op']}_{direction or 'output'}", rank


# ----------------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True)
class Exported:
    """What an export wrote: files, their bytes, and checkpoint → why it was left out."""

    files: int
    bytes: int
    skipped: Mapping[str, str] = field(default_factory=dict)


def export_pt(trace: Trace, out: Path, to_native: ToNative | None = None) -> Exported:
    """Write every value of a trace, rank by rank, as plain tensors.

    Args:
        to_native: writes the engine's own shapes; by default they are canonical, local to the rank.

    Raises:
        ValueError: ``out`` is not empty, or the trace is damaged.
        OSError: the disk is full or not writable.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    files = size = 0
    skipped: dict[str, str] = {}
    for rank in trace.ranks:
        for entry in trace.steps(rank):
            if entry.dummy:
                continue
            folder = out / f"step{entry.step:05d}"
            folder.mkdir(exist_ok=True)
            for key in sorted(trace.keys(rank, entry.step)):
                if "#" in key:
                    skipped.setdefault(key.partition("#")[0], "only a digest was recorded")
                    continue
                value = trace.tensor(rank, entry.step, key)
                assert value is not None, key
                if to_native is not None and key not in (TOKEN_IDS, POSITIONS):
                    native = to_native(key, value)
                    if native is None:
                        skipped[key] = "its transform has no inverse"
                        continue
                    value = native
                path = folder / file_name(key, rank)
                # A view would take its whole storage along.
                torch.save(value.detach().cpu().clone(memory_format=torch.contiguous_format), path)
                files += 1
                size += path.stat().st_size
    written = {read_file_name(path.stem)[0] for path in out.glob("step*/*.pt")}
    skipped = {name: why for name, why in skipped.items() if name not in written}
    _write_index(trace, out, native=to_native is not None, skipped=skipped)
    return Exported(files, size, skipped)


def _write_index(trace: Trace, out: Path, native: bool, skipped: Mapping[str, str]) -> None:
    shards = {rank: {kind: trace.shard(rank, kind) for kind in kinds()} for rank in trace.ranks}
    index = {
        "schema": INDEX_SCHEMA,
        "native": native,
        "manifest": trace.manifest,
        "ranks": {
            rank: {"shards": {kind: asdict(shard) for kind, shard in found.items() if shard is not None}}
            for rank, found in shards.items()
        },
        "steps": {rank: [entry.to_dict() for entry in trace.steps(rank)] for rank in trace.ranks},
        "skipped": dict(skipped),
    }
    temporary = out / f"{INDEX}.tmp"
    temporary.write_text(json.dumps(index), encoding="utf-8")
    os.replace(temporary, out / INDEX)


# ----------------------------------------------------------------------------------------------------------- import


def import_pt(directory: Path) -> IndexedFiles | LooseFiles:
    """Read a directory of `.pt` files as a side of a comparison.

    Raises:
        ValueError: there are no such files, or the index is damaged; says which.
    """
    return IndexedFiles(directory) if (directory / INDEX).exists() else LooseFiles(directory)


def _load(path: Path) -> torch.Tensor:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different type for each way in which a file can be damaged
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a tensor")
    return found


def _names(folder: Path) -> dict[tuple[str, int], Path]:
    """(name, rank) → file; of two files of one meaning the second keeps its own name."""
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.glob("*.pt")):
        name, rank = read_file_name(path.stem)
        key = (name, rank) if (name, rank) not in found else (path.stem, rank)
        found[key] = path
    return found


class IndexedFiles(Trace):
    """What :func:`export_pt` wrote: a trace whose records are files.

    Raises:
        ValueError: the index is damaged or of another schema.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["schema"] != INDEX_SCHEMA:
                raise ValueError(f"schema {index['schema']}; this version reads {INDEX_SCHEMA}")
            self.manifest = index["manifest"]
            self.dtype = self.manifest["dtype"]
            self._native = bool(index["native"])
            self._shards = {
                int(rank): {kind: Shard(**shard) for kind, shard in about["shards"].items()}
                for rank, about in index["ranks"].items()
            }
            self._entries = {
                int(rank): tuple(StepEntry.from_dict(plain) for plain in entries)
                for rank, entries in index["steps"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self.ranks = tuple(sorted(self._entries))
        self._folders: dict[int, dict[tuple[str, int], Path]] = {}

    def close(self) -> None:
        """Nothing stays open."""

    def shard(self, rank: int, kind: str) -> Shard | None:
        return self._shards[rank].get(kind)

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]:
        return self._entries[rank]

    def _folder(self, step: int) -> dict[tuple[str, int], Path]:
        if step not in self._folders:
            self._folders[step] = _names(self.directory / f"step{step:05d}")
        return self._folders[step]

    def keys(self, rank: int, step: int) -> frozenset[str]:
        return frozenset(name for name, of_rank in self._folder(step) if of_rank == rank)

    def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
        path = self._folder(step).get((key, rank))
        return None if path is None else _load(path)

    def accumulated(self, rank: int, which: str, phase: str) -> Mapping[str, torch.Tensor]:
        return {}

    def joined(self, step: int, name: str) -> torch.Tensor | None:
        if not self._native:
            return super().joined(step, name)
        if len(self.ranks) > 1:
            raise ValueError("native shapes of several ranks cannot be joined; export canonical shapes")
        value = self.tensor(self.ranks[0], step, name)
        entry = next(one for one in self.steps(self.ranks[0]) if one.step == step and not one.dummy)
        rows = (sum(span.count for span in entry.rows), len(entry.logits_rows))
        if value is not None and value.dim() > 2 and value.shape[0] == 1 and value.shape[1] in rows:
            return value[0]  # an engine's batch axis
        return value


class LooseFiles:
    """Files that somebody wrote, in a flat directory (one step) or in one directory for each step.

    Nothing tells whose rows they hold, so that the steps' ``rows`` are empty. Files of ranks above 0 carry the rank
    in their name, ``layers.0.attn.out rank1``: how their parts fit together is not known.

    Raises:
        ValueError: no `.pt` file in the directory or in directories below it.
    """

    structure: None = None
    ranks: tuple[int, ...] = (0,)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = {}
        folders = [directory]
        if not any(directory.glob("*.pt")):
            folders = sorted({path.parent for path in directory.glob("*/*.pt")}, key=_numeric)
        if not folders:
            raise ValueError(f"{directory} holds no .pt file and no trace")
        self._files = [
            {name if rank == 0 else f"{name} rank{rank}": path for (name, rank), path in _names(folder).items()}
            for folder in folders
        ]
        self._entries = tuple(StepEntry(step=step, phase="", file=folder.name) for step, folder in enumerate(folders))

    @cached_property
    def dtype(self) -> str:
        """Of the first file that holds floats of a known width; float32 if there is none."""
        for files in self._files:
            for path in files.values():
                try:
                    found = str(_load(path).dtype).removeprefix("torch.")
                except ValueError:
                    continue
                if found in ("bfloat16", "float16", "float32"):
                    return found
        return "float32"

    def shard(self, rank: int, kind: str) -> Shard | None:
        return None

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]:
        """One for each directory, in numeric order."""
        return self._entries

    def keys(self, rank: int, step: int) -> frozenset[str]:
        return frozenset(self._files[step])

    def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
        """One file's tensor.

        Raises:
            ValueError: it is damaged or holds something else.
        """
        path = self._files[step].get(key)
        return None if path is None else _load(path)

    def accumulated(self, rank: int, which: str, phase: str) -> Mapping[str, torch.Tensor]:
        return {}

    def joined(self, step: int, name: str) -> torch.Tensor | None:
        return self.tensor(0, step, name)


def _numeric(folder: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", folder.name)
    return (int(digits[-1]) if digits else 1 << 30, folder.name)
