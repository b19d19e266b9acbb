"""The options of ``align drill``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.flags import Debug, Device, Json, Quiet


def drill_command(
    model: Annotated[str, typer.Option(help="A preset, or the directory of a checkpoint of one of its families.")] = (
        "qwen3"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Ten faults and two clean runs: minutes.")] = False,
    seed: Annotated[int, typer.Option(help="Decides what is drawn: layers, rows, steps, magnitudes.")] = 1,
    trials: Annotated[int, typer.Option(help="Of each fault, in turn on the sides that can have it.")] = 5,
    controls: Annotated[int, typer.Option(help="Clean runs, of which nothing may be said.")] = 200,
    clean: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="MODEL", help="Half of the clean runs are of this model; may be given again."),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Then halve the size of each fault that has one, until nothing is said of it."),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these faults: a name or pattern, a path (A, B, FA) or a kind."),
    ] = None,
    faults: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Faults of your own besides; may be given again.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the drill. Default: one below the cache's drills/, by seed.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="The faults with what must be said of each; nothing runs.")] = (
        False
    ),
    new: Annotated[str, typer.Option(metavar="FILE", help="Write a fault to begin with; nothing runs.")] = "",
    device: Device = "simnpu",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the harness: put known faults into real engines, and score what is said of each.

    A fault is a patch file. `FAULT` says what must be found (path, kind, checkpoint, step, request) and what trials
    draw from; `apply(ctx)` runs before the model is built, `after_load(ctx)` with `ctx.model`. Change things with
    `ctx.replace(object, name, function)` and `ctx.assign(tensor, values, at=index)` alone: both are undone, because
    engines stay up between faults. `ctx.step` is the running step (-1 outside of any), `ctx.rows` its requests.
    `adapters.drill.places` finds the same operator in both engines: `operator(ctx, layer, "down")`, with attn_norm,
    qkv, q_norm, k_norm, rope, attention, o, mlp_norm, gate_up, act, down. `--new my_fault.py` writes one that works.

    Called again with the same options, a drill that was stopped goes on. It leaves drill.md, drill.json and, line by
    line, trials.jsonl.

    Exit codes: 0 all was said as it must be and nothing of clean runs, 1 not, 2 the drill could not run.

    Examples: `align drill --quick` · `align drill --only A --trials 2 --controls 0` · `align drill --list` ·
    `align drill --new faults/mine.py` · `align drill --faults faults --only mine`
    """
    from align.cli import drill as work

    settings = work.DrillSettings(
        model,
        device,
        seed,
        trials,
        controls,
        tuple(clean or ()),
        sweep,
        quick,
        tuple(only or ()),
        tuple(faults or ()),
        out,
        list_,
        new,
        json,
        quiet,
    )
    raise typer.Exit(guarded(lambda: work.execute(settings), debug, json))
