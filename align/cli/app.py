"""The command as a whole: help, wrong usage, and the exit code."""

from __future__ import annotations

import sys

import typer
from typer.exceptions import TyperException

from align.cli import commands
from align.cli.errors import say_error
from align.errors import EXIT_NOT_COMPARABLE, UserError

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
        "`align run --case RUN/case.json` · `align compare RUN/candidate RUN/reference`. "
        "Exit codes: 0 aligned, 1 diverged, 2 could not compare."
    ),
)
app.command("run")(commands.run_command)
app.command("capture")(commands.capture_command)
app.command("compare")(commands.compare_command)
app.command("export")(commands.export_command)
app.command("report")(commands.report_command)
app.command("schema")(commands.schema_command)
app.command("taps")(commands.taps_command)
app.command("explain")(commands.explain_command)


def main() -> None:
    """Entry point of the command."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # a wrong option; without any argument the help has been shown instead
        context = getattr(error, "ctx", None)
        command = "align" if context is None else context.command_path
        if error.format_message():
            say_error(UserError(error.format_message(), f"see what there is: {command} --help"))
        sys.exit(EXIT_NOT_COMPARABLE)
    if code == EXIT_INTERRUPTED:
        sys.stderr.write("interrupted; everything that was started has been ended\n")
    sys.exit(code)
