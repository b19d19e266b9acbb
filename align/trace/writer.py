"""Writes the trace of one rank, so that whatever a killed worker leaves can be read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from align.trace.encode import encode
from align.trace.format import (
    RANK_FILE,
    SCHEMA,
    STEPS_FILE,
    Shard,
    StepEntry,
    accumulated_file,
    rank_folder,
    step_file,
)
from align.trace.pack import PACKS_FILE, Packer


class TraceWriter:
    """One rank's part of a trace.

    Args:
        directory: the trace; made if need be.
        rank: global; ``tp_rank`` inside its tensor-parallel group, which is data-parallel group ``dp_rank``.
        shards: of each kind that tensor parallelism splits.

    Raises:
        OSError: the disk is full or not writable.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        tp_rank: int = 0,
        tp: int = 1,
        shards: Mapping[str, Shard] | None = None,
        dp_rank: int = 0,
    ) -> None:
        self._folder = directory / rank_folder(rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        about = {
            "schema": SCHEMA,
            "rank": rank,
            "tp_rank": tp_rank,
            "tp": tp,
            "dp_rank": dp_rank,
            "shards": {kind: asdict(shard) for kind, shard in (shards or {}).items()},
        }
        self._replace(RANK_FILE, [json.dumps(about).encode()])
        self._line_files: dict[str, BinaryIO] = {}
        self._packer = Packer(lambda line: self._append(PACKS_FILE, f"{line}\n".encode()))
        (self._folder / PACKS_FILE).unlink(missing_ok=True)
        self._steps = (self._folder / STEPS_FILE).open("w", encoding="utf-8")

    def _replace(self, name: str, content: Iterable[bytes | memoryview]) -> int:
        temporary = self._folder / f"{name}.tmp"
        with temporary.open("wb") as file:
            file.writelines(content)
            size = file.tell()
        os.replace(temporary, self._folder / name)
        return size

    def write_step(self, entry: StepEntry, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write a step's tensors, then its line; returns the bytes of its file.

        Args:
            tensors: on the CPU, contiguous.
        """
        name = step_file(entry.step)
        size = self._replace(name, encode(self._packer.pack(tensors), {"schema": str(SCHEMA)}))
        self._line(replace(entry, file=name, bytes=size))
        return size

    def write_dummy(self, step: int, tokens: int = 0) -> None:
        """Note a forward without requests, of so many tokens, after ``step``; it is never compared."""
        self._line(StepEntry(step=step, phase="", dummy=True, tokens=tokens))

    def _line(self, entry: StepEntry) -> None:
        self._steps.write(json.dumps(entry.to_dict()) + "\n")
        self._steps.flush()

    def write_lines(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append JSON objects to a compressed file of this rank, one a line; this writer's first call makes it anew.

        What one call writes is a member of its own, so that a killed worker costs the last of them at most.
        """
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self._append(name, gzip.compress(text.encode(), mtime=0) if text else b"")

    def _append(self, name: str, content: bytes) -> None:
        if name not in self._line_files:
            self._line_files[name] = (self._folder / name).open("wb")
        file = self._line_files[name]
        file.write(content)
        file.flush()

    def write_accumulated(self, which: str, phase: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replace the sums over the steps of a phase; returns the bytes written."""
        return self._replace(
            accumulated_file(which, phase), encode(self._packer.pack(tensors), {"schema": str(SCHEMA)})
        )

    def close(self) -> None:
        self._steps.close()
        for file in self._line_files.values():
            file.close()
