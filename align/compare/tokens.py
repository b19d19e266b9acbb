"""Compare the greedy tokens of two sides, and tell a near-tie from a real difference.

Two kinds of run are compared. In a *free* run each side feeds its own tokens back, so that nothing after a
request's first difference is comparable. In a *replay* both sides are forced along the same ids, so every
step is comparable and every step at which they prefer different ids (a flip) is listed.

A flip is a near-tie if both sides nearly had it the other way round. Its two margins together are what the two
sides differ by about the two ids, so they may be twice what the sides differ by about one: the noise. The noise
of a step is the largest difference of the two sides' logprobs over ids that both list, at this and earlier
comparable steps of all requests, extrapolated to as many as would show the largest (:mod:`align.compare.noise`).
The two ids of a flip do not count for it at that step: any flip would excuse itself. A margin that cannot be
known, because one id is missing from a side's list, is never within the noise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import isfinite
from typing import Any, Literal

from adapters.base import Generation, TokenStep
from align.compare.noise import NoisePolicy
from align.sentences import said, text_of

Mode = Literal["free", "replay"]


@dataclass(frozen=True)
class Difference:
    """One place where the two sides disagree.

    Attributes:
        request: name of the request.
        index: index of the generated token, from 0.
        position: its place in the sequence (prompt length + index); ``None`` if the prompt length was not
            given.
        kind: ``token`` (different ids), ``length`` (one side stopped earlier) or ``nonfinite`` (NaN or
            infinite logprob).
        candidate_id, reference_id: the ids; ``None`` where a side has no token.
        candidate_top, reference_top: each side's ``((id, logprob), …)``.
        candidate_margin: how much the candidate prefers its own id to the reference's; ``None`` if it lists
            only one.
        reference_margin: likewise for the reference.
        candidate_margin_at_least, reference_margin_at_least: lower bounds where the margin itself is unknown.
        noise: measured noise up to this step; 0.0 if nothing could be measured.
        tolerance: by how much the sides may differ about one logprob: the noise after extrapolation, floor and cap.
        near_tie: both margins are known, and together within twice the tolerance.
        why: the reason for ``near_tie``, in words.
        told: the same as data.
        golden_id: what the golden run prefers here, if its history is the same.
        golden_margin: the golden run's preference for the reference's id over the candidate's (negative: the
            candidate is right); ``None`` if unknown.
    """

    request: str
    index: int
    position: int | None
    kind: Literal["token", "length", "nonfinite"]
    candidate_id: int | None
    reference_id: int | None
    candidate_top: tuple[tuple[int, float], ...]
    reference_top: tuple[tuple[int, float], ...]
    candidate_margin: float | None
    reference_margin: float | None
    candidate_margin_at_least: float | None
    reference_margin_at_least: float | None
    noise: float
    tolerance: float
    near_tie: bool
    why: str
    golden_id: int | None = None
    golden_margin: float | None = None
    told: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestComparison:
    """One request on both sides.

    Attributes:
        request: its name.
        outcome: ``equal``, ``near_tie`` (differs, but only so) or ``diverged``.
        compared: steps with the same history on both sides, the first differing one included.
        total: steps of the longer side.
        differences: all that are comparable; in a free run nothing after the first different token.
        noise: largest measured difference of shared logprobs; ``None`` if no id was shared.
    """

    request: str
    outcome: Literal["equal", "near_tie", "diverged"]
    compared: int
    total: int
    differences: tuple[Difference, ...]
    noise: float | None


@dataclass(frozen=True)
class TokenComparison:
    """All requests, in the reference's order.

    Attributes:
        mode: ``free`` or ``replay``.
        verdict: ``aligned`` (equal, or different by near-ties only) or ``diverged``.
        policy: the thresholds that were used.
        noise: largest measured noise; ``None`` if no id was shared anywhere.
        noise_above_cap: tokens may be equal, but the logprobs differ by more than rounding explains.
        requests: one entry per request.
    """

    mode: Mode
    verdict: Literal["aligned", "diverged"]
    policy: NoisePolicy
    noise: float | None
    noise_above_cap: bool
    requests: tuple[RequestComparison, ...]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, request by request."""
        return tuple(difference for request in self.requests for difference in request.differences)

    @property
    def near_ties(self) -> tuple[Difference, ...]:
        """Those that are no finding."""
        return tuple(difference for difference in self.differences if difference.near_tie)

    @property
    def first(self) -> Difference | None:
        """The earliest real difference (by step, then by request order); ``None`` if there is none."""
        real = [difference for difference in self.differences if not difference.near_tie]
        return min(real, key=lambda difference: difference.index, default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form (infinite and NaN logprobs become strings)."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def compare_tokens(
    candidate: Sequence[Generation],
    reference: Sequence[Generation],
    *,
    mode: Mode,
    policy: NoisePolicy,
    golden: Sequence[Generation] | None = None,
    prompt_lengths: Mapping[str, int] | None = None,
) -> TokenComparison:
    """Compare two sides request by request; the order of either sequence does not matter.

    Args:
        candidate, reference: generations of the same requests.
        mode: ``free`` compares the chosen ids up to the first difference, ``replay`` the preferred ids of
            every step.
        policy: thresholds of the near-tie rule.
        golden: a third run; shown at differences whose history it shares, never part of the verdict.
        prompt_lengths: prompt tokens by request name, for positions.

    Raises:
        ValueError: the sides have other requests, nothing was generated, or a replay was not forced along the
            same ids.
    """
    candidates, references = _by_name(candidate, "candidate"), _by_name(reference, "reference")
    goldens = _by_name(golden or (), "golden")
    if candidates.keys() != references.keys():
        odd = sorted(candidates.keys() ^ references.keys())
        raise ValueError(f"both sides need the same requests; only one side has {', '.join(odd)}")
    pairs = {name: _Pair(name, candidates[name], references[name], mode) for name in references}
    if not any(pair.total for pair in pairs.values()):
        raise ValueError("nothing to compare: no side generated a token")
    noise = _running_noise(pairs.values())
    lengths = prompt_lengths or {}
    requests = tuple(_judge(pair, noise, policy, goldens.get(name), lengths.get(name)) for name, pair in pairs.items())
    measured = [request.noise for request in requests if request.noise is not None]
    return TokenComparison(
        mode=mode,
        verdict="diverged" if any(request.outcome == "diverged" for request in requests) else "aligned",
        policy=policy,
        noise=max(measured, default=None),
        noise_above_cap=max(measured, default=0.0) > policy.cap,
        requests=requests,
    )


