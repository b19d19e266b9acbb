"""Compares two traces checkpoint by checkpoint, layer 0 first, in the order in which the model computes.

What cannot be compared says why and is no pass: a checkpoint that a side did not record is ``not observable``, one
whose record is damaged or of another shape is ``not comparable``. Neither stops the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from align.checkpoints.table import EXPERT_SUM, Structure, parse
from align.compare.added import Added, judge_added
from align.compare.alike import Alike
from align.compare.checkpoint import CheckpointComparison, Verdict, compare_checkpoint
from align.compare.collective import OPERATOR
from align.compare.coverage import Coverage, cover, recorded_names
from align.compare.pairing import Pairing, pair_rows
from align.compare.policy import TensorPolicy
from align.compare.routes import Flip, Routed, Routes, routers_told
from align.compare.rows import CANDIDATE, REFERENCE, Recorded
from align.compare.sites import Site
from align.compare.tokens import Mode
from align.sentences import text_of

__all__ = ["CheckpointComparison", "TensorComparison", "Verdict", "compare_traces", "ordered_names"]

#: Called with (checkpoints done, of how many, the next one's name).
Progress = Callable[[int, int, str], None]
_LAYER = re.compile(r"\D{0,8}(\d+)[._]")


@dataclass(frozen=True)
class TensorComparison:
    """Two traces.

    Attributes:
        policy: the thresholds that were used.
        checkpoints: layer 0 first, in the table's order.
        coverage: by side, and ``paired``: compared in every paired row, of what both models have in their layouts.
        pairing: which rows belong together, what does not, and which inputs differ.
        drift: (layer, relative L2 of the residual stream that enters it, what rounding predicts).
        notes: what could not be checked.
        flips: near-ties of routers.
        routing: what lies behind them, and whether it was compared; ``None`` if there are none.
        flipped: by mode of the tokens, request and position of the rows that lie behind them: in a ``free`` run all,
            in a ``replay`` those for which the sides used other experts, which were not compared.
        sites: where each side makes the checkpoints; filled in by whoever has the recordings of calls.
    """

    policy: TensorPolicy
    checkpoints: tuple[CheckpointComparison, ...]
    coverage: Mapping[str, Coverage]
    pairing: Pairing
    drift: tuple[tuple[int, float, float], ...] = ()
    notes: tuple[str, ...] = ()
    flips: tuple[Flip, ...] = ()
    routing: Routed | None = None
    flipped: Mapping[Mode, frozenset[tuple[str, int]]] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()

    def get(self, name: str) -> CheckpointComparison | None:
        """One checkpoint, if it is there."""
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.name == name), None)

    @property
    def first_divergence(self) -> CheckpointComparison | None:
        """The first checkpoint beyond the policy, layer 0 first; its ``inputs_state`` says whether its inputs agree."""
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.verdict == "beyond"), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; of the pairing only what is not a row."""
        pairing = asdict(replace(self.pairing, rows=()))
        first = self.first_divergence
        return {
            "policy": self.policy.to_dict(),
            "first_divergence": None if first is None else {"name": first.name, "inputs_state": first.inputs_state},
            "checkpoints": [checkpoint.to_dict() for checkpoint in self.checkpoints],
            "coverage": {side: coverage.to_dict() for side, coverage in self.coverage.items()},
            "pairing": {**pairing, "rows": len(self.pairing.rows)},
            "drift": [list(entry) for entry in self.drift],
            "notes": list(self.notes),
            "flips": [asdict(flip) for flip in self.flips],
            "routing": None if self.routing is None else asdict(self.routing),
            "sites": [asdict(site) for site in self.sites],
        }


