"""The commands about arguments of attention, with their options: ``align fa``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.flags import Debug, Json, run_named

Language = Annotated[str, typer.Option(help="en or zh.")]

fa_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Check the arguments of FlashAttention and cache operators, which do not raise when they are wrong.",
    epilog="Examples: `align fa check CALL.json` · `align fa record RUN/candidate` · `align fa rules --severity ERROR`",
)


@fa_app.command("check")
def check_command(
    files: Annotated[list[Path], typer.Argument(metavar="CALL.json...", help="One call, or a list of calls, in each.")],
    lang: Language = "en",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what is wrong with calls that are described in files.

    A call is an object with `operator`, `arguments` and `context` (phase, layer, what the model's configuration asks
    for); tensors may be written as `bf16[8,4,128]` or `int32[3]=[2,5,8]`. `align.fa.call_record` writes one from a live
    call. Exit code 0: no ERROR; 1: there is one; 2: a file cannot be read. It is no verdict about precision.

    Examples: `align fa check CALL.json` · `align fa check layer0.json layer1.json --lang zh` ·
    `align fa check CALL.json --json`
    """
    from align.cli import fa_check as work

    raise typer.Exit(guarded(lambda: work.execute(files, lang, json), debug, json))


@fa_app.command("record")
def record_command(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace, or side directory of a run.", callback=run_named)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the calls are written.")] = Path("calls.json"),
    operator: Annotated[str, typer.Option(help="Only calls of this operator.")] = "",
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "",
    layer: Annotated[int | None, typer.Option(help="Only those of this layer.")] = None,
    step: Annotated[int | None, typer.Option(help="Only those of this step; 0 is the first prefill.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only those of this rank.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the calls of a recording into a file that `align fa check` takes.

    `align run` and `align capture` record every call of attention and cache operators before it is made. Each
    different one is written once, with its context and with `made`: rank, run, step, layers, how often, and the call
    site. Change an argument in the file and check it again, or send it to who maintains the operator. Calls of a
    program of your own are described by `align.fa.call_record`.

    Examples: `align fa record RUN/candidate` · `align fa record RUN/reference --phase decode --layer 0 --out one.json`
    """
    from align.attention.extract import Wanted
    from align.cli import fa_record as work

    wanted = Wanted(operator, phase, layer, step, rank)
    raise typer.Exit(guarded(lambda: work.execute(trace, wanted, out, json), debug, json))


@fa_app.command("rules")
def rules_command(
    operator: Annotated[str | None, typer.Option(help="Only those about this operator.")] = None,
    severity: Annotated[str | None, typer.Option(help="ERROR, WARN, REMIND, INFO or OK.")] = None,
    family: Annotated[str | None, typer.Option(help="Such as mask, lengths, version, mla or write.")] = None,
    lang: Language = "en",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the rules: id, severity, what they are about, what they say, and where each comes from.

    Examples: `align fa rules` · `align fa rules --operator npu_scatter_pa_kv_cache` ·
    `align fa rules --family mask --severity ERROR` · `align explain fa.mask.missing`
    """
    from align.cli import fa_rules as work

    raise typer.Exit(guarded(lambda: work.execute(operator, severity, family, lang, json), debug, json))