class _Pair:
    """Both sides of one request, cut to the steps that can be compared."""

    def __init__(self, name: str, candidate: Generation, reference: Generation, mode: Mode) -> None:
        self.name = name
        self.candidate = candidate.steps
        self.reference = reference.steps
        self.mode = mode
        self.total = max(len(self.candidate), len(self.reference))
        #: Steps that both sides took with the same history; a first differing step is one of them.
        self.common = min(len(self.candidate), len(self.reference))
        for index in range(self.common):
            if self.candidate[index].chosen == self.reference[index].chosen:
                continue
            if mode == "replay":
                raise ValueError(
                    f"request {name} was replayed along different ids: step {index} has "
                    f"{self.candidate[index].chosen} and {self.reference[index].chosen}"
                )
            self.common = index + 1
            break

    def ids(self, index: int) -> tuple[int, int]:
        """The ids to compare at a common step: what was chosen, or in a replay what each side preferred."""
        candidate, reference = self.candidate[index], self.reference[index]
        if self.mode == "replay":
            return candidate.greedy, reference.greedy
        return candidate.chosen, reference.chosen

    def gaps(self, index: int) -> list[float]:
        """Differences of shared logprobs at a common step, without the ids of a flip there."""
        ids = self.ids(index)
        left_out = set(ids) if ids[0] != ids[1] else set()
        ours, theirs = dict(self.candidate[index].top), dict(self.reference[index].top)
        gaps = [abs(ours[token] - theirs[token]) for token in (ours.keys() & theirs.keys()) - left_out]
        return [gap for gap in gaps if isfinite(gap)]


@dataclass(frozen=True)
class _Noise:
    """The largest difference of shared logprobs, and of how many."""

    largest: float
    samples: int

    def __or__(self, other: _Noise) -> _Noise:
        return _Noise(max(self.largest, other.largest), self.samples + other.samples)


def _by_name(generations: Sequence[Generation], side: str) -> dict[str, Generation]:
    named = {generation.request: generation for generation in generations}
    if len(named) != len(generations):
        raise ValueError(f"the {side} has two generations of one request")
    return named


def _running_noise(pairs: Iterable[_Pair]) -> list[_Noise]:
    """Noise of all requests up to each step."""
    steps: dict[int, _Noise] = {}
    for pair in pairs:
        for index in range(pair.common):
            gaps = pair.gaps(index)
            steps[index] = steps.get(index, _Noise(0.0, 0)) | _Noise(max(gaps, default=0.0), len(gaps))
    return list(accumulate((steps[index] for index in range(len(steps))), operator.or_))


