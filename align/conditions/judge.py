"""How conditions are compared. Each function judges one side; what compares sides with each other stands apart.

A verdict is ``(ok, why)``; ``None`` instead of ``ok`` means that it could not be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.base import NO_SUCH_MODE, StepRecord

Judged = tuple[bool | None, str]

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
        return False, "; ".join(f"{name} is {value}" for name, value in wrong.items())
    return True, "as requested"


def close(wanted: float, values: Mapping[str, Any]) -> Judged:
    wrong = {
        name: value
        for name, value in values.items()
        if not isinstance(value, int | float) or not math.isclose(value, wanted, rel_tol=CLOSE, abs_tol=0.0)
    }
    if wrong:
        return False, "; ".join(f"{name} is {value}" for name, value in wrong.items())
    return True, "as requested"


def disabled(values: Mapping[str, Any]) -> Judged:
    """A mode must be off, or not exist."""
    value = next(iter(values.values()))
    if value == NO_SUCH_MODE:
        return True, "the engine has no such mode"
    return (True, "off") if value is False else (False, f"it is {value}")


def off(switches: Any) -> Judged:
    on = {name: value for name, value in switches.items() if value not in (False, 0, "not there")}
    if on:
        return False, "on: " + ", ".join(f"{name}={value}" for name, value in on.items())
    return True, "all off"


def warmup(facts: Mapping[str, Any]) -> Judged:
    """Nothing may be left in the cache, whatever ran before the first real step."""
    dummies, skipped = facts.get("dummy_forwards"), facts.get("warmup_skipped")
    if skipped is False:
        ran = "warm-up was on"
    elif dummies is None:
        ran = "dummy forwards are not counted yet"
    elif dummies == 0:
        ran = "no dummy forward ran"
    else:
        ran = "a dummy forward ran" if dummies == 1 else f"dummy forwards ran: {dummies}"
    residue = residue_of_all(facts.get("start_residue") or facts.get("cache_residue"))
    if residue is None:
        if skipped is True and dummies == 0:
            return True, "no dummy forward ran, warm-up was skipped"
        return None, f"the cache could not be read; {ran}"
    elements, blocks, of_blocks = residue
    if elements:
        return False, f"{elements} elements in {blocks} of {of_blocks} blocks of the cache are not zero; {ran}"
    return True, f"{ran}, and nothing is left in the cache: all of it is zero"


def residue_of_all(residue: Any) -> tuple[int, int, int] | None:
    """Non-zero elements, blocks that hold them, and all blocks; summed where the ranks differ."""
    if not isinstance(residue, dict) or not residue:
        return None
    ranks = [residue] if "elements" in residue else list(residue.values())
    elements, blocks, of_blocks = (sum(int(rank[key]) for rank in ranks) for key in ("elements", "blocks", "of_blocks"))
    return elements, blocks, of_blocks


def greedy(facts: Mapping[str, Any]) -> Judged:
    said = ", ".join(f"{name} {facts[name]}" for name in ("temperature", "top_k") if facts.get(name) is not None)
    if facts.get("greedy") is None:
        return None, "how the worker sampled is not known"
    if facts["greedy"] is not True:
        return False, f"the worker drew tokens: {said}"
    if facts.get("penalties") is None:
        return None, "whether penalties changed the logits is not known"
    if facts["penalties"] is not False:
        return False, "penalties change the logits"
    return True, f"the worker took the best token ({said})"


def chunked_prefill(
    need: int, facts: Mapping[str, Any], engine: str, steps: Sequence[StepRecord], prompts: Mapping[str, int]
) -> Judged:
    """No prompt may be computed in parts.

    Args:
        need: tokens of the largest group of prompts that arrives together.
        steps: those of the run, if there was one; its rows are the proof.
        prompts: length of each request's prompt.
    """
    if facts["chunked_prefill"] not in (False, NO_SUCH_MODE):
        return False, "it is on"
    room = facts["max_prefill_tokens"]
    # lmdeploy splits a prefill that reaches its limit, vllm one that exceeds it.
    if room < need or (engine == "lmdeploy" and room == need):
        return False, f"{room} tokens fit into one step and {need} arrive together"
    for step in steps:
        for span in step.rows:
            prompt = prompts.get(span.request, 0)
            if span.start < prompt and (span.start, span.count) != (0, prompt):
                return False, (
                    f"step {step.step} computes positions {span.start}–{span.start + span.count - 1} of "
                    f"{span.request}, whose prompt has {prompt}"
                )
    return True, f"{room} tokens fit into one step" + (", and no prompt was split" if steps else "")


def window(wanted: Any, facts: Mapping[str, Any], longest: int) -> Judged:
    """What the kernels mask and the cache drops must be what the configuration says, where sequences are that long.

    Args:
        longest: tokens of the longest sequence of the case.
    """
    kernel, cache = facts["window"], facts.get("window_cache", 0)
    said = f"the kernels use {_window_text(kernel)}" + (f", the cache drops blocks beyond {cache}" if cache else "")
    positive = [size for size in (*_as_list(wanted), *_as_list(kernel), cache) if size]
    if positive and longest <= min(positive):
        if kernel != wanted:
            said += f"; it makes no difference, the longest sequence has {longest} tokens"
        return True, said
    fits = cache in (0, *_as_list(wanted)) if wanted else not cache
    return kernel == wanted and fits, said


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [value]


def _window_text(value: Any) -> str:
    return "no window" if value == 0 else f"a window of {value}"


def frequencies(wanted: Mapping[str, Any], measured: Mapping[str, Any]) -> Judged:
    """Every measured frequency must be the expected one within what the engine's table resolves."""
    if "why" in wanted:
        return None, str(wanted["why"])
    expected, found = wanted["inv_freq"], measured["inv_freq"]
    if len(expected) != len(found):
        return False, f"{len(found)} frequencies, not {len(expected)}"
    worst, channel = 0.0, -1
    for index, (want, have, resolution) in enumerate(zip(expected, found, measured["resolution"], strict=True)):
        excess = abs(have - want) / abs(want) / (resolution + FREQUENCY_SLACK)
        if math.isnan(excess):
            excess = math.inf
        if excess > worst:
            worst, channel = excess, index
    if worst > 1:
        return False, f"channel {channel} turns by {found[channel]:.6g} per position, not {expected[channel]:.6g}"
    if not math.isclose(measured["scale"], wanted["scale"], rel_tol=2**-7):
        return False, f"the rotation scales by {measured['scale']:.6g}, not {wanted['scale']:.6g}"
    return True, f"all {len(expected)} measured, from {found[0]:.4g} down to {found[-1]:.4g}"


