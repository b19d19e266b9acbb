"""Faults of the cache's indices: patch, batch, and what must be said of each; worked out before it was run.

Each patch is one text for both engines (``indices/``) behind the seam, which holds what differs between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.indices import allocation, reads, writes
from tests.integration.indices.seam import SEAM

#: Requests of each batch: name, length of the prompt, new tokens, arrival. Blocks have 128 tokens.
_BATCHES: dict[str, list[tuple[str, int, int, int]]] = {
    "plain": [("a", 13, 8, 0), ("b", 7, 8, 0), ("c", 150, 8, 0)],
    "long": [("a", 150, 8, 0), ("b", 7, 8, 0), ("c", 13, 8, 0)],
    # They end the last first: lmdeploy's stack of free blocks is then in each run what it was in the first.
    "reverse": [("a", 13, 8, 0), ("b", 7, 7, 0), ("c", 150, 6, 0)],
    "long reverse": [("a", 150, 8, 0), ("b", 7, 7, 0), ("c", 13, 6, 0)],
    "ends": [("a", 13, 4, 0), ("b", 7, 8, 0), ("c", 21, 8, 0), ("d", 33, 8, 0)],
    "late": [("a", 13, 8, 0), ("b", 7, 8, 0), ("c", 150, 8, 3)],
    "chunks": [("a", 13, 8, 0), ("b", 7, 8, 0), ("c", 300, 8, 2)],
    "recycled": [("a", 150, 8, 0), ("b", 9, 4, 3)],
    "prefix": [("a", 300, 8, 0), ("b", 300, 8, 2)],
    "foreign": [("a", 300, 8, 0), ("b", 300, 8, 2)],
    # All three need one block more in the same step, and there is one: 15 of 16 may be used.
    "memory": [("a", 1518, 22, 0), ("b", 110, 30, 0), ("c", 110, 30, 0)],
}


def requests(batch: str) -> list[dict[str, Any]]:
    """The requests of a batch, as a case's file has them."""
    found: list[dict[str, Any]] = []
    for number, (name, length, new, arrival) in enumerate(_BATCHES[batch], start=1):
        ids = tuple((7 * number + 11 * at + at * at * number) % 89 + 3 for at in range(length))
        if batch == "prefix" and found:
            ids = found[0]["token_ids"][:256] + ids[256:]
        found.append({"name": name, "token_ids": ids, "max_new_tokens": new, "arrival": arrival})
    return found


@dataclass(frozen=True)
class Told:
    """What must be said of the recorded run: kind of fault, writer and victim as ``(request, position)``, step, layer.

    A writer that is no request has its kind for a name, and position −1.
    """

    kind: str
    writer: tuple[str, int]
    victim: tuple[str, int]
    step: int
    layer: int = 0


@dataclass(frozen=True)
class IndexFault:
    """A fault.

    Attributes:
        text: of the patch, without the seam.
        told: engine → what must be said; ``None``: nothing may be.
        batch: of the requests; or engine → batch.
        options: engine → options of both sides' engines, whichever has the fault.
        allow: conditions that the options make false.
    """

    text: str
    told: Mapping[str, Told | None]
    batch: str | Mapping[str, str] = "plain"
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allow: tuple[str, ...] = ()

    def batch_of(self, engine: str) -> str:
        return self.batch if isinstance(self.batch, str) else self.batch[engine]


def both(kind: str, writer: tuple[str, int], victim: tuple[str, int], step: int, layer: int = 0) -> dict[str, Told]:
    return dict.fromkeys(("lmdeploy", "vllm"), Told(kind, writer, victim, step, layer))


_SILENT = {"lmdeploy": None, "vllm": None}
_PREFIX = dict.fromkeys(("lmdeploy", "vllm"), ("enable_prefix_caching=true",))
_CHUNKS = {
    "lmdeploy": ("max_prefill_token_num=160",),
    "vllm": ("max_num_batched_tokens=160", "enable_chunked_prefill=true"),
}


def _blocks(count: int) -> dict[str, tuple[str, ...]]:
    return {"lmdeploy": (f"num_gpu_blocks={count}",), "vllm": (f"num_gpu_blocks_override={count}",)}