def _judge(
    pair: _Pair,
    noise: list[_Noise],
    policy: NoisePolicy,
    golden: Generation | None,
    prompt_length: int | None,
) -> RequestComparison:
    found = []
    for index in range(pair.common):
        ids = pair.ids(index)
        broken = not (_finite(pair.candidate[index]) and _finite(pair.reference[index]))
        if ids[0] != ids[1] or broken:
            found.append(_difference(pair, index, noise[index], policy, golden, prompt_length, broken))
    last = pair.common - 1
    parted = pair.mode == "free" and last >= 0 and pair.ids(last)[0] != pair.ids(last)[1]
    if len(pair.candidate) != len(pair.reference) and not parted:
        found.append(_length_difference(pair, noise, policy, prompt_length))
    if not found:
        outcome: Literal["equal", "near_tie", "diverged"] = "equal"
    else:
        outcome = "near_tie" if all(difference.near_tie for difference in found) else "diverged"
    measured = [gap for index in range(pair.common) for gap in pair.gaps(index)]
    return RequestComparison(pair.name, outcome, pair.common, pair.total, tuple(found), max(measured, default=None))


def _difference(
    pair: _Pair,
    index: int,
    measured: _Noise,
    policy: NoisePolicy,
    golden: Generation | None,
    prompt_length: int | None,
    broken: bool,
) -> Difference:
    candidate, reference = pair.candidate[index], pair.reference[index]
    ours, theirs = pair.ids(index)
    noise, tolerance = measured.largest, policy.tolerance(measured.largest, measured.samples)
    our_margin, our_bound = _margin(candidate, ours, theirs)
    their_margin, their_bound = _margin(reference, theirs, ours)
    near_tie = False
    if broken:
        told = said("tokens.broken")
    elif our_margin is None or their_margin is None:
        side, bound = ("candidate", our_bound) if our_margin is None else ("reference", their_bound)
        told = said("tokens.unlisted" if bound is None else "tokens.unlisted_bound", side=side, bound=bound)
    elif abs(our_margin) + abs(their_margin) <= 2 * tolerance:
        near_tie = True
        told = said("tokens.near", ours=our_margin, theirs=their_margin, tolerance=tolerance)
    else:
        key = "tokens.beyond_floor" if noise > policy.cap else "tokens.beyond"
        told = said(key, ours=our_margin, theirs=their_margin, tolerance=tolerance, noise=noise)
    golden_id, golden_margin = _golden(pair, index, golden)
    return Difference(
        request=pair.name,
        index=index,
        position=None if prompt_length is None else prompt_length + index,
        kind="nonfinite" if broken else "token",
        candidate_id=ours,
        reference_id=theirs,
        candidate_top=candidate.top,
        reference_top=reference.top,
        candidate_margin=our_margin,
        reference_margin=their_margin,
        candidate_margin_at_least=our_bound,
        reference_margin_at_least=their_bound,
        noise=noise,
        tolerance=tolerance,
        near_tie=near_tie,
        why=text_of(told),
        told=told,
        golden_id=golden_id,
        golden_margin=golden_margin,
    )


def _length_difference(pair: _Pair, noise: list[_Noise], policy: NoisePolicy, prompt_length: int | None) -> Difference:
    index = pair.common
    ours = pair.candidate[index] if index < len(pair.candidate) else None
    theirs = pair.reference[index] if index < len(pair.reference) else None
    measured = noise[index - 1] if index else _Noise(0.0, 0)
    stopped = "candidate" if ours is None else "reference"
    told = said("tokens.length", side=stopped, index=index, total=pair.total)
    return Difference(
        request=pair.name,
        index=index,
        position=None if prompt_length is None else prompt_length + index,
        kind="length",
        candidate_id=None if ours is None else ours.chosen,
        reference_id=None if theirs is None else theirs.chosen,
        candidate_top=() if ours is None else ours.top,
        reference_top=() if theirs is None else theirs.top,
        candidate_margin=None,
        reference_margin=None,
        candidate_margin_at_least=None,
        reference_margin_at_least=None,
        noise=measured.largest,
        tolerance=policy.tolerance(measured.largest, measured.samples),
        near_tie=False,
        why=text_of(told),
        told=told,
    )


def _margin(step: TokenStep, own: int, other: int) -> tuple[float | None, float | None]:
    """``(logprob[own] - logprob[other], None)`` if both are listed, else ``(None, lower bound or None)``."""
    listed = dict(step.top)
    if own in listed and other in listed:
        return listed[own] - listed[other], None
    if own in listed and step.top:
        # The other id is below everything that is listed.
        return None, listed[own] - min(listed.values())
    return None, None


def _golden(pair: _Pair, index: int, golden: Generation | None) -> tuple[int | None, float | None]:
    """The golden run's id at ``index`` and its margin, if it walked the same tokens up to there."""
    if golden is None or index >= len(golden.steps):
        return None, None
    before = [step.chosen for step in pair.reference[:index]]
    if [step.chosen for step in golden.steps[:index]] != before:
        return None, None
    ours, theirs = pair.ids(index)
    margin, _ = _margin(golden.steps[index], theirs, ours)
    return golden.steps[index].greedy, margin


def _finite(step: TokenStep) -> bool:
    return all(isfinite(logprob) for _, logprob in step.top)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