def token_ids(wanted: Mapping[str, Sequence[int]], seen: Mapping[str, Sequence[int | None]], cached: bool) -> Judged:
    """``seen`` has ``None`` for an id that no step computed; ``cached``: prefixes are kept from earlier requests."""
    unseen = 0
    for request, ids in wanted.items():
        if request not in seen:
            return None, f"no ids of request {request} were seen"
        have = list(seen[request])
        if len(have) != len(ids):
            return False, f"request {request} has {len(have)} ids, not {len(ids)}"
        for place, (asked, read) in enumerate(zip(ids, have, strict=True)):
            if read is not None and read != asked:
                return False, f"request {request}: id {place} is {read}, not {asked}"
        unseen += have.count(None)
    total = sum(map(len, wanted.values()))
    if unseen and not cached:
        return None, f"{unseen} of {total} ids were not seen"
    rest = f"; {unseen} came from the prefix cache and were not seen again" if unseen else ""
    return True, f"{total - unseen} ids of {len(wanted)} requests are those of the case{rest}"


def same_files(sides: Mapping[str, Mapping[str, str]]) -> Judged:
    (one, first), *others = sides.items()
    for other, second in others:
        for file in sorted({*first, *second}):
            if file not in first or file not in second:
                return False, f"{file} is absent from the {other if file in first else one}"
            if first[file] != second[file]:
                return False, f"{file} differs"
    return True, f"sha256 of {len(first)} files equal"
