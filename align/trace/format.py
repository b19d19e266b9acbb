"""The files of a trace and the names inside them; writer and reader share these.

::

    trace.json                       the manifest, by the driver
    rank0/rank.json                  which shard of each kind this rank holds
    rank0/steps.jsonl                one line per recorded step
    rank0/step00000.safetensors      what was recorded in it
    rank0/packs.jsonl                names of what is packed there, see :mod:`align.trace.pack`
    rank0/residual-prefill.safetensors, digest-decode.safetensors, …    sums over the steps of one phase

A step's line follows its file, and files appear by renaming, so that what a line names is whole. A value has the
checkpoint's own name; what was derived from it carries a suffix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from adapters.base import RowSpan
from align.checkpoints.shards import Shard

__all__ = ["Shard", "StepEntry"]

SCHEMA = 2
#: Schemas that are read; 1 had nothing packed.
READABLE = (1, 2)
MANIFEST = "trace.json"
RANK_FILE = "rank.json"
STEPS_FILE = "steps.jsonl"
#: Keys of a step file that are no checkpoints: int64 ``[T]``.
TOKEN_IDS = "token_ids"
POSITIONS = "positions"
#: float32: random projections ``[T, 8]`` and sums of squares ``[T]`` of each token.
TOKEN_DIGEST = "#tok"
TOKEN_SQUARES = "#tok_sq"
#: float32, over the steps of a phase: projections ``[4, *channels]`` and sums of squares of each channel.
CHANNEL_DIGEST = "#ch"
CHANNEL_SQUARES = "#ch_sq"
#: float32: ``[R, 3]`` sums over channels; ``[4]`` the worst element; over a phase ``[3, *channels]`` sums over rows.
TOKEN_RESIDUAL = "#res_tok"
WORST_RESIDUAL = "#res_max"
CHANNEL_RESIDUAL = "#res_ch"
#: float32, of a lean recording, over a phase: ``[1 + K, 5]`` totals and worst rows, ``[K, 4]`` worst channels with
#: their flat index, ``[H, 3]`` sums of each head; see :mod:`adapters.probe.lean`.
TOP_ROWS, TOP_CHANNELS, HEAD_RESIDUAL = "#res_rows", "#res_top", "#res_head"
#: Of a choice of experts in a run that replayed the routing: what was used, int64 ``[T, top_k]``, where the checkpoint
#: itself is what the router chose.
USED = "#used"
ACCUMULATED = ("residual", "digest")


def rank_folder(rank: int) -> str:
    return f"rank{rank}"


def step_file(step: int) -> str:
    return f"step{step:05d}.safetensors"


def accumulated_file(which: str, phase: str) -> str:
    return f"{which}-{phase}.safetensors"


def checkpoint_of(key: str) -> str:
    """The checkpoint that a key is about."""
    return key.partition("#")[0]


@dataclass(frozen=True)
class StepEntry:
    """One line of ``steps.jsonl``.

    Attributes:
        step: as in :class:`adapters.base.StepRecord`.
        phase: ``prefill``, ``decode`` or ``mixed``.
        rows: spans in batch order; rows of the step's tensors stand in this order.
        dummy: a forward without requests; it has no file.
        tokens: that a dummy computed; 0 where that was not seen, and of real steps.
        file, bytes: the step's file and its length.
        sampled: rows that the residual recomputed.
        logits_rows: ``(request, position)`` of each row of the logits.
        digested: rows whose digests were kept; ``None`` if those of all were. Not ``None`` marks a lean recording.
        noted: of a lean recording: checkpoints that were seen in this step, and of which nothing was kept.
        experts: how the tokens of a model with experts reached them, see :class:`adapters.probe.dispatch.Dispatch`;
            empty where that is not known, or of models without.
        failures: checkpoint → why it was not recorded in this step; with a suffix, why that was not derived.
    """

    step: int
    phase: str
    rows: tuple[RowSpan, ...] = ()
    dummy: bool = False
    tokens: int = 0
    file: str = ""
    bytes: int = 0
    sampled: tuple[int, ...] = ()
    logits_rows: tuple[tuple[str, int], ...] = ()
    digested: tuple[int, ...] | None = None
    noted: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)

    def part(self, kind: str) -> tuple[int, int] | None:
        """``(first row, rows)`` of the step that this rank holds of a kind; ``None`` if it holds all of them."""
        found = self.experts.get("parts", {}).get(kind)
        return None if found is None else (int(found[0]), int(found[1]))

    def whole(self, kind: str) -> bool:
        """Whether this rank holds the sum of a kind of which ranks otherwise hold summands."""
        return kind in self.experts.get("whole", ())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        plain = asdict(self)
        if self.digested is None:
            del plain["digested"], plain["noted"]
        if not self.tokens:
            del plain["tokens"]
        if not self.experts:
            del plain["experts"]
        plain["rows"] = [[row.request, row.start, row.count, row.occurrence] for row in self.rows]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> StepEntry:
        return cls(
            step=plain["step"],
            phase=plain["phase"],
            rows=tuple(RowSpan(*row) for row in plain["rows"]),
            dummy=plain["dummy"],
            tokens=plain.get("tokens", 0),
            file=plain["file"],
            bytes=plain["bytes"],
            sampled=tuple(plain["sampled"]),
            logits_rows=tuple((request, position) for request, position in plain["logits_rows"]),
            digested=None if plain.get("digested") is None else tuple(plain["digested"]),
            noted=tuple(plain.get("noted", ())),
            failures=plain["failures"],
            experts=plain.get("experts", {}),
        )