PADDING, DUMMY = ("padding", -1), ("dummy", -1)
INDEX_FAULTS: dict[str, IndexFault] = {
    # Slots.
    "slot_plus_one": IndexFault(writes.SLOT_PLUS_ONE, both("wrong_slot", ("b", 7), ("b", 7), 1)),
    "stale_slots": IndexFault(writes.STALE_SLOTS, both("wrong_slot", ("a", 15), ("a", 14), 3)),
    "one_layer": IndexFault(writes.ONE_LAYER, both("wrong_slot", ("b", 8), ("b", 8), 2, layer=2)),
    "mixed_shift": IndexFault(writes.MIXED_SHIFT, {"vllm": Told("wrong_slot", ("b", 9), ("a", 15), 3)}, "late"),
    "chunk_restarts": IndexFault(
        writes.CHUNK_RESTARTS,
        {
            "lmdeploy": Told("wrong_slot", ("c", 160), ("c", 0), 3),
            # Two of the 160 tokens of a step are decodes.
            "vllm": Told("wrong_slot", ("c", 158), ("c", 0), 3),
        },
        "chunks",
        _CHUNKS,
        ("chunked_prefill",),
    ),
    # The first run writes b's place: block 1 becomes block 2. In vllm's later runs the blocks are others, and the
    # doubled ones nobody's.
    "doubled_blocks": IndexFault(
        writes.DOUBLED_BLOCKS,
        {
            "lmdeploy": Told("wrong_block_size", ("a", 0), ("b", 0), 0),
            "vllm": Told("wrong_block_size", ("a", 0), ("a", 0), 0),
        },
        "reverse",
        _blocks(48),
    ),
    "not_written": IndexFault(writes.NOT_WRITTEN, both("not_written", ("b", 0), ("b", 0), 0)),
    "padding_stale": IndexFault(
        writes.PADDING_STALE,
        {
            # The engine looks ahead: a is in one step more.
            "lmdeploy": Told("padding_write", PADDING, ("d", 36), 5),
            "vllm": Told("padding_write", PADDING, ("d", 35), 4),
        },
        "ends",
    ),
    "padding_right": IndexFault(writes.PADDING_RIGHT, _SILENT, "ends"),
    # Kernels.
    "minus_one": IndexFault(
        writes.MINUS_ONE,
        both("minus_one", PADDING, ("a", 127), 1),
        {"lmdeploy": "long reverse", "vllm": "long"},
    ),
    "stomped": IndexFault(writes.STOMPED, both("stomped", ("b", 8), ("c", 5), 2, layer=2)),
    "content": IndexFault(writes.CONTENT, both("content", ("b", 8), ("b", 8), 2, layer=1)),
    # Blocks.
    "dummy": IndexFault(
        allocation.DUMMY,
        {"lmdeploy": Told("dummy_write", DUMMY, ("a", 0), 2), "vllm": Told("dummy_write", DUMMY, ("a", 14), 2)},
        "reverse",
    ),
    # lmdeploy looks for room from the last request on: c gets the last block, b is evicted, a gets b's. When a has
    # ended, b gets a's first blocks. vllm-ascend begins with a, evicts c, and hands out a's blocks the last first.
    "evicted": IndexFault(
        allocation.EVICTED,
        {
            "lmdeploy": Told("unwritten_history", ("a", 0), ("b", 0), 23),
            "vllm": Told("unwritten_history", ("a", 1536), ("c", 0), 22),
        },
        "memory",
        _blocks(16),
        ("chunked_prefill",),
    ),
    # What a prefix cache holds outlives a run, so a has a hit in the recorded one.
    "new_blocks_alone": IndexFault(
        allocation.NEW_BLOCKS_ALONE,
        both("prefix_missing", ("a", 299), ("a", 0), 0),
        "prefix",
        _PREFIX,
        ("prefix_caching",),
    ),
    "prefix_foreign": IndexFault(
        allocation.PREFIX_FOREIGN,
        both("prefix_foreign", ("a (run 1)", 0), ("b", 0), 2),
        "foreign",
        _PREFIX,
        ("prefix_caching",),
    ),
    "recycled": IndexFault(allocation.RECYCLED, both("double_owner", ("b", 0), ("a", 0), 3), "recycled"),
    "stale_row": IndexFault(
        allocation.STALE_ROW,
        {
            # All rows move up by one there; vllm-ascend moves the last one into the gap.
            "lmdeploy": Told("stale_table", ("b", 11), ("b", 0), 5),
            "vllm": Told("stale_table", ("d", 36), ("d", 0), 4),
        },
        "ends",
    ),
    # What attention is handed.
    "foreign_row": IndexFault(reads.FOREIGN_ROW, both("foreign_row", ("b", 9), ("b", 0), 3)),
    # lmdeploy derives the slot of a decode from the length: it overwrites the token before, or leaves a gap.
    "length_short": IndexFault(
        reads.LENGTH_SHORT,
        {
            "lmdeploy": Told("wrong_length", ("b", 7), ("b", 6), 1),
            "vllm": Told("wrong_length", ("b", 7), ("b", 7), 1),
        },
    ),
    "length_frozen": IndexFault(
        reads.LENGTH_FROZEN,
        {
            "lmdeploy": Told("frozen_length", ("b", 7), ("b", 6), 1),
            "vllm": Told("frozen_length", ("b", 7), ("b", 7), 1),
        },
    ),
    "length_doubled": IndexFault(
        reads.LENGTH_DOUBLED,
        {
            "lmdeploy": Told("doubled_length", ("b", 7), ("b", 7), 1),
            "vllm": Told("doubled_length", ("b", 7), ("b", 8), 1),
        },
    ),
    "whole_prompt": IndexFault(
        reads.WHOLE_PROMPT,
        {
            "lmdeploy": Told("wrong_length", ("c", 159), ("c", 0), 2),
            "vllm": Told("wrong_length", ("c", 157), ("c", 158), 2),
        },
        "chunks",
        _CHUNKS,
        ("chunked_prefill",),
    ),
    "reader_blocks": IndexFault(reads.READER_BLOCKS, both("reader_block_size", ("a", 13), ("a", 13), 1)),
    "queries_swapped": IndexFault(reads.QUERIES_SWAPPED, both("wrong_q_len", ("a", 12), ("a", 12), 0)),
    "longest_doubled": IndexFault(reads.LONGEST_DOUBLED, _SILENT),
    "table_tail": IndexFault(reads.TABLE_TAIL, _SILENT),
    # lmdeploy narrows the table before its operator gets it; vllm-ascend's operator refuses it.
    "wide": IndexFault(reads.WIDE, {"lmdeploy": None}),
}


def index_patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(SEAM + INDEX_FAULTS[name].text)
    return path
