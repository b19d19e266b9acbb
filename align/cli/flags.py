"""Options that several commands have, declared once. Nothing heavy is imported here, so that help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run_named(given: Path | None) -> Path | None:
    """A run by its path, or by the name that ``align runs`` lists; a callback of options and arguments."""
    if given is None:
        return None
    from align.run.earlier import named_run

    return named_run(given)


Device = Annotated[str, typer.Option(help="simnpu (simulated, runs anywhere) or ascend.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Go on although this condition is false or unreadable; the verdict says so."),
]
Capture = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Checkpoints whose values are kept, as in 'layers.0.*'. Default: by budget."),
]
Budget = Annotated[int | None, typer.Option(metavar="MB", help="Values kept per side at most. Default: 512.")]
Policy = Annotated[
    str,
    typer.Option(
        help="derived (from dtype and depth) or seed (thresholds of the project's own alignment guide alone)."
    ),
]
Lean = Annotated[
    bool,
    typer.Option(
        "--lean",
        help="Record as little as still names a fault: the worst of each operator's own error and digests of a few "
        "rows; then values of the accused operator alone, of one request. The two recordings take about 2 % of what "
        "all values take; the transplants of a confirmation come on top (--no-confirm leaves them out). Cache indices "
        "are not recorded.",
    ),
]
NoAudit = Annotated[
    bool,
    typer.Option("--no-audit", help="Do not record the KV cache's indices; whether they are right is then not known."),
]
NoFa = Annotated[
    bool,
    typer.Option(
        "--no-fa",
        help="Do not record the arguments of attention and cache operators; whether they are right is then not known.",
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Run the case in a fresh engine of each side as well: a run that leaves something behind in an engine is "
        "a finding. Otherwise only a side that does not repeat itself is tried so.",
    ),
]
ReplayRouting = Annotated[
    str,
    typer.Option(
        "--replay-routing",
        metavar="auto|always|never",
        help="Models with experts: where a near-tie of a router makes the sides choose different experts, nothing "
        "behind it can be compared. Then the candidate is recorded once more with the reference's expert ids (the "
        "weights of these experts are its own), so that all rows are compared. auto: if near-ties hide rows and "
        "nothing else was found; it costs one more run of the candidate. always: also if something was found. With one "
        "data-parallel group and without expert parallelism.",
    ),
]
Floor = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE|auto|none",
        help="Calibrated floor that narrows the derived policy (align calibrate). auto: one of the same dtype, device "
        "and architecture, if there is one.",
    ),
]
MinCoverage = Annotated[
    float,
    typer.Option(metavar="PERCENT", help="Checkpoints that must be compared before anything is called aligned."),
]
LaunchTimeout = Annotated[float, typer.Option(help="Seconds an engine may take to start.")]
StepTimeout = Annotated[float, typer.Option(help="Seconds an engine may take for one step.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict, and where the rest is.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Everything: prompts, ids, conditions.")]
Lang = Annotated[str, typer.Option(help="en, or zh for report.zh.md beside report.md, which stays English.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON on standard output, and everything else on standard error.")
]
ResultJson = Annotated[
    bool, typer.Option("--json", help="Print result.json on standard output, and everything else on standard error.")
]
Ladder = Annotated[
    bool,
    typer.Option(
        "--ladder",
        help="Run simpler layouts as well, from the simplest that fits up to the asked one, and say which dimension "
        "introduces a divergence. By itself when a parallel layout diverges.",
    ),
]
NoLadder = Annotated[bool, typer.Option("--no-ladder", help="Run the asked layout alone, also when it diverges.")]
Layouts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help='Instead of the ladder\'s table: any layouts, as in "tp1, tp2, tp2 dp2"; the last is the target.',
    ),
]
MinTp = Annotated[
    int | None,
    typer.Option(help="Where the ladder begins. Default: the smallest TP whose weights and cache fit the device."),
]
DeviceMemory = Annotated[
    float | None, typer.Option(metavar="GB", help="Memory of one device. Default: what the simulated device claims.")
]
Against = Annotated[
    str,
    typer.Option(
        metavar="[SIDE:]LAYOUT",
        help="The same engine at a simpler layout as reference, as in tp1; self: the simplest that fits. Tells wrong "
        "parallelism from engines that differ.",
    ),
]
Only = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Run only this request of the case; may be given again.")
]
EngineName = Annotated[str, typer.Argument(metavar="ENGINE", help="lmdeploy or vllm.")]
