"""Reads a trace. Nothing in it can execute code, and a step whose line was cut does not exist."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from align.checkpoints.table import Structure, parse, structure_of
from align.trace.calls import CALLS_FILE, HOST_FILE, CallRecords, parse_calls
from align.trace.format import (
    MANIFEST,
    RANK_FILE,
    READABLE,
    STEPS_FILE,
    Shard,
    StepEntry,
    accumulated_file,
    checkpoint_of,
    rank_folder,
)
from align.trace.pack import PACKS_FILE, read_lines, unpacked


class DamagedFileError(ValueError):
    """A file of records that is missing, cut or overwritten; the message names it."""


class Trace:
    """One side's trace.

    Data-parallel groups serve different requests, and each counts its own steps. Here they have numbers that no two
    groups share: step s of group g of n is ``s * n + g``.

    Raises:
        ValueError: no trace, or one of another schema; says which.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = _read_json(directory / MANIFEST)
        if self.manifest.get("schema") not in READABLE:
            raise ValueError(
                f"{directory / MANIFEST} has schema {self.manifest.get('schema')}; this version reads {READABLE}"
            )
        lacking = [key for key in ("dtype", "model", "layout") if key not in self.manifest]
        if lacking:
            raise ValueError(f"{directory / MANIFEST} does not say {', '.join(lacking)}")
        found = {folder.name.removeprefix("rank"): folder for folder in directory.glob("rank*")}
        numbers = sorted(int(text) for text in found if text.isdecimal())
        self._about = {rank: _read_json(directory / rank_folder(rank) / RANK_FILE) for rank in numbers}
        if not self._about:
            raise ValueError(f"{directory} holds no rank's records")
        self.ranks = tuple(self._about)
        self.dtype: str = self.manifest["dtype"]
        self._open = ExitStack()
        #: Open files with where their records are: the library reads the header anew whenever it is asked for keys.
        self._files: dict[Path, tuple[Any, dict[str, tuple[str, int | None]]]] = {}
        #: Packed tensors of the file that was read last.
        self._packed: tuple[Path, dict[str, torch.Tensor]] | None = None

    def close(self) -> None:
        """Close the files; the trace can be read again afterwards."""
        self._files.clear()
        self._packed = None
        self._open.close()

    @cached_property
    def structure(self) -> Structure:
        """What the model is made of, in this layout.

        Raises:
            ValueError: an architecture without a table.
        """
        layout = self.manifest["layout"]
        return structure_of(self.manifest["model"], layout["tp"], layout.get("dp", 1), layout.get("ep", 1))

    @property
    def expected_ranks(self) -> int:
        """How many ranks its layout has: tp x dp."""
        layout = self.manifest["layout"]
        return int(layout["tp"]) * int(layout.get("dp", 1))

    @property
    def groups(self) -> int:
        """Data-parallel groups of its layout."""
        return int(self.manifest["layout"].get("dp", 1))

    def group_of(self, rank: int) -> int:
        """The data-parallel group of a rank that left records."""
        return int(self._about[rank].get("dp_rank", 0))

    def ranks_of(self, step: int) -> tuple[int, ...]:
        """Ranks that left records of the group that made a step."""
        return tuple(rank for rank in self.ranks if self.group_of(rank) == step % self.groups)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each data-parallel group that left records."""
        first: dict[int, int] = {}
        for rank in self.ranks:
            first.setdefault(self.group_of(rank), rank)
        return tuple(sorted(first.values()))

    @property
    def idle_groups(self) -> tuple[int, ...]:
        """Data-parallel groups that no request was for."""
        served = [one.get("dp_rank") for one in self.manifest.get("requests", ())]
        if not served or None in served:
            return ()  # it is not said which group they were for
        return tuple(group for group in range(self.groups) if group not in served)

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Ranks of the layout that left no records; those of an idle group need not."""
        width, idle = int(self.manifest["layout"]["tp"]), self.idle_groups
        return tuple(
            rank for rank in range(self.expected_ranks) if rank not in self.ranks and rank // width not in idle
        )

    def shard(self, rank: int, kind: str) -> Shard | None:
        """The part of a kind's split axis that a rank holds; ``None`` if it holds the whole."""
        found = self._about[rank]["shards"].get(kind)
        return None if found is None else Shard(**found)

    @cached_property
    def _steps(self) -> dict[int, tuple[StepEntry, ...]]:
        return {
            rank: tuple(
                replace(entry, step=entry.step * self.groups + self.group_of(rank))
                for entry in _read_steps(self.directory / rank_folder(rank) / STEPS_FILE)
            )
            for rank in self.ranks
        }

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]:
        """Steps of a rank in order, dummies included."""
        return self._steps[rank]

    @cached_property
    def _by_step(self) -> dict[tuple[int, int], StepEntry]:
        return {(rank, entry.step): entry for rank in self.ranks for entry in self.steps(rank) if not entry.dummy}

    def _entry(self, rank: int, step: int) -> StepEntry | None:
        return self._by_step.get((rank, step))

    @cached_property
    def _packs(self) -> dict[int, list[tuple[str, ...]]]:
        found: dict[int, list[tuple[str, ...]]] = {}
        for rank in self.ranks:
            path = self.directory / rank_folder(rank) / PACKS_FILE
            try:
                with path.open(encoding="utf-8") as lines:
                    found[rank] = read_lines(lines)
            except FileNotFoundError:
                found[rank] = []
            except (OSError, ValueError) as error:
                raise DamagedFileError(f"{path} cannot be read: {error}") from error
        return found

    def _file(self, path: Path, rank: int) -> tuple[Any, dict[str, tuple[str, int | None]]]:
        if path not in self._files:
            try:
                handle = self._open.enter_context(safe_open(path, framework="pt"))
                self._files[path] = (handle, unpacked(handle.keys(), self._packs[rank]))
            except DamagedFileError:
                raise
            except (SafetensorError, OSError, ValueError) as error:
                raise DamagedFileError(f"{path} cannot be read: {error}") from error
        return self._files[path]

    def keys(self, rank: int, step: int) -> frozenset[str]:
        """What was recorded in a step; empty for an unknown step.

        Raises:
            DamagedFileError: names the file.
        """
        entry = self._entry(rank, step)
        if entry is None:
            return frozenset()
        return frozenset(self._file(self.directory / rank_folder(rank) / entry.file, rank)[1])

    def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
        """One record, ``None`` if it is not there.

        Raises:
            DamagedFileError: names the file.
        """
        entry = self._entry(rank, step)
        if entry is None:
            return None
        path = self.directory / rank_folder(rank) / entry.file
        handle, places = self._file(path, rank)
        if key not in places:
            return None
        stored, index = places[key]
        try:
            if index is None:
                found: torch.Tensor = handle.get_tensor(stored)
                return found
            if self._packed is None or self._packed[0] != path:
                self._packed = path, {}
            packed = self._packed[1]
            if stored not in packed:
                packed[stored] = handle.get_tensor(stored)
            return packed[stored][index]
        except (SafetensorError, OSError, IndexError) as error:
            raise DamagedFileError(f"{path} cannot be read: {error}") from error

    def accumulated(self, rank: int, which: str, phase: str) -> Mapping[str, torch.Tensor]:
        """Sums over the steps of a phase, by key; empty if there are none."""
        path = self.directory / rank_folder(rank) / accumulated_file(which, phase)
        if not path.exists():
            return {}
        try:
            with safe_open(path, framework="pt") as handle:
                stored = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            places = unpacked(stored, self._packs[rank])
            return {key: stored[at] if index is None else stored[at][index] for key, (at, index) in places.items()}
        except (SafetensorError, OSError, IndexError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def calls(self, rank: int = 0) -> CallRecords:
        """What a rank says about its calls; empty of a trace that holds nothing about them.

        Raises:
            DamagedFileError: names the file.
        """
        folder = self.directory / rank_folder(rank)
        try:
            return parse_calls(_read_lines(folder / CALLS_FILE), _read_lines(folder / HOST_FILE))
        except (KeyError, TypeError) as error:
            raise DamagedFileError(f"{folder / CALLS_FILE} or {HOST_FILE} is malformed: {error}") from error

    def joined(self, step: int, name: str) -> torch.Tensor | None:
        """The whole tensor of a checkpoint from all ranks of its group: shards side by side, summands added in float32.

        Ranks that hold the same shard, or the whole, must hold the same values.

        Raises:
            ValueError: replicas differ, shards leave a gap, or a file is damaged.
        """
        kind = parse(checkpoint_of(name)).kind
        parts = {rank: self.tensor(rank, step, name) for rank in self.ranks_of(step)}
        present = {rank: part for rank, part in parts.items() if part is not None}
        if kind.name == "logits" and present:  # sampled on some ranks only
            return next(iter(present.values()))
        if len(present) < len(parts):
            return None
        entries = {rank: self._by_step[rank, step] for rank in present}
        if any(entry.part(kind.name) is not None for entry in entries.values()):
            return _rows_of_parts(step, name, kind.name, present, entries)
        shapes = {part.shape[:1] for part in present.values()}
        if len(shapes) > 1:
            raise ValueError(f"step {step}: the ranks hold different numbers of rows of {name}")
        if kind.shard == "partial" and not all(entry.whole(kind.name) for entry in entries.values()):
            return torch.stack([part.float() for part in present.values()]).sum(0)
        axis = kind.axes.index(kind.shard) if kind.shard not in ("", "partial") else None
        pieces: dict[int, tuple[int, torch.Tensor]] = {}
        for rank, part in present.items():
            shard = self.shard(rank, kind.name)
            start = 0 if shard is None or axis is None else shard.start
            other = pieces.setdefault(start, (rank, part))
            if other[0] != rank and not _identical(other[1], part):
                raise ValueError(f"step {step}: {name} differs between ranks {other[0]} and {rank}, which hold copies")
        known = self.shard(next(iter(present)), kind.name)
        if axis is None or known is None:
            return pieces[0][1]
        end = 0
        for start, (rank, part) in sorted(pieces.items()):
            if start != end:
                raise ValueError(f"step {step}: rank {rank}'s part of {name} starts at {start}, not at {end}")
            end += part.shape[axis]
        if end != known.total:
            raise ValueError(f"step {step}: the ranks' parts of {name} make {end} of {known.total}")
        return torch.cat([pieces[start][1] for start in sorted(pieces)], dim=axis)


def _rows_of_parts(
    step: int, name: str, kind: str, present: Mapping[int, torch.Tensor], entries: Mapping[int, StepEntry]
) -> torch.Tensor:
    """Rows that the ranks divided among themselves, one after the other.

    Raises:
        ValueError: they leave a gap, or are not as many as was said.
    """
    pieces: dict[int, tuple[int, torch.Tensor]] = {}
    for rank, part in present.items():
        first, count = entries[rank].part(kind) or (0, sum(span.count for span in entries[rank].rows))
        if len(part) != count:
            raise ValueError(f"step {step}: rank {rank} holds {len(part)} rows of {name}, not {count}")
        if count:
            pieces.setdefault(first, (rank, part))
    at = 0
    for first, (rank, part) in sorted(pieces.items()):
        if first != at:
            raise ValueError(f"step {step}: rank {rank}'s rows of {name} begin at {first}, not at {at}")
        at += len(part)
    total = sum(span.count for span in next(iter(entries.values())).rows)
    if at != total:
        raise ValueError(f"step {step}: the ranks' rows of {name} are {at} of {total}")
    return torch.cat([pieces[first][1] for first in sorted(pieces)])


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, so that NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is no trace: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a {type(parsed).__name__}, not an object")
    return parsed


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file with one a line; a last line or member that was cut does not count, and no file holds nothing.

    A recording of schema 1 has them uncompressed, under the name without ``.gz``.
    """
    plain = path.with_suffix("")
    try:
        text = _inflated(path.read_bytes()) if path.exists() else plain.read_bytes()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, zlib.error) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error


def _inflated(content: bytes) -> bytes:
    """The members of a gzip file, without a last one that was cut."""
    found = b""
    while content:
        member = zlib.decompressobj(wbits=31)
        part = member.decompress(content)
        if not member.eof:
            break
        found, content = found + part, member.unused_data
    return found


def _read_steps(path: Path) -> tuple[StepEntry, ...]:
    entries = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break  # the worker was killed while it wrote
                entries.append(StepEntry.from_dict(json.loads(line)))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return tuple(entries)