def compare_traces(
    candidate: Recorded, reference: Recorded, policy: TensorPolicy, progress: Progress | None = None
) -> TensorComparison:
    """Compare two sides.

    Raises:
        ValueError: a trace cannot be read at all. A single bad record becomes ``not comparable`` instead.
    """
    pairing = pair_rows(candidate, reference)
    names = ordered_names(candidate, reference)
    added = {CANDIDATE: judge_added(candidate), REFERENCE: judge_added(reference)}
    structure = reference.structure or candidate.structure
    alike = Alike.of(candidate, reference, len(pairing.rows))
    routes = Routes(candidate, reference, pairing)
    found: dict[str, CheckpointComparison] = {}
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), name)
        try:
            routes.enter(name)
            compare = partial(compare_checkpoint, name, candidate, reference, pairing, policy, alike)
            compared = routes.judge(name, compare(routes.behind), found, compare)
        except Exception as error:  # one bad record never aborts the whole, whatever is wrong with it
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            compared = CheckpointComparison(name, "not comparable", reason)
        layer, kind = _about(name)
        sides = {side: about[name] for side, about in added.items() if name in about}
        inputs = _inputs(name, structure, found)
        found[name] = replace(compared, layer=layer, kind=kind, added=sides, inputs=inputs)
    expected = {side: _expected(trace, names) for side, trace in ((CANDIDATE, candidate), (REFERENCE, reference))}
    coverage = {
        CANDIDATE: cover(candidate, expected[CANDIDATE]),
        REFERENCE: cover(reference, expected[REFERENCE]),
        "paired": _paired(found, set(expected[CANDIDATE]) & set(expected[REFERENCE])),
    }
    notes = (
        *pairing.notes,
        *map(text_of, routers_told(routes.flips, routes.routed)),
        *(note for side, about in added.items() for note in _reduces_unseen(side, about)),
    )
    return TensorComparison(
        policy,
        tuple(found.values()),
        coverage,
        pairing,
        _drift(found, policy),
        notes,
        tuple(routes.flips),
        routes.routed,
        {"free": routes.rows_of(routes.reached), "replay": routes.rows_of(routes.behind)},
    )


def _reduces_unseen(side: str, added: Mapping[str, Added]) -> list[str]:
    """What a side's ranks summed up, where that could not be judged."""
    unseen = [
        about
        for about in added.values()
        if about.verdict == "not observable"
        and any(part.residual.operator in (OPERATOR, EXPERT_SUM) for part in about.parts)
    ]
    if not unseen:
        return []
    return [f"the {side}'s reduces are not observable at {len(unseen)} checkpoints: {unseen[0].name}: {unseen[0].why}"]


def ordered_names(*traces: Recorded) -> tuple[str, ...]:
    """What the models have and what was recorded beyond that, in order."""
    names: set[str] = set()
    for trace in traces:
        names |= recorded_names(trace)
        if trace.structure is not None:
            names |= {str(name) for name in trace.structure.names()}
    return tuple(sorted(names, key=_order))


def _order(name: str) -> tuple[int, int, str]:
    try:
        return (*parse(name).order, name)
    except ValueError:
        match = _LAYER.match(name)  # layer0_any_operator
        return (int(match[1]) if match else 1 << 30, 1 << 20, name)


def _about(name: str) -> tuple[int | None, str]:
    try:
        parsed = parse(name)
    except ValueError:
        return None, name
    return parsed.layer, parsed.kind.name


def _expected(trace: Recorded, names: tuple[str, ...]) -> tuple[str, ...]:
    """What a side should have: what its model has, or what anybody recorded if that is not known."""
    return names if trace.structure is None else tuple(str(name) for name in trace.structure.names())


def _inputs(
    name: str, structure: Structure | None, found: Mapping[str, CheckpointComparison]
) -> tuple[tuple[str, Verdict], ...] | None:
    if structure is None:
        return None
    try:
        parsed = parse(name)
    except ValueError:
        return None
    inputs = [str(other) for other in structure.inputs(parsed)]
    return tuple((other, found[other].verdict if other in found else "not observable") for other in inputs)


def _paired(found: Mapping[str, CheckpointComparison], expected: Collection[str]) -> Coverage:
    """What was compared of the names that both sides should have: layouts differ in what exists under them."""
    both = [checkpoint for name, checkpoint in found.items() if name in expected]
    missing = [checkpoint for checkpoint in both if not checkpoint.compared]
    partial = [checkpoint for checkpoint in both if checkpoint.compared and checkpoint.rows_missing]
    return Coverage(
        expected=len(both),
        observed=len(both) - len(missing) - len(partial),
        missing=tuple(checkpoint.name for checkpoint in missing),
        partial=tuple(checkpoint.name for checkpoint in partial),
        why=(
            *((checkpoint.name, checkpoint.why) for checkpoint in missing),
            *((checkpoint.name, _rows_missing(checkpoint)) for checkpoint in partial),
        ),
    )


def _rows_missing(checkpoint: CheckpointComparison) -> str:
    return "; ".join(f"{count} rows not recorded by the {side}" for side, count in checkpoint.rows_missing.items())


def _drift(found: Mapping[str, CheckpointComparison], policy: TensorPolicy) -> tuple[tuple[int, float, float], ...]:
    return tuple(
        (checkpoint.layer, checkpoint.metrics.rel_l2, policy.predicted(checkpoint.layer))
        for checkpoint in found.values()
        if checkpoint.kind == "block_in"
        and checkpoint.layer is not None
        and checkpoint.metrics is not None
        and checkpoint.metrics.rel_l2 is not None
    )
