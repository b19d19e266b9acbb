"""How conditions are compared. Each function judges one side; what compares sides with each other stands apart.

A verdict is ``(ok, why)``; ``None`` instead of ``ok`` means that it could not be read. ``why`` is a sentence as data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.base import NO_SUCH_MODE, StepRecord
from align.sentences import Said, raw, said

Judged = tuple[bool | None, Said]

#: Relative tolerance of numbers that engines compute from the configuration in double precision.
CLOSE = 1e-9
#: Relative error of frequencies that engines compute in float32: 2⁻²⁴ of the exponent times ln θ, and a few roundings.
FREQUENCY_SLACK = 1e-5
#: Generations by ``get_soc_version``, as vllm-ascend and dlinfer tell them apart.
SOC_GENERATIONS = (("310P", 200, 205), ("A2", 220, 225), ("A3", 250, 255), ("A5", 260, 260))


def soc_generation(version: int) -> str | None:
    return next((name for name, low, high in SOC_GENERATIONS if low <= version <= high), None)


def equal(wanted: Any, values: Mapping[str, Any]) -> Judged:
    wrong = {name: value for name, value in values.items() if value != wanted}
    if wrong:
        return False, _are(wrong)
    return True, said("condition.as_requested")


def _are(values: Mapping[str, Any]) -> Said:
    return said(
        "list.semicolon", parts=[said("condition.is", name=name, value=str(one)) for name, one in values.items()]
    )


def close(wanted: float, values: Mapping[str, Any]) -> Judged:
    wrong = {
        name: value
        for name, value in values.items()
        if not isinstance(value, int | float) or not math.isclose(value, wanted, rel_tol=CLOSE, abs_tol=0.0)
    }
    if wrong:
        return False, _are(wrong)
    return True, said("condition.as_requested")


def disabled(values: Mapping[str, Any]) -> Judged:
    """A mode must be off, or not exist."""
    value = next(iter(values.values()))
    if value == NO_SUCH_MODE:
        return True, said("condition.no_such_mode")
    return (True, said("condition.off")) if value is False else (False, said("condition.it_is", value=str(value)))


def off(switches: Any) -> Judged:
    on = {name: value for name, value in switches.items() if value not in (False, 0, "not there")}
    if on:
        return False, said("condition.on", switches=[f"{name}={value}" for name, value in on.items()])
    return True, said("condition.all_off")


def warmup(facts: Mapping[str, Any]) -> Judged:
    """Nothing may be left in the cache, whatever ran before the first real step."""
    dummies, skipped = facts.get("dummy_forwards"), facts.get("warmup_skipped")
    if skipped is False:
        ran = said("condition.warmed_up")
    elif dummies is None:
        ran = said("condition.not_counted")
    elif dummies == 0:
        ran = said("condition.no_dummy")
    else:
        ran = said("condition.dummies", count=dummies)
    residue = residue_of_all(facts.get("start_residue") or facts.get("cache_residue"))
    if residue is None:
        if skipped is True and dummies == 0:
            return True, said("condition.skipped")
        return None, said("condition.no_cache", ran=ran)
    elements, blocks, of_blocks = residue
    if elements:
        return False, said("condition.residue", elements=elements, blocks=blocks, of_blocks=of_blocks, ran=ran)
    return True, said("condition.no_residue", ran=ran)


def residue_of_all(residue: Any) -> tuple[int, int, int] | None:
    """Non-zero elements, blocks that hold them, and all blocks; summed where the ranks differ."""
    if not isinstance(residue, dict) or not residue:
        return None
    ranks = [residue] if "elements" in residue else list(residue.values())
    elements, blocks, of_blocks = (sum(int(rank[key]) for rank in ranks) for key in ("elements", "blocks", "of_blocks"))
    return elements, blocks, of_blocks


def greedy(facts: Mapping[str, Any]) -> Judged:
    how = [f"{name} {facts[name]}" for name in ("temperature", "top_k") if facts.get(name) is not None]
    if facts.get("greedy") is None:
        return None, said("condition.sampling_unknown")
    if facts["greedy"] is not True:
        return False, said("condition.drew", how=how)
    if facts.get("penalties") is None:
        return None, said("condition.penalties_unknown")
    if facts["penalties"] is not False:
        return False, said("condition.penalties")
    return True, said("condition.best", how=how)


def chunked_prefill(
    need: int,
    facts: Mapping[str, Any],
    engine: str,
    steps: Sequence[StepRecord],
    prompts: Mapping[str, int],
    cached: bool = False,
) -> Judged:
    """No prompt may be computed in parts.

    What an earlier request left in a prefix cache is not computed at all, and a request that lost its place in the
    cache is computed again along with what it has generated: neither is a part.

    Args:
        need: tokens of the largest group of prompts that arrives together.
        steps: those of the run, if there was one; its rows are the proof.
        prompts: length of each request's prompt.
        cached: prefixes are kept from earlier requests.
    """
    if facts["chunked_prefill"] not in (False, NO_SUCH_MODE):
        return False, said("condition.it_is_on")
    room = facts["max_prefill_tokens"]
    # lmdeploy splits a prefill that reaches its limit, vllm one that exceeds it.
    if room < need or (engine == "lmdeploy" and room == need):
        return False, said("condition.no_room", room=room, need=need)
    for step in steps:
        for span in step.rows:
            prompt = prompts.get(span.request, 0)
            last = span.start + span.count - 1
            begun = span.start > 0 and not cached
            if span.start < prompt and (begun or last < prompt - 1):
                return False, said(
                    "condition.split", step=step.step, first=span.start, last=last, request=span.request, prompt=prompt
                )
    return True, said("condition.room_and_whole" if steps else "condition.room", room=room)


def window(wanted: Any, facts: Mapping[str, Any], longest: int) -> Judged:
    """What the kernels mask and the cache drops must be what the configuration says, where sequences are that long.

    Args:
        longest: tokens of the longest sequence of the case.
    """
    kernel, cache = facts["window"], facts.get("window_cache", 0)
    why = said("condition.no_window") if kernel == 0 else said("condition.window", size=str(kernel))
    if cache:
        why = said("condition.drops", why=why, cache=cache)
    positive = [size for size in (*_as_list(wanted), *_as_list(kernel), cache) if size]
    if positive and longest <= min(positive):
        if kernel != wanted:
            why = said("condition.no_difference", why=why, longest=longest)
        return True, why
    fits = cache in (0, *_as_list(wanted)) if wanted else not cache
    return kernel == wanted and fits, why


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [value]


def frequencies(wanted: Mapping[str, Any], measured: Mapping[str, Any]) -> Judged:
    """Every measured frequency must be the expected one within what the engine's table resolves."""
    if "why" in wanted:
        return None, raw(str(wanted["why"]))
    expected, found = wanted["inv_freq"], measured["inv_freq"]
    if len(expected) != len(found):
        return False, said("condition.frequency_count", found=len(found), expected=len(expected))
    worst, channel = 0.0, -1
    for index, (want, have, resolution) in enumerate(zip(expected, found, measured["resolution"], strict=True)):
        excess = abs(have - want) / abs(want) / (resolution + FREQUENCY_SLACK)
        if math.isnan(excess):
            excess = math.inf
        if excess > worst:
            worst, channel = excess, index
    if worst > 1:
        return False, said("condition.turns", channel=channel, found=found[channel], expected=expected[channel])
    if not math.isclose(measured["scale"], wanted["scale"], rel_tol=2**-7):
        return False, said("condition.scales", found=measured["scale"], expected=wanted["scale"])
    return True, said("condition.frequencies", count=len(expected), first=found[0], last=found[-1])


