"""Options, commands and exit codes. Work is imported by the command that needs it, so that help answers at once."""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from align.errors import EXIT_NOT_COMPARABLE, SideError, UserError

#: What typer answers for Ctrl-C.
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="align",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Runs one model on two inference engines in controlled conditions and says where they part.",
    epilog=(
        "Examples: `align run --model qwen3` · `align run --model /models/Qwen3-0.6B --prompts prompts.jsonl` · "
        "`align run --case RUN/case.json`. Exit codes: 0 aligned, 1 diverged, 2 could not compare."
    ),
)


@app.callback()
def _root() -> None:
    """Keeps subcommands even while there is one only."""


@app.command("run")
def run_command(
    model: Annotated[
        str | None, typer.Option(help="Preset (qwen3, smollm2) or a local Hugging Face checkpoint. Default: qwen3.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each with text, messages or token_ids. Default: 1, 7, 33, 200 tokens."),
    ] = None,
    case: Annotated[
        Path | None,
        typer.Option(help="Run the case.json of an earlier run again; replaces the options that make a case."),
    ] = None,
    device: Annotated[str, typer.Option(help="simnpu (simulated, runs anywhere) or ascend.")] = "simnpu",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (bf16) or float16 (fp16). Default: bfloat16.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size: 1, or tp × dp.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate per request. Default: 16.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in one KV-cache block. Default: 128.")] = None,
    numerics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIDE=NAME",
            help="Numerics of the simulated NPU per side: candidate=native, reference=fp32-internal (default).",
        ),
    ] = None,
    replay: Annotated[
        str, typer.Option(help="Teacher-forced replay of both sides: auto (when tokens differ), always or never.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="New directory for the results. Default: one below the cache's runs/.")
    ] = None,
    launch_timeout: Annotated[float, typer.Option(help="Seconds an engine may take to start.")] = 600.0,
    step_timeout: Annotated[float, typer.Option(help="Seconds an engine may take for one step.")] = 180.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Whole prompts and ids.")] = False,
    debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False,
) -> None:
    """Launch both engines, feed both the same token ids, compare the greedy tokens.

    The run directory keeps the case, what was read back from the engines, every token with its logprobs, and the
    engines' logs.

    Example: `align run --model smollm2 --dtype fp16 --max-new-tokens 32`
    """
    from align.cli import run

    settings = run.RunSettings(
        model=model,
        prompts=prompts,
        case_file=case,
        device=device,
        dtype=dtype,
        layout=(tp, dp, ep),
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        numerics=tuple(numerics or ()),
        replay=replay,
        out=out,
        launch_timeout=launch_timeout,
        step_timeout=step_timeout,
        quiet=quiet,
        verbose=verbose,
    )
    raise typer.Exit(_guarded(lambda: run.execute(settings), debug))


def _guarded(work: Any, debug: bool) -> int:
    """Run ``work``; errors become a message and an exit code that no verdict has."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return int(work())
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say_error(error)
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        what = f"this is a defect of align: {type(error).__name__}: {error}"
        hint = "report it with the traceback above" if debug else "run it again with --debug and report what it prints"
        _say_error(UserError(what, hint))
        return EXIT_NOT_COMPARABLE


def _terminated(number: int, frame: Any) -> NoReturn:
    """``kill`` ends the command through its clean-up, as Ctrl-C does."""
    raise SystemExit(128 + number)


def _say_error(error: UserError) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    if isinstance(error, SideError) and error.log_tail:
        console.print(f"[dim]last lines of the {error.side}'s log:[/dim]")
        for line in error.log_tail:
            console.print(f"[dim]  {escape(line)}[/dim]")
    console.print(f"[bold red]error:[/bold red] {escape(error.message)}")
    console.print(f"[bold]next:[/bold] {escape(error.hint)}")


def main() -> None:
    """Entry point of the command."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # a wrong option; without any argument the help has been shown instead
        context = getattr(error, "ctx", None)
        command = "align" if context is None else context.command_path
        if error.format_message():
            _say_error(UserError(error.format_message(), f"see what there is: {command} --help"))
        sys.exit(EXIT_NOT_COMPARABLE)
    if code == EXIT_INTERRUPTED:
        sys.stderr.write("interrupted; everything that was started has been ended\n")
    sys.exit(code)
