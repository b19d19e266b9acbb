"""The rows of the seeds' symptom tables, each answered from what a run saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

from adapters.base import Generation
from align.checkpoints.table import parse
from align.compare.host import KIND as HOST
from align.compare.tokens import Difference, TokenComparison
from align.result.ground import Ground
from align.run.report import Report
from align.sentences import Said, said

#: Last tokens that are one short pattern over and over, and its length at most.
REPEATED, PERIOD = 8, 3
#: Of forced steps, the share that may prefer another id before the output counts as another text altogether.
UNRELATED, LEAST_STEPS = 0.5, 8
#: How much larger the later half's logprob difference is where it grows.
GROWS = 2.0
#: Layers that must be beyond, each further than the one before.
BUILDS_UP = 3

SHOWN, NOT_SHOWN, HIDDEN = "shown", "not shown", "not observable"
#: State, and what it rests on.
Answer = tuple[str, Said | str]


class Seen:
    """What a run saw, as the rows ask for it."""

    def __init__(self, report: Report, ground: Ground) -> None:
        self.report, self.ground = report, ground
        self.free: TokenComparison | None = report.comparisons.get("free")
        self.replay: TokenComparison | None = report.comparisons.get("replay")
        compared = [one for one in (self.free, self.replay) if one is not None]
        #: Request → its earliest real difference, of either run.
        self.first: dict[str, Difference] = {}
        for one in (difference for comparison in compared for difference in comparison.differences):
            before = self.first.get(one.request)
            if not one.near_tie and (before is None or one.index < before.index):
                self.first[one.request] = one
        self.requests = [] if self.free is None else [one.request for one in self.free.requests]
        self.differs = bool(self.first) or bool(report.findings)

    @property
    def tokens(self) -> bool:
        return self.free is not None

    def kinds(self) -> set[str]:
        return {one.kind for one in self.report.findings}

    def generations(self, runs: Mapping[str, Sequence[Generation]]) -> dict[str, tuple[Generation, Generation]]:
        """Request → candidate's and reference's."""
        sides = [{one.request: one for one in runs.get(side, ())} for side in ("candidate", "reference")]
        return {name: (sides[0][name], sides[1][name]) for name in sides[0] if name in sides[1]}


def answers(seen: Seen) -> list[tuple[str, Answer]]:
    """Row and answer, in the order of the tables."""
    table: tuple[tuple[str, Callable[[Seen], Answer]], ...] = (
        ("003-SY-1", _first_wrong),
        ("003-SY-2", _drifts),
        ("003-SY-3", _grows),
        ("003-SY-4", _fixed_depth),
        ("003-SY-5", _parallel_only),
        ("003-SY-6", _batch_only),
        ("003-S4-1", _growth_is_no_proof),
        ("003-S4-2", _on_the_host),
        ("003-S4-3", _one_request_first),
        ("003-S4-4", _simplest_layout),
        ("003-S4-5", _path_b_from_layer_0),
        ("000-S2.1-1", _repeated_or_garbled),
        ("000-S2.1-2", _drifts),
        ("000-S2.1-3", _decode_far_off),
        ("000-S2.1-4", nonfinite),
        ("000-S2.1-5", _builds_up),
        ("000-S2.1-6", some_of_a_batch),
        ("000-S2.1-7", _quantised_only),
        ("003-TS-06", _unstable),
    )
    return [(row, answer(seen)) for row, answer in table]


def _needs_tokens(seen: Seen) -> Answer | None:
    return None if seen.tokens else (HIDDEN, "no tokens were compared")


def _first_wrong(seen: Seen) -> Answer:
    wrong = [name for name, one in seen.first.items() if one.index == 0]
    return _needs_tokens(seen) or (
        (SHOWN, said("symptom.first_wrong", requests=wrong)) if wrong else (NOT_SHOWN, "every first token agrees")
    )


def _drifts(seen: Seen) -> Answer:
    late = {name: one.index for name, one in seen.first.items() if one.index > 0}
    if late:
        parts = [said("symptom.drifts", request=name, index=index) for name, index in late.items()]
        return SHOWN, said("list.comma", parts=parts)
    return _needs_tokens(seen) or (NOT_SHOWN, "no request differs at a later token first")


def _gaps(one: Generation, other: Generation) -> list[float]:
    """Of each step the largest difference of a logprob that both sides list; 0 where they list none in common."""
    gaps = []
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        known = dict(theirs.top)
        apart = [abs(value - known[token]) for token, value in mine.top if token in known]
        gaps.append(max((gap for gap in apart if isfinite(gap)), default=0.0))
    return gaps


def _grows(seen: Seen) -> Answer:
    pairs = seen.generations(seen.ground.replay)
    if not pairs or seen.replay is None:
        return HIDDEN, "only a run along the same tokens tells growth from drift, and there is none"
    halves: tuple[list[float], list[float]] = ([], [])
    for one, other in pairs.values():
        gaps = _gaps(one, other)
        for index, gap in enumerate(gaps):
            halves[index >= len(gaps) / 2].append(gap)
    if min(map(len, halves)) < LEAST_STEPS // 2:
        return HIDDEN, "too few tokens were generated"
    early, late = median(halves[0]), median(halves[1])
    about = said("symptom.grows", early=early, late=late)
    grows = seen.differs and late > GROWS * early and late > seen.replay.policy.floor
    return (SHOWN if grows else NOT_SHOWN), about


def _fixed_depth(seen: Seen) -> Answer:
    if seen.report.tensors is None:
        return HIDDEN, "no tensors were compared"
    beyond = [one for one in seen.report.tensors.checkpoints if one.verdict == "beyond" and one.layer is not None]
    moved = [one for one in seen.report.findings if one.kind != HOST or one.evidence.get("affected")]
    origins = [one for one in moved if one.layer is not None and one.checkpoint is not None]
    if origins:
        first = min(origins, key=lambda one: parse(str(one.checkpoint)).order)
        return SHOWN, said("symptom.begins", layer=first.layer, checkpoint=first.checkpoint)
    if beyond:
        return SHOWN, said("symptom.differ_from", checkpoint=beyond[0].name)
    return NOT_SHOWN, "no layer differs by more than rounding"


def _world(seen: Seen) -> int | None:
    case = seen.ground.case
    return None if case is None else case.layout.tp * case.layout.dp


def _parallel_only(seen: Seen) -> Answer:
    world = _world(seen)
    if not seen.differs:
        return NOT_SHOWN, "nothing differs"
    if world == 1:
        return NOT_SHOWN, "one rank shows it"
    if any(one.path == "C" for one in seen.report.findings):
        return SHOWN, said("symptom.collective", world=world)
    return HIDDEN, "run the simplest layout that holds the weights"


def _batch_only(seen: Seen) -> Answer:
    case = seen.ground.case
    if not seen.differs:
        return NOT_SHOWN, "nothing differs"
    if case is not None and (len(case.requests) == 1 or case.batch.max_batch == 1):
        return NOT_SHOWN, "a request alone shows it"
    alone = seen.report.alone
    if alone is not None:
        key = "symptom.alone_same" if alone.reproduced else "symptom.alone_not"
        return NOT_SHOWN if alone.reproduced else SHOWN, said(key, request=alone.request)
    return HIDDEN, "run one request alone"


def _growth_is_no_proof(seen: Seen) -> Answer:
    shown = _drifts(seen)[0] == SHOWN or _grows(seen)[0] == SHOWN
    return (SHOWN, said("symptom.later")) if shown else (NOT_SHOWN, "nothing builds up over the tokens")


def _on_the_host(seen: Seen) -> Answer:
    found = next((one for one in seen.report.findings if one.kind == HOST), None)
    if found is not None:
        place = next(iter(found.evidence.get("moved_at") or found.evidence.get("made_at") or []), "")
        return SHOWN, said("symptom.host", side=found.side, place=place)
    return (
        (HIDDEN, "no step was recorded") if seen.report.tensors is None else (NOT_SHOWN, "no float came from the host")
    )


def _unlocated(seen: Seen) -> bool:
    return bool(seen.report.findings) and all(one.path == "UNLOCATED" for one in seen.report.findings)


def _one_request_first(seen: Seen) -> Answer:
    several = seen.ground.case is None or len(seen.ground.case.requests) > 1
    shown = _unlocated(seen) and several
    return (SHOWN, said("symptom.several")) if shown else (NOT_SHOWN, "not needed")


def _simplest_layout(seen: Seen) -> Answer:
    shown = _unlocated(seen) and (_world(seen) or 1) > 1
    return (SHOWN, said("symptom.several_ranks")) if shown else (NOT_SHOWN, "not needed")


def _path_b_from_layer_0(seen: Seen) -> Answer:
    shown = _unlocated(seen) and _one_request_first(seen)[0] != SHOWN and (_world(seen) or 1) == 1
    return (SHOWN, said("symptom.one_on_one")) if shown else (NOT_SHOWN, "not needed")


def _pattern(ids: Sequence[int]) -> int | None:
    """Length of the pattern that the last ids repeat."""
    tail = list(ids[-REPEATED:])
    if len(tail) < REPEATED:
        return None
    return next((size for size in range(1, PERIOD + 1) if tail[size:] == tail[:-size]), None)


def repeats(seen: Seen) -> list[str]:
    """Requests that one side alone answers with one pattern over and over."""
    pairs = seen.generations(seen.ground.free)
    return [
        name
        for name, (one, other) in pairs.items()
        if (_pattern(one.token_ids) is None) != (_pattern(other.token_ids) is None) and name in seen.first
    ]


def unrelated(seen: Seen) -> float | None:
    """Share of the forced steps at which the sides prefer different ids, if that is most of them."""
    if seen.replay is None:
        return None
    steps = sum(one.compared for one in seen.replay.requests)
    apart = sum(not one.near_tie for one in seen.replay.differences)
    return apart / steps if steps >= LEAST_STEPS and apart > UNRELATED * steps else None


def _repeated_or_garbled(seen: Seen) -> Answer:
    repeated = repeats(seen)
    if repeated:
        return SHOWN, said("symptom.repeats", requests=repeated)
    share = unrelated(seen)
    if share is not None:
        return SHOWN, said("symptom.unrelated", share=share)
    return _needs_tokens(seen) or (NOT_SHOWN, "no side alone repeats itself, and most choices agree")


def _decode_far_off(seen: Seen) -> Answer:
    if seen.replay is None:
        return HIDDEN, "there is no run along the same tokens"
    real = [one for one in seen.replay.differences if not one.near_tie]
    steps = sum(max(0, one.compared - 1) for one in seen.replay.requests)
    if any(one.index == 0 for one in real):
        return NOT_SHOWN, "prefill differs too"
    share = len(real) / steps if steps else 0.0
    about = said("symptom.decode_off", count=len(real), steps=steps)
    return (SHOWN if share > UNRELATED else NOT_SHOWN), about


def nonfinite(seen: Seen) -> Answer:
    token = next((one for one in seen.first.values() if one.kind == "nonfinite"), None)
    if token is not None:
        return SHOWN, said("symptom.no_number", request=token.request, index=token.index)
    tensors = seen.report.tensors
    if tensors is not None:
        for one in tensors.checkpoints:
            if one.metrics is not None and one.metrics.nonfinite:
                return SHOWN, said("symptom.not_finite", count=one.metrics.nonfinite, name=one.name)
    if not seen.tokens and tensors is None:
        return HIDDEN, "nothing was compared"
    return NOT_SHOWN, "everything that was compared is finite"


def _builds_up(seen: Seen) -> Answer:
    if seen.report.tensors is None:
        return HIDDEN, "no tensors were compared"
    inputs = [one for one in seen.report.tensors.checkpoints if one.kind == "block_in" and one.metrics is not None]
    chain: list[Any] = []
    for one in sorted(inputs, key=lambda found: found.layer or 0):
        assert one.metrics is not None
        if (
            one.verdict == "beyond"
            and one.metrics.rel_l2 is not None
            and (not chain or one.metrics.rel_l2 > chain[-1].metrics.rel_l2)
        ):
            chain.append(one)
    if len(chain) < BUILDS_UP:
        return NOT_SHOWN, "no run of layers is further off each time by more than rounding"
    first, last = chain[0], chain[-1]
    early, late = ({"value": one.metrics.rel_l2, "name": one.name} for one in (first, last))
    return SHOWN, said("symptom.builds_up", first=said("symptom.l2_at", **early), last=said("symptom.l2_at", **late))


def some_of_a_batch(seen: Seen) -> Answer:
    missing = _needs_tokens(seen)
    if missing is not None:
        return missing
    wrong = [name for name in seen.requests if name in seen.first]
    if not wrong or len(wrong) == len(seen.requests):
        return NOT_SHOWN, "every request differs" if wrong else "no request differs"
    case = seen.ground.case
    if case is not None and case.batch.max_batch == 1:
        return NOT_SHOWN, "requests ran one at a time"
    return SHOWN, said("symptom.some", requests=wrong, total=len(seen.requests))


def _quantised_only(seen: Seen) -> Answer:
    info = seen.ground.info
    if info is None:
        return HIDDEN, "the model is not known"
    if not info.config.get("quantization_config"):
        return NOT_SHOWN, "the model is not quantised"
    return HIDDEN, "run the float model as well"


def _unstable(seen: Seen) -> Answer:
    if not seen.report.stability:
        return HIDDEN, "no side ran twice"
    lost = [one.side for one in seen.report.stability if not one.stable]
    return (SHOWN, said("symptom.unstable", sides=lost)) if lost else (NOT_SHOWN, "each side repeats its own tokens")