def token_ids(wanted: Mapping[str, Sequence[int]], seen: Mapping[str, Sequence[int | None]], cached: bool) -> Judged:
    """``seen`` has ``None`` for an id that no step computed; ``cached``: prefixes are kept from earlier requests."""
    unseen = 0
    for request, ids in wanted.items():
        if request not in seen:
            return None, said("condition.no_ids", request=request)
        have = list(seen[request])
        if len(have) != len(ids):
            return False, said("condition.ids_count", request=request, found=len(have), expected=len(ids))
        for place, (asked, read) in enumerate(zip(ids, have, strict=True)):
            if read is not None and read != asked:
                return False, said("condition.id", request=request, place=place, found=read, expected=asked)
        unseen += have.count(None)
    total = sum(map(len, wanted.values()))
    if unseen and not cached:
        return None, said("condition.unseen", unseen=unseen, total=total)
    rest = said("condition.cached", count=unseen) if unseen else ""
    return True, said("condition.ids", count=total - unseen, requests=len(wanted), rest=rest)


def same_files(sides: Mapping[str, Mapping[str, str]]) -> Judged:
    (one, first), *others = sides.items()
    for other, second in others:
        for file in sorted({*first, *second}):
            if file not in first or file not in second:
                return False, said("condition.absent", file=file, side=other if file in first else one)
            if first[file] != second[file]:
                return False, said("condition.file_differs", file=file)
    return True, said("condition.files", count=len(first))
