"""Directories of `.pt` files as traces: what :mod:`align.trace.pt_export` wrote, and what somebody wrote by hand.

Directories that somebody wrote by hand have no index. Any operator's name is read, with or without step directories;
the seed's own example ``layer0_attn_out_rank0.pt`` lacks ``input|output`` and counts as an output. Files load with
``weights_only=True``, which cannot execute code.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adapters.probe.transforms import TRANSFORMS
from align.trace.format import Shard, StepEntry
from align.trace.native import NativeForms, dims_from
from align.trace.pt_names import read_file_name
from align.trace.reader import DamagedFileError, Trace

INDEX = "index.json"
INDEX_SCHEMA = 2


def import_pt(directory: Path) -> IndexedFiles | LooseFiles:
    """Read a directory of `.pt` files as a side of a comparison.

    Raises:
        ValueError: there are no such files, or the index is damaged; says which.
    """
    return IndexedFiles(directory) if (directory / INDEX).exists() else LooseFiles(directory)


def _load(path: Path, unreadable: MutableMapping[Path, str]) -> torch.Tensor:
    """The tensor in a file; a file without one is noted in ``unreadable`` with the reason.

    Raises:
        DamagedFileError: the file is damaged or holds something else; names it.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, torch.Tensor):
            return found
        why = f"holds a {type(found).__name__}, not a tensor"
    except Exception as error:  # torch raises a different type for each way in which a file can be damaged
        why = _why_unreadable(path, error)
    unreadable[path] = why
    raise DamagedFileError(f"{path} {why}")


def _why_unreadable(path: Path, error: Exception) -> str:
    if path.is_file() and not path.stat().st_size:
        return "is empty"
    if isinstance(error, pickle.UnpicklingError):  # torch's own words advise to load it with execution allowed
        return "cannot be read: damaged, or it holds objects that could run code, which are never loaded"
    return f"cannot be read: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _names(folder: Path) -> dict[tuple[str, int], Path]:
    """(name, rank) → file; of two files of one meaning the second keeps its own name."""
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.glob("*.pt")):
        name, rank = read_file_name(path.stem)
        key = (name, rank) if (name, rank) not in found else (path.stem, rank)
        found[key] = path
    return found


class _Stored(NamedTuple):
    """The file that holds a checkpoint, and how it is taken of the tensor there."""

    path: Path
    transform: str | None


class IndexedFiles(Trace):
    """What was exported: a trace whose records are files; native shapes are undone as the index says.

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
            native = index["native"]
            self._native = None if native is None else NativeForms.from_dict(native)
            self._dims = {} if native is None else {int(rank): dims_from(one) for rank, one in native["dims"].items()}
            skipped = {str(name): str(why) for name, why in index["skipped"].items()}
            self._shards = {
                int(rank): {kind: Shard(**shard) for kind, shard in about["shards"].items()}
                for rank, about in index["ranks"].items()
            }
            self._groups = {int(rank): int(about.get("dp_rank", 0)) for rank, about in index["ranks"].items()}
            self._entries = {
                int(rank): tuple(_told(StepEntry.from_dict(plain), skipped) for plain in entries)
                for rank, entries in index["steps"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self.ranks = tuple(sorted(self._entries))
        self._folders: dict[int, dict[tuple[str, int], _Stored]] = {}
        #: Files that were asked for and hold no tensor, with the reason.
        self.unreadable: dict[Path, str] = {}

    def close(self) -> None:
        """Nothing stays open."""

    def shard(self, rank: int, kind: str) -> Shard | None:
        return self._shards[rank].get(kind)

    def group_of(self, rank: int) -> int:
        return self._groups[rank]

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]:
        return self._entries[rank]

    def _folder(self, step: int) -> dict[tuple[str, int], _Stored]:
        if step not in self._folders:
            fused: dict[tuple[str, int], _Stored] = {}
            own: dict[tuple[str, int], _Stored] = {}
            for (name, rank), path in _names(self.directory / f"step{step:05d}").items():
                held = {name: None} if self._native is None else self._native.held_in(name)
                place = own if name in held else fused
                place.update({(part, rank): _Stored(path, transform) for part, transform in held.items()})
            self._folders[step] = {**fused, **own}
        return self._folders[step]

    def keys(self, rank: int, step: int) -> frozenset[str]:
        return frozenset(name for name, of_rank in self._folder(step) if of_rank == rank)

    def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
        stored = self._folder(step).get((key, rank))
        if stored is None:
            return None
        value = _load(stored.path, self.unreadable)
        if stored.transform is None:
            return value
        try:
            return TRANSFORMS[stored.transform].forward(value, self._dims[rank])
        except (RuntimeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{stored.path} holds {list(value.shape)}, of which {key} cannot be taken by {stored.transform}"
            ) from error

    def accumulated(self, rank: int, which: str, phase: str) -> Mapping[str, torch.Tensor]:
        return {}


def _told(entry: StepEntry, skipped: Mapping[str, str]) -> StepEntry:
    """A step that also says what the export left out."""
    return entry if entry.dummy else replace(entry, failures={**skipped, **entry.failures})


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
        #: Files that were asked for and hold no tensor, with the reason.
        self.unreadable: dict[Path, str] = {}

    @cached_property
    def dtype(self) -> str:
        """Of the first file that holds floats of a known width; float32 if there is none."""
        for files in self._files:
            for path in files.values():
                try:
                    found = str(_load(path, self.unreadable).dtype).removeprefix("torch.")
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
        return None if path is None else _load(path, self.unreadable)

    def file(self, step: int, key: str) -> Path | None:
        """Where a tensor lies; ``None`` if it is not there."""
        return self._files[step].get(key)

    def accumulated(self, rank: int, which: str, phase: str) -> Mapping[str, torch.Tensor]:
        return {}

    def joined(self, step: int, name: str) -> torch.Tensor | None:
        return self.tensor(0, step, name)


def _numeric(folder: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", folder.name)
    return (int(digits[-1]) if digits else 1 << 30, folder.name)
