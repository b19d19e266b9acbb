"""Which layout to run next, and what the rungs say: a pure function of what is known.

The table of design §7: (smallest TP that fits, 1, 1) → (T, 1, 1) → (T, D, 1) → (T, D, E). Rungs that coincide are one.
The walk stops at the first rung that diverges. Where several dimensions changed at once before it, they are added one
at a time: TP first, then DP, then EP (seed 003, troubleshooting: "Fix TP, add DP first").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from align.ladder.types import Conclusion, Ran, Step
from align.layout import DIMENSIONS, Dimension, Layout
from align.sentences import Said, said

#: Paths whose findings say nothing about the layout: the inputs or the machine are wrong.
OUTSIDE = ("INPUT", "ENV")


def ladder_to(target: Layout, min_tp: int = 1) -> tuple[Layout, ...]:
    """The rungs to a target, from the simplest up.

    Args:
        min_tp: smallest TP at which the model fits; a target with less is its own simplest rung.
    """
    first = Layout(min(min_tp, target.tp))
    rungs = (first, Layout(target.tp), Layout(target.tp, target.dp), target)
    return tuple(dict.fromkeys(rungs))


def ordered(layouts: Iterable[Layout]) -> tuple[Layout, ...]:
    """From the simplest up, each once: fewer ranks first; of as many, those with TP alone, then DP, then EP."""
    return tuple(sorted(set(layouts), key=lambda one: (one.world, one.ep, one.dp, one.tp)))


def changed(simpler: Layout, other: Layout) -> tuple[Dimension, ...]:
    """The dimensions in which two layouts differ. EP is on or off: its size is that of the world."""
    differs = {"tp": simpler.tp != other.tp, "dp": simpler.dp != other.dp, "ep": (simpler.ep > 1) != (other.ep > 1)}
    return tuple(name for name in DIMENSIONS if differs[name])


def between(simpler: Layout, other: Layout) -> tuple[Layout, ...]:
    """The layouts from one to the other, both excluded, that add one dimension at a time."""
    tp, dp, experts = simpler.tp, simpler.dp, simpler.ep > 1
    found = []
    for dimension in changed(simpler, other)[:-1]:
        tp = other.tp if dimension == "tp" else tp
        dp = other.dp if dimension == "dp" else dp
        found.append(Layout(tp, dp, tp * dp if experts else 1))
    return tuple(found)


def next_move(planned: Iterable[Layout], ran: Mapping[Layout, Ran]) -> Step | Conclusion:
    """What to do now.

    Args:
        planned: the rungs; the last in :func:`ordered` is the target.
        ran: what is known, the target's own run included if it was made.
    """
    rungs = ordered((*planned, *ran))
    for rung in rungs:
        if rung not in ran:
            return Step(rung, "listed")
        if ran[rung].verdict == "diverged":
            return _explain(rung, ran, rungs)
    target = ran[rungs[-1]]
    skipped = [str(one) for one in rungs if ran[one].verdict == "not comparable"]
    if target.verdict == "aligned":
        told = said("ladder.nothing", rungs=_names(rungs, ran, "aligned"))
        return Conclusion("nothing", _with_skipped(told, skipped))
    clean = _names(rungs, ran, "aligned")
    if clean:
        return Conclusion("unknown", said("ladder.not_reached", target=str(target.layout), clean=clean, left=skipped))
    return Conclusion("unknown", said("ladder.none", left=skipped))


def _explain(rung: Layout, ran: Mapping[Layout, Ran], rungs: tuple[Layout, ...]) -> Step | Conclusion:
    """What the first diverging rung says."""
    simpler = [one for one in rungs if one != rung and one.within(rung)]
    clean = [one for one in simpler if ran[one].verdict == "aligned"]
    if not clean:
        return _without_clean(rung, ran, simpler, rungs[-1])
    # Fewest dimensions apart; of these the nearest.
    base = min(reversed(clean), key=lambda one: len(changed(one, rung)))
    dimensions = changed(base, rung)
    skipped = [str(one) for one in simpler if ran[one].verdict == "not comparable"]
    if len(dimensions) > 1:
        for one in between(base, rung):
            if one not in ran:
                return Step(one, "inserted")
        told = said(
            "ladder.unclear", dimensions=_upper(dimensions), clean=str(base), at=str(rung), left=skipped or ["-"]
        )
        return Conclusion("unclear", told, None, dimensions, rung, base)
    told = said("ladder.introduced", dimension=_upper(dimensions)[0], clean=str(base), at=str(rung))
    return Conclusion("introduced", _with_skipped(told, skipped), dimensions[0], dimensions, rung, base)


def _without_clean(rung: Layout, ran: Mapping[Layout, Ran], simpler: list[Layout], target: Layout) -> Conclusion:
    """A rung diverges, and no simpler one is aligned."""
    if simpler:  # none of them could be compared
        told = said("ladder.no_base", at=str(rung), left=[str(one) for one in simpler])
        return Conclusion("unknown", told, introduced_at=rung)
    first, aimed = ran[rung].headline, ran.get(target)
    if rung.world > 1:
        return Conclusion("everywhere", said("ladder.simplest", at=str(rung)), introduced_at=rung)
    if rung == target:
        return Conclusion("everywhere", said("ladder.serial", at=str(rung)), introduced_at=rung)
    path = "-" if first is None else first.path
    aim = None if aimed is None else aimed.headline
    if first is not None and aim is not None and not first.like(aim):
        told = said("ladder.other", at=str(rung), path=path, target=str(target), target_path=aim.path)
    else:
        told = said("ladder.everywhere", at=str(rung), path=path)
    return Conclusion("everywhere", told, introduced_at=rung)


def accused_sides(conclusion: Conclusion, ran: Mapping[Layout, Ran]) -> tuple[str, ...]:
    """Whose engine is to be compared with itself at the simpler layout: the accused one's, else both."""
    if conclusion.state not in ("introduced", "unclear") or conclusion.introduced_at is None:
        return ()
    first = ran[conclusion.introduced_at].headline
    return ("candidate", "reference") if first is None or first.side is None else (first.side,)


def starts_by_itself(world: int, verdict: str, path: str | None) -> bool:
    """Whether a run's own verdict asks for a ladder: a parallel target that diverges, and not in its inputs."""
    return world > 1 and verdict == "diverged" and path not in OUTSIDE


def _upper(dimensions: Iterable[Dimension]) -> list[str]:
    return [one.upper() for one in dimensions]


def _names(rungs: Iterable[Layout], ran: Mapping[Layout, Ran], verdict: str) -> list[str]:
    return [str(one) for one in rungs if ran[one].verdict == verdict]


def _with_skipped(told: Said, skipped: list[str]) -> Said:
    if not skipped:
        return told
    return said("list.semicolon", parts=[told, said("ladder.skipped", left=skipped)])
