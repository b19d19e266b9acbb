"""``align runs``, with its options. Work is imported by the command."""

from __future__ import annotations

from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.machine import Debug, Json


def runs_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names of runs, as listed. Default: all.")
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only those that were refused.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only those that began longer ago: 12h, 7d, 4w.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove those that are named or chosen.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List earlier runs with their verdicts and sizes, and remove them.

    They are those below ALIGN_HOME/runs, the newest first. What a run came to: aligned, diverged, refused (a condition
    does not hold, an option cannot be, or a patch is wrong), failed (an engine died), interrupted, or running. Other
    commands take these names, too. Before anything is removed, what would be is listed and confirmed. A run that is in
    use stays.

    Examples: `align runs` · `align runs --remove NAME` · `align runs --remove --refused` ·
    `align runs --remove --older-than 7d --yes`
    """
    from align.cli import runs as work

    settings = work.RunsSettings(tuple(names or ()), refused, older_than, remove, yes, json)
    raise typer.Exit(guarded(lambda: work.execute(settings), debug, json))
