"""Commands that take an earlier run or recording up: their options. Work is imported by the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from align.cli.errors import guarded
from align.cli.flags import Allow, Budget, Capture, Debug, Json, Quiet, ResultJson, Verbose, run_named


def _run(default: str) -> Any:
    text = f"Directory of a run, or its name in align runs. Default: the newest {default}."
    return typer.Argument(metavar="[RUN]", help=text, callback=run_named)


Followed = Annotated[Path | None, _run("with tokens")]
Unended = Annotated[Path | None, _run("that can go on")]


def resume_command(
    run: Unended = None, json: ResultJson = False, quiet: Quiet = False, verbose: Verbose = False, debug: Debug = False
) -> None:
    """Go on with a run that was killed, stopped, or out of disk.

    Case and options are those of the run. Recordings that are whole are judged without the engines; otherwise both
    engines are started again, because a launch has to show that it repeats itself. A run that ended says its verdict.

    Examples: `align resume` (the newest run that can go on) · `align resume RUN` · `align runs` (lists them)
    """
    from align.cli import resume as work

    settings = work.ResumeSettings(run, json, quiet, verbose)
    raise typer.Exit(guarded(lambda: work.resume(settings), debug, json))


def replay_command(
    run: Followed = None,
    along: Annotated[str, typer.Option(help="Whose tokens are followed: candidate or reference.")] = "reference",
    out: Annotated[
        Path | None, typer.Option(help="New directory for the results. Default: one below the cache's runs/.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SIDE.NAME=VALUE", help="More engine options, as in align run.")
    ] = None,
    patch: Annotated[
        list[str] | None, typer.Option(metavar="SIDE=FILE", help="More patches, as in align run: try a fix.")
    ] = None,
    allow: Allow = None,
    capture: Capture = None,
    values_budget: Budget = None,
    json: ResultJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run an earlier run again, along the tokens of one side.

    The case and the options are those of the earlier run, and so are the tokens.

    Tensors are compared row by row, so both engines must be fed the same tokens. This feeds those of the earlier run,
    whatever the engines generate now: to see a divergence again after something was changed, to keep other values, or
    to go along the candidate's wrong tokens.

    The summary says what became of the earlier run: mended, not mended (the same first finding), moved (another one is
    first now), same or broken (it was aligned), or unknown. One thing alone may be changed: with two, or when versions,
    case, device, conditions or tokens differ as well, the pair is called inconclusive.

    Examples: `align replay RUN --patch candidate=fix.py` · `align replay RUN --along candidate --capture 'layers.3.*'`
    """
    from align.cli import resume as work

    settings = work.ReplaySettings(
        run=run,
        along=along,
        out=out,
        sets=tuple(set_ or ()),
        patches=tuple(patch or ()),
        allow=tuple(allow or ()),
        capture=tuple(capture or ()),
        values_budget=values_budget,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )
    raise typer.Exit(guarded(lambda: work.replay(settings), debug, json))


def reduce_command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Directory of a run, or its name in align runs. Default: the newest that diverged.",
            callback=run_named,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the smallest case. Default: one below the cache's reductions/."),
    ] = None,
    tries: Annotated[int, typer.Option(help="How many smaller cases are run at most.")] = 30,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the smallest case that still shows a run's first finding.

    Leaves out requests, generated tokens, waiting, ranks, layers and parts of prompts as long as the first finding
    stays the same: its path, kind, side and checkpoint. The finding itself says where to begin. Each try is an ordinary
    run with the options and patches of the whole (about as long as that run's launch, and less the smaller it gets).

    OUT holds reproduce.sh (one command that shows the finding again), case.json, the patches, the model if it has fewer
    layers now, the report in run/, and every try in reduction.json. After a stop the same command goes on.

    The exit code is 0 if the smallest case shows the finding, and 2 otherwise.

    Examples: `align reduce` · `align reduce RUN --out small` · `sh small/reproduce.sh`
    """
    from align.cli import reduce as work

    settings = work.ReduceSettings(run, out, tries, json, quiet)
    raise typer.Exit(guarded(lambda: work.execute(settings), debug, json))


def next_command(
    candidate: Annotated[
        Path, typer.Argument(metavar="A", help="Trace of the candidate, or a whole run.", callback=run_named)
    ],
    reference: Annotated[
        Path | None, typer.Argument(metavar="B", help="Trace of the reference; not after a run.", callback=run_named)
    ] = None,
    allow: Allow = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What to record next, of sides that are recorded apart or of a run.

    Compares two recordings as `align compare` does and prints the next two `align capture` commands, or that nothing
    more has to be recorded. The plan is that of `align run`: the request that shows it by itself first, with the values
    of the accused layer.

    What a run recorded of that request already, in `closer/`, counts.

    Examples: `align next CAND REF` · `align next RUN`
    """
    from align.cli import next as work

    raise typer.Exit(guarded(lambda: work.execute(candidate, reference, tuple(allow or ()), json), debug, json))
