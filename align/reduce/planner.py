"""Which smaller case to try next: a pure function of the case that shows the finding, and of the finding.

The finding says most of it: its requests are those that take part, and nothing after its step is needed. What it does
not say is searched by halves, as delta debugging does (Zeller and Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", 2002).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from align.case.schema import Case, CaseRequest
from align.findings import Finding
from align.ladder.planner import ladder_to
from align.reduce.types import Proposal, State, What

#: Prompts are not cut below this many tokens: it would make nothing easier to read, and each try costs a run.
_SHORT = 8


@dataclass(frozen=True)
class Limits:
    """What is known of the model.

    Attributes:
        layers: that it has.
        cuttable: whether a checkpoint of its first layers can be made.
        min_tp: smallest TP at which it fits.
    """

    layers: int
    cuttable: bool = True
    min_tp: int = 1


def proposals(state: State, finding: Finding, limits: Limits) -> Iterator[Proposal]:
    """Smaller cases, those first that leave out most for one run.

    Args:
        finding: as ``state`` shows it.
    """
    case = state.case
    named, steps = _named(case, finding), _steps(case, finding)

    def of(cases: Iterable[tuple[What, str, Case]]) -> Iterator[Proposal]:
        return (Proposal(replace(state, case=one), what, how) for what, how, one in cases if one != case)

    # First what makes every later try shorter.
    yield from of(_at_once(case, named, steps))
    yield from _layers(state, finding, limits)
    yield from of(_cases(case, named, steps))
    yield from _layouts(state, limits)
    yield from _prompts(state)


def _named(case: Case, finding: Finding) -> list[str]:
    """The requests that the finding speaks of: who shows it, who wrote, and who was overwritten."""
    names = set(finding.requests)
    for role in ("writer", "victim", "first_read"):
        part = finding.evidence.get(role)
        if isinstance(part, dict):
            names.add(str(part.get("request", "")))
    return [one.name for one in case.requests if one.name in names]


def _steps(case: Case, finding: Finding) -> int | None:
    """Tokens that must be generated for the finding's step to be made; ``None`` if it has no step."""
    if finding.step is None:
        return None
    dp = case.layout.dp
    step = finding.step // dp  # groups share the numbers
    read = finding.evidence.get("first_read")
    if isinstance(read, dict) and isinstance(read.get("step"), int):
        step = max(step, read["step"] // dp)
    return step + 1


def _at_once(case: Case, named: Sequence[str], steps: int | None) -> Iterator[tuple[What, str, Case]]:
    """All that the finding says is not needed; then the tokens alone, where the other requests are."""
    if steps is None:
        return
    tokens = f"{steps} new token" + ("" if steps == 1 else "s")
    if named:
        how = f"only {', '.join(named)}, and {tokens}"
        yield "requests and tokens", how, _no_longer(_only(case, named), steps)
    yield "tokens", tokens, _no_longer(case, steps)


def _cases(case: Case, named: Sequence[str], steps: int | None) -> Iterator[tuple[What, str, Case]]:
    """Fewer requests, then fewer tokens, then no waiting."""
    have = [one.name for one in case.requests]
    if named:
        yield "requests", f"only {', '.join(named)}", _only(case, named)
    for left_out in _parts(have):
        rest = [name for name in have if name not in left_out]
        yield "requests", f"without {', '.join(left_out)}", _only(case, rest)
    longest = max(map(case.new_tokens, case.requests))
    for tokens in _fewer(longest, steps):
        yield "tokens", f"{tokens} new token" + ("" if tokens == 1 else "s"), _no_longer(case, tokens)
    if any(one.arrival for one in case.requests):
        together = tuple(one.model_copy(update={"arrival": 0}) for one in case.requests)
        dealt = case.model_copy(update={"requests": together, "batch": _roomy(case, len(together))})
        yield "arrivals", "all requests at once", dealt


def _parts(names: Sequence[str]) -> Iterator[list[str]]:
    """What to leave out: halves, then quarters, down to single ones."""
    size = len(names) // 2
    while size >= 1:
        for start in range(0, len(names), size):
            part = list(names[start : start + size])
            if len(part) < len(names):
                yield part
        size //= 2


def _fewer(longest: int, steps: int | None) -> Iterator[int]:
    """Numbers of tokens to try, each smaller than what there is."""
    wanted = [steps, None if steps is None else steps + 1, longest // 2, longest - longest // 4, longest - 1]
    yield from dict.fromkeys(one for one in wanted if one is not None and 1 <= one < longest)


def _only(case: Case, names: Iterable[str]) -> Case:
    return case.only(list(names))


def _no_longer(case: Case, tokens: int) -> Case:
    """At most so many new tokens of each request."""

    def cut(one: CaseRequest) -> CaseRequest:
        own = one.max_new_tokens
        return one.model_copy(update={"max_new_tokens": None if own is None or own >= tokens else own})

    decoding = case.decoding.model_copy(update={"max_new_tokens": min(tokens, _longest(case))})
    return case.model_copy(update={"decoding": decoding, "requests": tuple(map(cut, case.requests))})


def _longest(case: Case) -> int:
    return max(map(case.new_tokens, case.requests))


def _roomy(case: Case, count: int) -> object:
    """A batch that takes so many requests at once."""
    held = case.batch.max_batch
    return case.batch if held is None else case.batch.model_copy(update={"max_batch": max(held, count)})


def _layers(state: State, finding: Finding, limits: Limits) -> Iterator[Proposal]:
    """The model's first layers, up to the one with the finding."""
    if not limits.cuttable or finding.layer is None:
        return
    have = limits.layers if state.layers is None else state.layers
    wanted = finding.layer + 1
    read = finding.evidence.get("first_read")
    if isinstance(read, dict) and isinstance(read.get("layer"), int):
        wanted = max(wanted, read["layer"] + 1)
    if wanted < have:
        yield Proposal(replace(state, layers=wanted), "layers", f"the first {wanted} of {have} layers")


def _layouts(state: State, limits: Limits) -> Iterator[Proposal]:
    """Simpler layouts, the simplest first: the rungs of the ladder below."""
    target = state.case.layout.to_layout()
    for layout in ladder_to(target, limits.min_tp):
        if layout != target and state.case.reference_layout is None:
            yield Proposal(replace(state, case=state.case.with_layout(layout)), "layout", str(layout))


def _prompts(state: State) -> Iterator[Proposal]:
    """Shorter prompts: of all requests, then of one at a time."""
    case = state.case
    lengths = [len(one.token_ids) for one in case.requests]
    for how, wanted in (
        (f"{_SHORT} tokens of every prompt", [min(_SHORT, one) for one in lengths]),
        ("half of every prompt", [_at_least(one, one // 2) for one in lengths]),
    ):
        yield from _cut(state, wanted, how)
    for place, length in enumerate(lengths):
        name = case.requests[place].name
        for shorter in dict.fromkeys(_at_least(length, one) for one in (_SHORT, length // 2, length - length // 4)):
            wanted = [shorter if at == place else one for at, one in enumerate(lengths)]
            yield from _cut(state, wanted, f"{shorter} of {length} tokens of {name}'s prompt")


def _at_least(length: int, wanted: int) -> int:
    return min(length, max(_SHORT, wanted))


def _cut(state: State, lengths: Sequence[int], how: str) -> Iterator[Proposal]:
    rows = state.case.requests
    if list(lengths) == [len(one.token_ids) for one in rows]:
        return
    cut = tuple(_shortened(one, length) for one, length in zip(rows, lengths, strict=True))
    yield Proposal(replace(state, case=state.case.model_copy(update={"requests": cut})), "prompts", how)


def _shortened(one: CaseRequest, length: int) -> CaseRequest:
    """With the beginning of the prompt: what has a prefix in common still has. The text would be of the whole."""
    if length == len(one.token_ids):
        return one
    return one.model_copy(update={"token_ids": one.token_ids[:length], "text": None})


def label(text: str) -> str:
    """``how`` as a part of a directory's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
