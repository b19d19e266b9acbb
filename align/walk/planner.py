"""What to record next, from what was found: a pure planner, for one run and for sides that are recorded apart.

The order is seed 003's: a single request first, the one that shows it; all values of the accused layer, of the layer
before it, and one or two more layers of the same class, to see whether they behave alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from align.checkpoints.table import Structure, kinds, parse
from align.compare.tensors import TensorComparison
from align.compare.tokens import TokenComparison
from align.findings import Finding

#: Layers beside the accused one, of which values are kept to see whether they behave alike (seed 003, B step 3).
VERIFIED = 2
Kind = Literal["alone", "together"]
#: Rows of a request that tell a fault of an operator from rounding.
ENOUGH_ROWS = 16
#: Kinds of findings that every request shows.
_EVERYWHERE = ("operator", "weights", "configuration")


@dataclass(frozen=True)
class Look:
    """One recording of both sides.

    Attributes:
        kind: ``alone``: one request by itself; ``together``: the whole batch once more.
        requests: their names; empty means all.
        checkpoint: what it is about.
        values: patterns of the checkpoints whose values are kept.
        verified: layers that are kept for comparison with the accused one.
    """

    kind: Kind
    requests: tuple[str, ...]
    checkpoint: str
    values: tuple[str, ...]
    verified: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def first_look_closer(
    findings: Sequence[Finding],
    tensors: TensorComparison | None,
    tokens: TokenComparison | None,
    requests: Sequence[str],
    structure: Structure,
    kept: Sequence[str],
    lean: Mapping[str, int] | None = None,
) -> Look | None:
    """What to record after the first comparison; ``None`` if nothing is left to find out.

    Args:
        findings: the headline first.
        tensors, tokens: of the first comparison.
        requests: of the case.
        kept: patterns of the values that were recorded already.
        lean: rows of each request, if as little as possible is to be recorded; ``None`` otherwise.
    """
    name = accused_name(findings, tensors)
    if name is None:
        return None
    values, verified = values_for(name, structure) if lean is None else (least_values_for(name, structure), ())
    if len(requests) > 1:
        shown = shown_by(findings, tensors, tokens, requests)
        headline = headline_of(findings, name)
        if lean is not None and headline is not None and headline.kind in _EVERYWHERE:
            shown = shortest_telling(requests, lean)
        return Look("alone", (shown,), name, values, verified)
    if all(any(fnmatchcase(pattern, have) for have in kept) for pattern in values):
        return None
    return Look("together", (), name, values, verified)


def look_after_alone(look: Look, reproduced: bool, kept: Sequence[str]) -> Look | None:
    """What to record after a request ran alone; ``None`` if what is needed was recorded.

    Args:
        reproduced: whether the request shows it by itself.
        kept: patterns of the values that the first recording of the whole batch kept.
    """
    assert look.kind == "alone"
    if reproduced or all(any(fnmatchcase(pattern, have) for have in kept) for pattern in look.values):
        return None
    return Look("together", (), look.checkpoint, look.values, look.verified)


def accused_name(findings: Iterable[Finding], tensors: TensorComparison | None) -> str | None:
    """The checkpoint that the headline points to, or else the first that differs; only names of the table."""
    named = [finding.checkpoint for finding in findings if finding.checkpoint is not None]
    if tensors is not None and tensors.first_divergence is not None:
        named.append(tensors.first_divergence.name)
    return next((name for name in named if _known(name)), None)


def headline_of(findings: Sequence[Finding], checkpoint: str) -> Finding | None:
    """The finding that a look at ``checkpoint`` is about."""
    return next((one for one in findings if one.checkpoint == checkpoint), next(iter(findings), None))


def _known(name: str) -> bool:
    try:
        parse(name)
    except ValueError:
        return False
    return True


def shown_by(
    findings: Iterable[Finding],
    tensors: TensorComparison | None,
    tokens: TokenComparison | None,
    requests: Sequence[str],
) -> str:
    """The request that shows it: the findings', else the first whose tokens part, else the worst row's.

    Of several the one that a finding names first; ``requests`` decides between requests whose tokens part at one place.
    """
    for finding in findings:
        for request in finding.requests:
            if request in requests:
                return request
    if tokens is not None and tokens.differences:
        return min(tokens.differences, key=lambda one: (one.index, requests.index(one.request))).request
    first = None if tensors is None else tensors.first_divergence
    if first is not None and first.worst is not None and first.worst.key.request in requests:
        return first.worst.key.request
    return requests[0]


def shortest_telling(requests: Sequence[str], rows: Mapping[str, int]) -> str:
    """The shortest request with enough rows for a fit; if none has, the longest."""
    enough = [name for name in requests if rows[name] >= ENOUGH_ROWS]
    return min(enough, key=rows.__getitem__) if enough else max(requests, key=rows.__getitem__)


def least_values_for(name: str, structure: Structure) -> tuple[str, ...]:
    """The checkpoint itself and what its operator reads: as little as float64 needs to judge it."""
    accused = parse(name)
    return tuple(dict.fromkeys((name, *(str(one) for one in structure.inputs(accused)))))


def values_for(name: str, structure: Structure) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Patterns of the values that tell what is wrong with a checkpoint, and the layers kept to verify it.

    The accused layer whole, what it reads of the layer before, and a later and the last layer's checkpoint of the same
    kind with its inputs.
    """
    accused = parse(name)
    once = tuple(kind.name for kind in kinds().values() if not kind.per_layer and structure.has(kind))
    if accused.layer is None:
        inputs = tuple(str(one) for one in structure.inputs(accused))
        return tuple(dict.fromkeys((*inputs, *once))), ()
    verified = tuple(
        dict.fromkeys(
            layer for layer in (accused.layer + 1, structure.layers - 1) if accused.layer < layer < structure.layers
        )
    )[:VERIFIED]
    patterns = [f"layers.{accused.layer}.*"]
    patterns += [str(one) for one in structure.inputs(accused) if one.layer != accused.layer]
    for layer in verified:
        same = parse(accused.kind.at(layer))
        patterns += [str(same), *(str(one) for one in structure.inputs(same))]
    patterns += [name for name in ("logits",) if name in once]
    return tuple(dict.fromkeys(patterns)), verified
