"""What a reduction is made of: the finding that has to stay, cases on the way, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from align.case.schema import Case
from align.findings import Finding

#: What a proposal makes smaller.
What = Literal["requests and tokens", "requests", "tokens", "arrivals", "layout", "layers", "prompts"]


@dataclass(frozen=True)
class Fault:
    """What makes two findings the same: everything but the place in the batch and in time.

    Attributes:
        path, kind, side, checkpoint: as a :class:`align.findings.Finding` has them.
        fault: what the finding's evidence calls it, such as ``wrong_slot``; empty where it has no name of its own.
    """

    path: str
    kind: str
    side: str | None
    checkpoint: str | None
    fault: str = ""

    @classmethod
    def of(cls, finding: Finding) -> Fault:
        """Of a finding."""
        name = finding.evidence.get("fault")
        return cls(finding.path, finding.kind, finding.side, finding.checkpoint, name if isinstance(name, str) else "")

    def __str__(self) -> str:
        words = [f"path {self.path}" if len(self.path) == 1 else self.path, self.kind]
        if self.fault:
            words[-1] += f" ({self.fault})"
        words += [f"of the {self.side}"] if self.side else []
        words += [f"at {self.checkpoint}"] if self.checkpoint else []
        return " ".join((f"{words[0]},", *words[1:]))


@dataclass(frozen=True)
class State:
    """A case, and how many of the model's layers it is run with; ``None``: all."""

    case: Case
    layers: int | None = None

    @property
    def size(self) -> Size:
        """How large it is."""
        case = self.case
        return Size(
            requests=len(case.requests),
            prompt_tokens=sum(len(one.token_ids) for one in case.requests),
            new_tokens=max(case.new_tokens(one) for one in case.requests),
            ranks=case.layout.to_layout().world,
            layers=self.layers,
        )


@dataclass(frozen=True)
class Size:
    """How large a case is.

    Attributes:
        prompt_tokens: of all requests.
        new_tokens: of the request that generates the most; as many engine steps, if all arrive at once.
        layers: of the model; ``None``: all.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    ranks: int
    layers: int | None = None

    def __str__(self) -> str:
        words = [
            _count(self.requests, "request"),
            f"{_count(self.prompt_tokens, 'prompt token')} in all",
            _count(self.new_tokens, "new token"),
        ]
        words += [_count(self.ranks, "rank")] if self.ranks > 1 else []
        words += [_count(self.layers, "layer")] if self.layers is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class Proposal:
    """A smaller case; ``what`` says what is smaller, ``how`` in words."""

    state: State
    what: What
    how: str


@dataclass(frozen=True)
class Ended:
    """What came of a case.

    Attributes:
        finding: the first one; ``None`` if it diverged in nothing.
        verdict: ``aligned``, ``diverged`` or ``not comparable``.
        why: why it could not be compared.
    """

    finding: Finding | None
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Tried:
    """A proposal that was tried: whether the finding stayed, and what was there instead."""

    what: str
    how: str
    size: Size
    kept: bool
    instead: str = ""
    seconds: float = 0.0
    directory: str = ""


@dataclass(frozen=True)
class Reduction:
    """A whole reduction.

    Attributes:
        fault: what had to stay.
        before, after: sizes; equal if nothing could be left out.
        complete: nothing smaller is left to try; otherwise the number of tries was used up.
        shown: the finding was seen in a run that this reduction made.
    """

    fault: Fault
    before: Size
    after: Size
    tries: tuple[Tried, ...]
    complete: bool
    shown: bool

    def to_dict(self) -> Mapping[str, Any]:
        """JSON-able form."""
        return {"schema_version": 1, **asdict(self)}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
