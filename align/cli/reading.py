"""Commands that run nothing: they read what a run left, or say what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.flags import Debug, EngineName, Json, Lang, run_named


def export_command(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace, or side directory of a run.", callback=run_named)
    ],
    out: Annotated[Path, typer.Option(help="New directory; one directory per step is made in it.")],
    format_: Annotated[str, typer.Option("--format", help="pt: one torch.save file per checkpoint and rank.")] = "pt",
    native: Annotated[
        bool, typer.Option("--native", help="Shapes as the engine has them: q, k and v in one file.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a trace as `.pt` files, which `align compare` reads.

    They are called `{layer}_{op}_{input|output}_rank{rank}.pt`. With --native fused projections are one file, such as
    `layer0_attn_qkv_output_rank0.pt`; `index.json` says how canonical shapes are taken of it.

    Example: `align export RUN/candidate --format pt --out dump --native`
    """
    from align.cli import export as work

    raise typer.Exit(guarded(lambda: work.execute(trace, out, format_, native, json), debug, json))


def report_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, its name, or a result.json.", callback=run_named)
    ],
    lang: Lang = "en",
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="One form alone: FILE.html, FILE.xml (JUnit) or Markdown; - prints Markdown. Default: all, in RUN.",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the report of a run once more: report.html, report.md and junit.xml (report.zh.html, report.zh.md).

    report.html is one file that asks the network for nothing, to be forwarded.

    Examples: `align report RUN --lang zh` · `align report RUN --out mail.html`
    """
    from align.cli import report as work

    raise typer.Exit(guarded(lambda: work.execute(run, lang, out, json), debug, json))


def open_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run, its name, or a result.json.", callback=run_named)
    ],
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0 is any that is free.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in the browser, or only print its address.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Show the page of a run, with captured values of both sides on demand.

    It is served to this machine alone, read only, at an address with a random token, until Ctrl-C. To forward the page,
    send RUN/report.html: it is whole without this command.

    Example: `align open RUN --no-browser`
    """
    from align.cli import open as work

    raise typer.Exit(guarded(lambda: work.execute(run, lang, port, browser), debug))


def checklist_command(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Directory of a run, its name, or a result.json.", callback=run_named),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="The items with their sources, and what decides each; no run is read.")
    ] = False,
    lang: Lang = "en",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The three checklists of the alignment guide, as a run decides them.

    17 items about attention and cache, 10 about what must have been done, and 8 known troubles (failed: this run shows
    it). Each is ok with the number that it was evaluated on, failed with the findings, not observable with what would
    show it (no pass), or not applicable. They are evaluated anew from result.json; no engine runs.

    Exit codes: 0 nothing failed, 1 an item failed, 2 the run could not be compared or read.

    Examples: `align checklist RUN` · `align checklist --list` · `align explain 000-Q08`
    """
    from align.cli import checklist as work

    raise typer.Exit(guarded(lambda: work.execute(run, list_, lang, json), debug, json))


def schema_command(debug: Debug = False) -> None:
    """Print the format of result.json as JSON Schema.

    Example: `align schema > result.schema.json`
    """
    from align.cli import schema as work

    raise typer.Exit(guarded(work.execute, debug))


def taps_command(engine: EngineName, json: Json = False, debug: Debug = False) -> None:
    """Where an engine yields each checkpoint.

    A row says class and method, what is picked of a call, the transform to canonical form, and how it is undone.

    Example: `align taps lmdeploy`
    """
    from align.cli import taps as work

    raise typer.Exit(guarded(lambda: work.execute(engine, json), debug, json))


def explain_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND|ID|PATH|WORD]",
            help="A finding's kind, a row of the alignment guide (its parts are called seeds), a path, a checkpoint, "
            "an operator, a rule of align fa, or any words.",
        ),
    ] = None,
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What is known about a fault: symptom, causes, checks, treatment.

    The files to read come with it. Without a word everything is listed, by path.

    Examples: `align explain slots` · `align explain 003-TS-05 --lang zh` · `align explain A` ·
    `align explain first token`
    """
    from align.cli import explain as work

    raise typer.Exit(guarded(lambda: work.execute(words or (), lang, json), debug, json))
