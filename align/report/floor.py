"""The table of ``align calibrate``: what was measured against what is derived, kind by kind."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from align.calibrate.floor import Floor, KindFloor, derived_units
from align.compare.floor import METRICS


def show_floor(console: Console, floor: Floor, file: Path) -> None:
    """Runs, the table, and where the floor lies."""
    about = floor.provenance
    for run in about.runs:
        console.print(f"{run.name}: {run.change}: {run.verdict}", highlight=False, markup=False)
    console.print(
        f"{len(about.pairs)} pairs of recordings of {about.model} ({floor.dtype}, {about.layout}, {about.layers} "
        f"layers), {about.rows} rows each{', golden among them' if about.golden else ''}",
        highlight=False,
        markup=False,
    )
    console.print(floor_table(floor))
    console.print(
        "relative L2 in units of what dtype and depth predict: largest measured, and the floor's limit (* the derived "
        "bound, which is narrower); golden: largest whole of a side against float32; ops: largest part of what "
        "operators may add",
        style="dim",
        highlight=False,
    )
    if about.simulated:
        console.print(
            "the floor is simulated: on hardware it is widened, and says so; it says nothing about real kernels",
            style="dim",
            highlight=False,
        )
    console.print(f"floor: {file}", highlight=False, markup=False, soft_wrap=True)


def floor_table(floor: Floor) -> Table:
    """One line per kind of checkpoint."""
    derived = derived_units(floor.dtype)
    table = Table(title=f"floor {floor.name}", title_justify="left", box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for name in (*METRICS, "golden", "ops"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("derived bound", *(f"{derived[metric]:.2f}" for metric in METRICS), "", "1.00", style="dim")
    for kind, found in floor.kinds.items():
        table.add_row(
            kind,
            *(_cell(found, metric, derived[metric]) for metric in METRICS),
            f"{found.golden['whole'].largest:.2f}" if "whole" in found.golden else "-",
            f"{max(one.largest for one in found.operator.values()):.2f}" if found.operator else "-",
        )
    return table


def _cell(found: KindFloor, metric: str, derived: float) -> str:
    one, limit = found.carried.get(metric), found.limit(metric)
    if one is None or limit is None:
        return "-"
    return f"{one.largest:.2f} {min(limit, derived):.2f}" + (" " if limit < derived else "*")
