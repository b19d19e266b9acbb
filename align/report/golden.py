"""The table of ``align golden``: whose error is larger, layer by layer or checkpoint by checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from align.checkpoints.table import parse
from align.compare.metrics import Metrics
from align.golden.flow import GoldenRun
from align.golden.judge import GoldenCheckpoint, Nearer

_STYLES = {
    "alike": "green",
    "candidate further": "red",
    "reference further": "red",
    "both further": "red",
    "not observable": "yellow",
}
_SHOWN_LAYERS = 12
_SHOWN_DEPARTING = 8


def show_golden(console: Console, run: GoldenRun, verbose: bool = False) -> None:
    """What golden is, the table, the first departure."""
    compared = run.comparison
    how = "as recorded before" if run.reused else "one forward over prompt and generated tokens"
    console.print(
        f"golden: transformers, float32, eager attention, {how}; {compared.rows} rows of both sides ({run.dtype})",
        highlight=False,
        markup=False,
    )
    departing = [one for one in compared.checkpoints if one.departs]
    if verbose:
        console.print(_each("relative L2 against golden", compared.checkpoints))
    else:
        console.print(_layers(compared.checkpoints))
        if departing:
            more = "" if len(departing) <= _SHOWN_DEPARTING else f", first {_SHOWN_DEPARTING} of {len(departing)}"
            console.print(_each(f"where a side departs{more}", departing[:_SHOWN_DEPARTING]))
    counts = Counter(one.why for one in compared.checkpoints if one.verdict == "not observable")
    for why, count in counts.items():
        console.print(f"not observable at {count} checkpoints: {why}", style="yellow", highlight=False, markup=False)
    for note in (*run.notes, *compared.notes):
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    if run.simulated:
        console.print("the sides' numbers are simulated: this says nothing about an NPU's own kernels", style="dim")
    colour = "green" if compared.first is None else "red"
    console.print(f"\n[bold {colour}]{escape(golden_sentence(run))}[/]", highlight=False, soft_wrap=True)
    if compared.first is None:
        console.print(
            f"a side counts as further from a factor of {compared.policy.factor:g} on: smaller faults are not seen "
            "here, and what the run itself found stands",
            highlight=False,
            soft_wrap=True,
        )
    console.print("next: read report.md of the run; --verbose shows every checkpoint", highlight=False)


def golden_sentence(run: GoldenRun) -> str:
    """The outcome in words."""
    compared, first = run.comparison, run.comparison.first
    engines = f"{run.engines['candidate']} (candidate) and {run.engines['reference']} (reference)"
    known = [one for one in compared.checkpoints if one.factor is not None]
    if first is not None:
        return f"first departure from golden: {first.name}: {first.verdict}: {first.why}"
    unknown = len(compared.checkpoints) - len(known)
    but = f"; {unknown} are not observable" if unknown else ""
    return f"{engines} are alike far from golden at {len(known)} of {len(compared.checkpoints)} checkpoints{but}"


def _layers(checkpoints: Sequence[GoldenCheckpoint]) -> Table:
    table = _table("relative L2 against golden, worst of each layer", "candidate", "reference", "factors", "verdicts")
    groups: dict[str, list[GoldenCheckpoint]] = {}
    for one in checkpoints:
        layer = parse(one.name).layer
        groups.setdefault(one.name if layer is None else f"layer {layer}", []).append(one)
    shown = list(groups)
    if len(shown) > _SHOWN_LAYERS:  # both ends, and where a side departs first
        departing = [where for where in shown if any(one.departs for one in groups[where])]
        keep = {*shown[:4], *shown[-4:], *departing[:4]}
        shown = [where for where in shown if where in keep]
    for where in shown:
        group = groups[where]
        counts = Counter(one.verdict for one in group)
        words = ", ".join(
            f"[{_STYLES[verdict]}]{counts[verdict]} {verdict}[/]" for verdict in get_args(Nearer) if counts[verdict]
        )
        factors = [one.factor for one in group if one.factor is not None]
        low, high = (f"{min(factors):.2f}", f"{max(factors):.2f}") if factors else ("-", "-")
        table.add_row(
            where,
            _largest(one.candidate for one in group),
            _largest(one.reference for one in group),
            low if low == high else f"{low} to {high}",
            words,
        )
    if len(shown) < len(groups):
        table.add_row(f"… {len(groups) - len(shown)} more", "", "", "", "--verbose shows them")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("where", no_wrap=True)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _largest(found: Iterable[Metrics | None]) -> str:
    values = [one.rel_l2 for one in found if one is not None and one.rel_l2 is not None]
    return f"{max(values):.3g}" if values else "-"


def _each(title: str, checkpoints: Sequence[GoldenCheckpoint]) -> Table:
    table = _table(title, "candidate", "reference", "factor", "expected", "worst channel", "verdict")
    for one in checkpoints:
        channel = "-"
        if one.channels:
            worst = one.channels[0]
            channel = f"{worst.channel} × {worst.factor:.3g}"
        table.add_row(
            one.name,
            _largest([one.candidate]),
            _largest([one.reference]),
            "-" if one.factor is None else f"{one.factor:.3g}",
            "-" if one.expected is None else f"{one.expected:.2g}",
            channel,
            f"[{_STYLES[one.verdict]}]{one.verdict}[/]",
        )
    return table
