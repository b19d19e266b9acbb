"""Tokens that a router sends to other experts on the two sides, and what lies behind them.

A choice of experts is discrete: where two scores are as near as rounding makes them, right engines choose differently.
Such a *flip* is a near-tie. It is listed and is no finding, and the token's rows behind it are no longer compared: from
the layer's weights on, and from the next layer's attention on the later tokens of the same request too. Operators are
still judged by what they add to their own inputs.

A flip is a near-tie if both sides chose rightly by their own logits, and the sides' logits agree within the bounds of
carried tensors.

A side may have replayed the other one's routing (:mod:`adapters.probe.routing`): it recorded its router's own choice,
and beside it the experts that were used. Then a near-tie hides nothing, and is listed all the same; and a choice of its
own that is wrong is still found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import torch

from align.checkpoints.bounds import bounds
from align.checkpoints.recompute import Routing, choice_excess, expert_scores
from align.checkpoints.routing import routing_of
from align.checkpoints.table import kinds, parse
from align.compare.alike import SLACK
from align.compare.checkpoint import CheckpointComparison
from align.compare.gather import gather
from align.compare.pairing import Pairing
from align.compare.rows import CANDIDATE, REFERENCE, PairedRow, Recorded, RowKey
from align.sentences import Said, said, text_of
from align.trace.format import USED

Tensor = torch.Tensor
IDS, LOGITS = "moe.topk_ids", "moe.router_logits"
LISTED = 4


@dataclass(frozen=True)
class Flip:
    """A near-tie of a router.

    Attributes:
        name: the checkpoint of the choice.
        row: the token.
        candidate, reference: experts that this side alone chose, rising.
        gaps: by side, by how much its best score beats the other side's choice, of the score's own size.
        step: in which the candidate computed the token; ``phase`` is that step's.
        swing: by how much the difference of the two choices' logits changes from side to side.
        noise: by how much the difference of two logits of this row does, the experts of the flip left out; a swing of
            a few times that is what one expects of the nearest of many.
        behind: rows that lie behind it: its own, and from the next attention on the later ones of its request.
        replayed: both sides used the same experts all the same, so that nothing behind it is hidden.
    """

    name: str
    row: RowKey
    candidate: tuple[int, ...]
    reference: tuple[int, ...]
    gaps: Mapping[str, float]
    step: int = 0
    phase: str = ""
    swing: float = 0.0
    noise: float = 0.0
    behind: int = 1
    replayed: bool = False

    @property
    def layer(self) -> int:
        found = parse(self.name).layer
        assert found is not None, self.name
        return found


@dataclass(frozen=True)
class Routed:
    """What lies behind near-ties at the end.

    Attributes:
        reached: paired rows behind one.
        behind: those that were not compared.
        rows: paired rows.
        replayed: the side that used the other one's experts; empty if none did.
    """

    reached: int = 0
    behind: int = 0
    rows: int = 0
    replayed: str = ""


class Routes:
    """Follows the choices of experts while checkpoints are compared in order.

    Attributes:
        flips: near-ties so far.
        behind: bool ``[paired rows]``: rows that are no longer compared.
        reached: bool ``[paired rows]``: rows that lie behind a near-tie, compared or not.
        replayed: the side that used the other one's experts; empty if none did.
    """

    def __init__(self, candidate: Recorded, reference: Recorded, pairing: Pairing) -> None:
        self._traces = {CANDIDATE: candidate, REFERENCE: reference}
        self._rows: Sequence[PairedRow] = pairing.rows
        self._routing: Routing | None = routing_of(reference.manifest.get("model") or {})
        self._known = candidate.structure is not None and reference.structure is not None and not pairing.by_order
        self._layers = 0 if reference.structure is None else reference.structure.layers
        self.flips: list[Flip] = []
        self.behind = torch.zeros(len(pairing.rows), dtype=torch.bool)
        self.reached = self.behind.clone()
        self.replayed = ""

    def enter(self, name: str) -> None:
        """A checkpoint is compared next: attention spreads what a flip changed to the later tokens of its request."""
        if not name.endswith(".attn.out"):
            return
        for one in (self.behind, self.reached):
            if bool(one.any()):
                one |= torch.tensor(self._after(one))

    def _after(self, behind: Tensor) -> list[bool]:
        """Rows at or after the first one of their request that is behind something."""
        first: dict[str, int] = {}
        for row, is_behind in zip(self._rows, behind.tolist(), strict=True):
            if is_behind:
                first[row.key.request] = min(row.key.position, first.get(row.key.request, row.key.position))
        return [row.key.position >= first.get(row.key.request, 1 << 62) for row in self._rows]

    def judge(
        self,
        name: str,
        compared: CheckpointComparison,
        found: Mapping[str, CheckpointComparison],
        without: Callable[[Tensor], CheckpointComparison],
    ) -> CheckpointComparison:
        """The comparison of a choice whose differences are near-ties, as ``within``; any other one as it is.

        Args:
            found: the checkpoints before it.
            without: compares it again, without some of the paired rows (bool).
        """
        if not self._known or not name.endswith(f".{IDS}") or not compared.compared:
            return compared
        used = self._used(name)
        if compared.verdict != "beyond" or compared.metrics is None:
            self._leave_out(used)
            return compared
        logits_name = name.removesuffix(IDS) + LOGITS
        logits = found.get(logits_name)
        routing = self._routing
        # A sigmoid router adds a bias that is not recorded.
        if routing is None or routing.scoring != "softmax" or logits is None or not logits.compared:
            return compared
        flips, places, differing = self._near_ties(name, logits_name, routing, used)
        if logits.verdict == "beyond":
            return compared
        if not flips:
            return self._accuse(compared, name, logits_name, routing)
        rest = self.behind.clone()
        rest[places] = True
        self.flips += flips
        self.reached[places] = True
        if used is None:
            self.behind[places] = True
        self._leave_out(used)
        if len(flips) < differing:
            return self._accuse(without(rest), name, logits_name, routing)  # it names a row that is wrong
        words = f"{len(flips)} rows differ by near-ties of the router" if len(flips) > 1 else "1 row: a near-tie"
        return replace(compared, verdict="within", why=words, said=None)

    def _accuse(
        self, compared: CheckpointComparison, name: str, logits_name: str, routing: Routing
    ) -> CheckpointComparison:
        """A wrong choice, with the side whose own logits refute it at the row that is named, if it is one side."""
        place = next((at for at, row in enumerate(self._rows) if row == compared.worst), None)
        wrong = (
            []
            if place is None
            else [side for side in self._traces if self._refuted(side, name, logits_name, place, routing)]
        )
        if len(wrong) != 1 or compared.said is None:
            return compared
        told = said("router.wrong_choice", why=compared.said, side=wrong[0])
        return replace(compared, wrong_side=wrong[0], said=told, why=text_of(told))

    def _refuted(self, side: str, name: str, logits_name: str, place: int, routing: Routing) -> bool:
        ids, logits = self._gathered(side, name, [place]), self._gathered(side, logits_name, [place])
        if ids is None or logits is None:
            return False
        allowed = bounds()["topk_ids"].max_roundings * SLACK
        return float(choice_excess(logits, ids, routing, logits.dtype).max()) > allowed

    def _used(self, name: str) -> Tensor | None:
        """Whether both sides used the same experts, bool ``[paired rows]``; ``None`` if no side replayed a routing."""
        rows = range(len(self._rows))
        replayed = {side: self._gathered(side, name + USED, rows) for side in self._traces}
        chosen = next((side for side, value in replayed.items() if value is not None), None)
        if chosen is None:
            return None
        sides = [
            self._gathered(side, name, rows) if replayed[side] is None else replayed[side] for side in self._traces
        ]
        one, other = sides
        if one is None or other is None or one.shape != other.shape:
            return None
        self.replayed = chosen
        return (one == other).all(1)

    def _leave_out(self, used: Tensor | None) -> None:
        """Rows whose experts differ although a routing was replayed are not compared behind it."""
        if used is not None:
            self.behind |= ~used

    def _near_ties(
        self, name: str, logits_name: str, routing: Routing, used: Tensor | None
    ) -> tuple[list[Flip], list[int], int]:
        """Near-ties, their places among the paired rows, and how many rows differ."""
        open_rows = (~self.behind).nonzero()[:, 0].tolist()
        ids = {side: self._gathered(side, name, open_rows) for side in self._traces}
        one, other = ids[CANDIDATE], ids[REFERENCE]
        if one is None or other is None or one.shape != other.shape:
            return [], [], -1
        apart = (one != other).any(1).nonzero()[:, 0]
        places = [open_rows[at] for at in apart.tolist()]
        own = {side: self._gathered(side, logits_name, places) for side in self._traces}
        ours, theirs = own[CANDIDATE], own[REFERENCE]
        if ours is None or theirs is None:
            return [], [], len(places)
        right = torch.ones(len(places), dtype=torch.bool)
        allowed = bounds()["topk_ids"].max_roundings * SLACK
        for logits, chosen in ((ours, one), (theirs, other)):
            right &= choice_excess(logits, chosen[apart], routing, logits.dtype).amax(1) <= allowed
        flips, kept = [], []
        for at in right.nonzero()[:, 0].tolist():
            sets = {CANDIDATE: set(one[apart[at]].tolist()), REFERENCE: set(other[apart[at]].tolist())}
            only = (sets[CANDIDATE] - sets[REFERENCE], sets[REFERENCE] - sets[CANDIDATE])
            flips.append(self._flip(name, places[at], only, (ours[at], theirs[at]), routing, used))
            kept.append(places[at])
        return flips, kept, len(places)

    def _flip(
        self,
        name: str,
        place: int,
        only: tuple[set[int], set[int]],
        logits: tuple[Tensor, Tensor],
        routing: Routing,
        used: Tensor | None,
    ) -> Flip:
        """``only`` and ``logits`` ``[experts]`` are the candidate's, then the reference's."""
        mine, theirs = (sorted(one) for one in only)
        gaps = {}
        for side, own, chosen, others in zip(
            (CANDIDATE, REFERENCE), logits, (mine, theirs), (theirs, mine), strict=True
        ):
            scores = expert_scores(own[None], routing, torch.float64).value[0]
            best, left = float(scores[chosen].sum()), float(scores[others].sum())
            gaps[side] = (best - left) / best
        moved = (logits[0].double() - logits[1].double()).nan_to_num()
        rest = moved[[expert for expert in range(len(moved)) if expert not in {*mine, *theirs}]]
        row = self._rows[place]
        flip = Flip(
            name=name,
            row=row.key,
            candidate=tuple(mine),
            reference=tuple(theirs),
            gaps=gaps,
            step=row.candidate.step,
            phase=row.phase,
            swing=float(moved[mine].mean() - moved[theirs].mean()),
            noise=sqrt(2.0) * float(rest.std(correction=0)) if len(rest) else 0.0,
            replayed=used is not None and bool(used[place]),
        )
        later = flip.layer + 1 < self._layers
        behind = sum(one.key.request == row.key.request and one.key.position >= row.key.position for one in self._rows)
        return replace(flip, behind=behind) if later else flip

    def _gathered(self, side: str, name: str, rows: Sequence[int]) -> Tensor | None:
        """Values at paired rows, ``None`` unless all of them were recorded."""
        places = [getattr(self._rows[row], side) for row in rows]
        found = gather(self._traces[side], name, places) if places else None
        return None if found is None or len(found.rows) != len(rows) else found.tensor

    def rows_of(self, chosen: Tensor) -> frozenset[tuple[str, int]]:
        """Request and position of some paired rows; ``chosen``: bool ``[paired rows]``."""
        return frozenset(
            (row.key.request, row.key.position) for row, one in zip(self._rows, chosen.tolist(), strict=True) if one
        )

    @property
    def routed(self) -> Routed | None:
        """As it is by now; ``None`` without near-ties."""
        if not self.flips:
            return None
        return Routed(int(self.reached.sum()), int(self.behind.sum()), len(self._rows), self.replayed)


def routers_told(flips: Sequence[Flip], routed: Routed | None) -> list[Said]:
    """Near-ties in sentences, and what came of the rows behind them."""
    words = [flip_told(one) for one in flips[:LISTED]]
    if len(flips) > LISTED:
        words.append(said("router.more", count=len(flips) - LISTED))
    return words if routed is None else [*words, reach_told("", len(flips), routed)]


def flip_told(one: Flip) -> Said:
    """A near-tie: where, which experts, and how near."""
    key = "router.flip" if len(one.candidate) == len(one.reference) == 1 else "router.flips"
    return said(
        key,
        place=said("place.row", request=one.row.request, position=one.row.position),
        step=one.step,
        layer=one.layer,
        candidate=one.candidate if key == "router.flips" else one.candidate[0],
        reference=one.reference if key == "router.flips" else one.reference[0],
        candidate_gap=100 * one.gaps[CANDIDATE],
        reference_gap=100 * one.gaps[REFERENCE],
        swing=one.swing,
        noise=one.noise,
        behind=one.behind,
    )


def reach_told(form: Literal["", "short_"], flips: int, routed: Routed) -> Said:
    """How many rows lie behind near-ties, and whether they were compared all the same."""
    state = "compared" if not routed.behind else "partly" if routed.replayed and not form else "hidden"
    key = f"router.{form}{state}"
    about = {"reached": routed.reached, "behind": routed.behind, "rows": routed.rows, "side": routed.replayed}
    return said(key, flips=flips, **about)


assert {IDS, LOGITS} <= kinds().keys()
