"""A finding: a verdict with evidence. Everything that accuses anything makes one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from align.sentences import Said, text_of

#: What is broken. A, B and C are the paths of seed 003: KV-cache indices, operator precision, communication.
Path = Literal["A", "B", "C", "FA", "QUANT", "INPUT", "ENV", "UNLOCATED"]
PATHS: dict[str, str] = {
    "A": "KV-cache indices",
    "B": "operator precision",
    "C": "communication and parallelism",
    "FA": "FlashAttention arguments",
    "QUANT": "quantisation",
    "INPUT": "inputs",
    "ENV": "environment",
    "UNLOCATED": "not located",
}
#: Kinds whose request and position are the one worst place, and not all that show it.
WORST_ALONE = (
    "operator", "collective", "unexplained", "nonfinite", "missing_reduce", "doubled_reduce", "stale_buffer",
    "permuted_rows", "batch_order", "gather_order", "unequal_ranks", "combine_weights",
)  # fmt: skip


def told(sentence: Said) -> dict[str, Any]:
    """Of an evidence, what it rests on in words: ``what`` in English, and ``sentence`` as data for other languages."""
    return {"what": text_of(sentence), "sentence": sentence}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where, and what to do next.

    Attributes:
        path: a key of :data:`PATHS`.
        kind: what exactly, for instance ``weights``, ``operator``, ``slots``, ``unexplained``, ``token_ids``.
        side: ``candidate`` or ``reference``; ``None`` if it is not known which.
        checkpoint: the origin, ``layers.2.mlp_norm``; ``None`` if it has none.
        layer: of the checkpoint.
        phase: ``prefill``, ``decode``, ``mixed``; ``None`` for both or unknown.
        step: number of the engine step on that side; ``None`` if unknown or many.
        requests: names of the requests that show it, of :data:`WORST_ALONE` the worst one; empty for all or unknown.
        positions: token positions that show it, of :data:`WORST_ALONE` the worst one; empty for all or unknown.
        ranks: ranks that show it; empty for all or unknown.
        evidence: numbers and names, JSON-able.
        next: what to do next, one sentence.
    """

    path: Path
    kind: str
    side: str | None = None
    checkpoint: str | None = None
    layer: int | None = None
    phase: str | None = None
    step: int | None = None
    requests: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    next: str = ""

    def __post_init__(self) -> None:
        assert self.path in PATHS, self.path

    @property
    def summary(self) -> str:
        """One sentence: path, kind, side and place, and the evidence's own ``what`` if it has one."""
        words = [f"Path {self.path}" if len(self.path) == 1 else self.path, f"({PATHS[self.path]}): {self.kind}"]
        if self.side is not None:
            words.append(f"of the {self.side}")
        if self.checkpoint is not None:
            words.append(f"at {self.checkpoint}")
        if self.phase is not None:
            words.append(f"in {self.phase}")
        what = self.evidence.get("what")
        if self.kind in WORST_ALONE and self.requests and self.positions:
            if " position " not in str(what):  # else its own places say more: each with the test that it is worst by
                words[-1] += ","
                words.append(f"worst for {self.requests[0]} at position {self.positions[0]}")
        else:
            words += [f"for {', '.join(self.requests)}"] if self.requests else []
            words += [f"at position {', '.join(map(str, self.positions[:3]))}"] if self.positions else []
        return " ".join(words) + (f": {what}" if what else "") + "."

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, the summary included."""
        return {**asdict(self), "evidence": dict(self.evidence), "summary": self.summary}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`."""
        fields = {key: value for key, value in plain.items() if key != "summary"}
        for key in ("requests", "positions", "ranks"):
            fields[key] = tuple(fields[key])
        return cls(**fields)
