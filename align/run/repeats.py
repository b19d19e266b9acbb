"""Whether each side repeats itself, before anything is judged: twice in one engine, and in a fresh one if need be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from adapters.base import Generation
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from align.run.audit import audit_unstable
from align.run.outcome import SideOutcome
from align.run.report import Report
from align.run.residue import left_behind
from align.run.session import Session
from align.run.stability import Stability, refuse_unstable, stability, unstable_remarks


def check_repeats(
    session: Session, report: Report, prompt_lengths: Mapping[str, int], policy: NoisePolicy, fresh: bool
) -> None:
    """Compare each side's two runs; :attr:`Report.findings` says what explains a difference.

    Args:
        session: has run the case twice.
        prompt_lengths: tokens of each request's prompt.
        policy: what rounding explains, where the second run may compute otherwise than the first.
        fresh: try a fresh engine of both sides, not only of one that does not repeat itself.

    Raises:
        UserError: a side does not repeat itself, and nothing tells why.
    """
    found = [_repeats(role, side, prompt_lengths, policy) for role, side in session.outcome.sides.items()]
    report.stability = tuple(found)
    if not all(one.stable for one in found):
        with report.timed("audit"):
            ledgers, faults = audit_unstable(found, session.directories)
            report.ledgers, report.findings = ledgers, tuple(faults)
    unexplained = [] if report.findings else [one.side for one in found if not one.stable]
    _try_fresh(session, report, session.roles if fresh else unexplained, prompt_lengths)
    if report.findings:
        report.remarks = (*report.remarks, *unstable_remarks(found))
    else:
        refuse_unstable(found)


def _repeats(role: str, side: SideOutcome, lengths: Mapping[str, int], policy: NoisePolicy) -> Stability:
    assert side.free is not None and side.again is not None
    found = stability(role, side.free.generations, side.again.generations)
    # What the first run left in a prefix cache the second one does not compute: other kernels, other roundings.
    if found.unstable is not None and _caches(side):
        return _but_near_ties(found, side.free.generations, side.again.generations, lengths, policy)
    return found


def _but_near_ties(
    found: Stability,
    first: Sequence[Generation],
    second: Sequence[Generation],
    lengths: Mapping[str, int],
    policy: NoisePolicy,
) -> Stability:
    """The same without flips that rounding explains."""
    compared = compare_tokens(first, second, mode="free", policy=policy, prompt_lengths=lengths)
    if compared.verdict == "diverged" or compared.noise_above_cap:
        return found
    return replace(found, unstable=None, near_ties=len(compared.near_ties))


def _caches(side: SideOutcome) -> bool:
    """Whether it keeps prefixes from one run to the next."""
    return any(one.name == "prefix_caching" and one.value is True for one in side.observations)


def _try_fresh(session: Session, report: Report, roles: Collection[str], lengths: Mapping[str, int]) -> None:
    """The case in a fresh engine of some sides: whether a run leaves something behind."""
    if not roles:
        return
    with report.timed("fresh engine"):
        session.generate_fresh(roles)
    for one in report.stability:
        side = session.outcome.sides[one.side]
        if side.fresh is not None and side.free is not None:
            anew = stability(one.side, side.free.generations, side.fresh.generations)
            left = left_behind(one, anew, lengths)
            report.fresh += (anew,)
            report.findings += () if left is None else (left,)
