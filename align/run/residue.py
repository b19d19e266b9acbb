"""What a run leaves behind in an engine: the same case twice in one engine, and once in a fresh one.

Seed 003 asks for warm-up to be off because it leaves entries in the cache (TS-06). Whether anything is left can be
tried: two runs of one engine that differ, while a fresh engine repeats the first, differ by what the first left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from align.findings import Finding, told
from align.run.stability import Stability, Unstable
from align.sentences import said


def left_behind(second: Stability, fresh: Stability, prompt_lengths: Mapping[str, int]) -> Finding | None:
    """What three runs of one case say of state that outlives a run.

    Args:
        second: how well the second run of an engine repeats its first.
        fresh: how well the first run of another engine, launched alike, does.
        prompt_lengths: tokens of each request's prompt.

    Returns:
        ``None`` if nothing is left behind, or the side is so unsteady that this cannot be told: then a fresh engine
        does not repeat the first run either.
    """
    assert second.side == fresh.side
    if second.unstable is not None and fresh.unstable is None:
        return _finding("left", second.unstable, second.side, prompt_lengths)
    if second.unstable is None and fresh.unstable is not None:
        return _finding("launch", fresh.unstable, second.side, prompt_lengths)
    return None


def _finding(which: str, token: Unstable, role: str, prompt_lengths: Mapping[str, int]) -> Finding:
    ids = [said("stopped.no_token") if one is None else one for one in (token.first, token.second)]
    what = said(f"residue.{which}", request=token.request, index=token.index, first=ids[0], other=ids[1])
    evidence: dict[str, Any] = {
        **told(what),
        "token": token.index,
        "first": token.first,
        "other": token.second,
        "second_repeats": which == "launch",
        "fresh_repeats": which == "left",
    }
    return Finding(
        "UNLOCATED",
        "residue",
        side=role,
        requests=(token.request,),
        positions=(prompt_lengths[token.request] + token.index,),
        evidence=evidence,
        next=f"see what the {role} keeps between runs: cache rows that are not written anew, buffers and tables that "
        "are changed in place, prefix caching, warm-up"
        if which == "left"
        else f"see what the {role} takes from memory that nobody wrote, and what differs between its launches",
    )
