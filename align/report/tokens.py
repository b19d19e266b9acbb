"""The greedy tokens of both sides, and where they part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from align.compare.tokens import Difference, TokenComparison
from align.report.prompts import ids_text

_SHOWN_TOKENS = 8
_SHOWN_DIFFERENCES = 8


def show_tokens(
    console: Console,
    free: TokenComparison,
    generated: Mapping[str, Mapping[str, tuple[int, ...]]],
    decode: Callable[[Sequence[int]], str] | None,
) -> None:
    """One line per request; with a decoder also what was said.

    Args:
        generated: ids by role and request.
    """
    table = Table(title="greedy tokens", title_justify="left", box=None, pad_edge=False)
    for column in ("request", "result", "same from the start", "candidate", "reference"):
        table.add_column(column, justify="right" if "same" in column else "left", overflow="fold")
    for request in free.requests:
        candidate, reference = (generated[role][request.request] for role in ("candidate", "reference"))
        equal = next(
            (i for i, (a, b) in enumerate(zip(candidate, reference, strict=False)) if a != b),
            min(len(candidate), len(reference)),
        )
        table.add_row(
            request.request,
            request.outcome.replace("_", "-"),
            f"{equal}/{request.total}",
            ids_text(candidate, _SHOWN_TOKENS),
            "same" if candidate == reference else ids_text(reference, _SHOWN_TOKENS),
        )
    console.print(table)
    if decode is not None:
        for request in free.requests:
            for role, ids in generated.items():
                if role == "candidate" or ids[request.request] != generated["candidate"][request.request]:
                    text = repr(decode(ids[request.request]))
                    console.print(f"  {request.request} {role} says {escape(text)}", highlight=False)


def show_differences(console: Console, comparisons: Mapping[str, TokenComparison]) -> None:
    """Every place where the sides prefer different ids, and logprobs that are noisier than rounding."""
    free = comparisons.get("free")
    compared = comparisons.get("replay", free)
    if compared is None:
        return
    # What a replay does not repeat is known from the free run alone.
    differences = compared.differences or (() if free is None else free.differences)
    if differences:
        forced = bool(compared.differences) and compared is not free
        where = "teacher-forced along the reference" if forced else "free-running"
        console.print(f"differences ({where}):", highlight=False)
        # What counts first: real differences before near-ties, early tokens before late ones.
        ranked = sorted(differences, key=lambda one: (one.near_tie, one.index))
        for difference in ranked[:_SHOWN_DIFFERENCES]:
            console.print(f"  {escape(describe(difference))}", highlight=False)
        if len(ranked) > _SHOWN_DIFFERENCES:
            console.print(f"  … and {len(ranked) - _SHOWN_DIFFERENCES} more in run.json", highlight=False)
    if compared.noise_above_cap:
        console.print(
            f"[yellow]logprobs differ by up to {compared.noise:.3g}, more than rounding explains "
            f"({compared.policy.cap:.3g}): tokens alone would not show a small fault[/yellow]",
            highlight=False,
        )


def describe(difference: Difference) -> str:
    """One difference as a line."""
    what = "near-tie" if difference.near_tie else difference.kind
    return (
        f"{difference.request} token {difference.index}: candidate {difference.candidate_id}, "
        f"reference {difference.reference_id} ({what}: {difference.why})"
    )
