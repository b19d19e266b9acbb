"""Commands about several runs: their options. Work is imported by the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.flags import Debug, Device, Json, Quiet, run_named


def diff_command(
    before: Annotated[
        Path,
        typer.Argument(metavar="RUN1", help="The earlier run: directory, name, or result.json.", callback=run_named),
    ],
    after: Annotated[Path, typer.Argument(metavar="RUN2", help="The later one.", callback=run_named)],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What became of the findings of one run in another: fixed, new, moved, known.

    A finding is known again by what it accuses (path, kind, side, checkpoint, and the kind of a wrong cache index), not
    by its numbers. Moved: the same path, kind and side at another place. What else differs between the two runs
    (versions, case, conditions) is listed, because a change may come of it. Of a run that is not comparable nothing is
    fixed or new: unknown.

    Exit codes: 0 nothing is new or moved, 1 something is, 2 one of the two could not be compared.

    Examples: `align diff RUN1 RUN2` · `align diff yesterday/result.json today/result.json --json`
    """
    from align.cli import diff as work

    settings = work.DiffSettings(before, after, json)
    raise typer.Exit(guarded(lambda: work.execute(settings), debug, json))


def nightly_command(
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN.toml]", help="The cases. Default: the twelve of `make nightly`.")
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            help="When the exit code is not 0: new (findings that the last night had not, cases that cannot be "
            "compared any more), any, or never."
        ),
    ] = "new",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin a new night, even if the last one was stopped.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the store and of all nights. Default: ALIGN_HOME/nightly/NAME.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="The cases and their commands; nothing runs.")] = False,
    new: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plan to begin with; nothing runs.")] = None,
    device: Device = "simnpu",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run the cases of a plan, each by itself, and say what is new since the night before.

    A plan crosses models, layouts and dtypes: `presets = ["qwen3"]`, `layouts = ["tp1", "tp2"]`,
    `dtypes = ["bfloat16"]`, `options = [...]` of `align run` for all, `skip = [...]` names of cases, `minutes` per
    case, `keep` nights; and `[[case]]` with name, model, layout, dtype and options for single ones.

    A case that fails leaves the others. A night that was stopped goes on with the same command (within 20 hours). The
    results are in nights.sqlite; index.html has a row for each case, junit.xml is for a CI. A finding that the case had
    in its last comparable night is known, one that it has no more is fixed.

    Exit codes (by --fail-on): 0 nothing that counts, 1 findings, 2 cases that could not be compared, or no night.

    Examples: `align nightly` · `align nightly plan.toml --fail-on any` · `align nightly --new plan.toml` ·
    `align nightly plan.toml --list`
    """
    from align.cli import nightly as work

    settings = work.NightlySettings(plan, device, out, fail_on, fresh, list_, new, json, quiet)
    raise typer.Exit(guarded(lambda: work.execute(settings), debug, json))
